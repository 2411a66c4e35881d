"""Owns the kernels of a comparison as libraries: a workload's candidate, built as kerneldecl does, and TVM's default schedule.

Knows nothing of how they are timed or of who else contends.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kerneldecl.model import Arch, Candidate, Workload

SYMBOL = "kd_main"


@dataclass(frozen=True)
class Case:
    """One workload on one GPU."""

    root: Path
    workload: Workload
    arch: Arch

    @property
    def name(self) -> str:
        return self.workload.name


@dataclass(frozen=True)
class Built:
    """A kernel in a library, or why there is none."""

    label: str
    library: str = ""
    symbol: str = SYMBOL
    takes_row: bool = False
    """Whether its arguments are a row, a matrix and a row, of a workload that takes a matrix and a vector."""
    failure: str = ""


def label_of(candidate: Candidate) -> str:
    return f"{candidate.template} " + " ".join(f"{name}={value}" for name, value in candidate.params)


def proposals(case: Case, policy: str, top_k: int) -> tuple[Candidate, ...]:
    """Return what a policy proposes, best first."""
    from kerneldecl.compiler import canonical
    from kerneldecl.compiler.iter_space import iter_space
    from kerneldecl.plugins.load import load_module, load_rule

    rule = load_rule(case.root, case.workload.rule).of(case.root, dict(case.workload.attrs))
    proposed = load_module("policies", case.root, policy).propose(iter_space(canonical.lower(rule)), case.arch, top_k)
    return tuple(proposal.candidate for proposal in proposed)


def build_candidate(case: Case, candidate: Candidate, folder: str) -> Built:
    """Return the candidate's library, built as kerneldecl builds it; raise what its template or its compiler raise."""
    from kerneldecl.compiler import canonical
    from kerneldecl.compiler.cpu import apply_candidate
    from kerneldecl.plugins.load import load_rule

    rule = load_rule(case.root, case.workload.rule).of(case.root, dict(case.workload.attrs))
    applied = apply_candidate(case.root, canonical.lower(rule), candidate, case.arch)
    assert applied is not None, "tuning has applied it before"
    return _linked(label_of(candidate), applied.mod, case, folder)


def build_default(case: Case, folder: str) -> Built:
    """Return TVM's default schedule of the same computation, compiled as the candidates are.

    TVM's own compilation differs in quick arithmetic, which no bandwidth and no product depends on. Indices have 32 bits, as
    TE makes them: TVM's tensor intrinsics do not take others.
    """
    from tvm import te
    from tvm.s_tir.dlight import ApplyDefaultSchedule, gpu

    from kerneldecl.compiler import canonical
    from kerneldecl.compiler.cpu import target_of
    from kerneldecl.plugins.load import load_rule

    rule_name, attrs = case.workload.rule, dict(case.workload.attrs)
    if takes_row := rule_name == "gemv":
        # It keeps in shared memory what is read first, for which a matrix is too large; so the vector is, as a row.
        names = ("n", "k", "dtype", "accum_dtype", "out_dtype")
        rule_name, attrs = "matmul", {**{name: attrs[name] for name in names}, "m": 1, "layout": "nt" if attrs["layout"] == "n" else "nn"}
    rule = load_rule(case.root, rule_name).of(case.root, attrs)
    rules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Transpose(), gpu.Fallback())
    try:
        with target_of(case.arch):
            mod = ApplyDefaultSchedule(*rules)(canonical.canonical_module(te.create_prim_func(rule.lower())))
        return replace(_linked("dlight", mod, case, folder), takes_row=takes_row)
    except Exception as error:  # noqa: BLE001  it is a contender; that it cannot compete is a result
        lines = str(error).strip().splitlines()
        return Built("dlight", failure=f"{type(error).__name__}: {lines[-1][:200] if lines else 'no message'}")


def _linked(label: str, mod: Any, case: Case, folder: str) -> Built:
    from kerneldecl.compiler.cuda import compile_cuda_object
    from kerneldecl.store.local import LocalStore
    from kerneldecl.toolchain.cuda_objects import link_cuda_library

    work = Path(tempfile.mkdtemp(dir=folder))
    path = work / "kernel.o"
    path.write_bytes(compile_cuda_object(mod, case.arch, SYMBOL, LocalStore(work)).content)
    link_cuda_library(path.with_suffix(".so"), [path])
    return Built(label, str(path.with_suffix(".so")))
