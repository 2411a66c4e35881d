"""Owns the libraries of a comparison: a workload's candidate, built as kerneldecl does, and TVM's default schedule.

Knows nothing of how they are timed or of what else is compared.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kerneldecl.model import Arch, Candidate, Workload

SYMBOL = "kd_main"


@dataclass(frozen=True)
class Entry:
    """One workload on one GPU."""

    root: Path
    workload: Workload
    arch: Arch

    @property
    def name(self) -> str:
        return self.workload.name


@dataclass(frozen=True)
class Built:
    """A kernel in a library, or the reason why there is none."""

    label: str
    library: str = ""
    symbol: str = SYMBOL
    takes_row: bool = False
    """Whether it takes a row, a matrix and a row, where the workload has a matrix and a vector."""
    failure: str = ""


def label_of(candidate: Candidate) -> str:
    return f"{candidate.template} " + " ".join(f"{name}={value}" for name, value in candidate.params)


def proposals(entry: Entry, policy: str, top_k: int) -> tuple[Candidate, ...]:
    """Return what a policy proposes, best first."""
    from kerneldecl.compiler import canonical
    from kerneldecl.compiler.iter_space import iter_space
    from kerneldecl.plugins.load import load_module, load_rule

    rule = load_rule(entry.root, entry.workload.rule).of(entry.root, dict(entry.workload.attrs))
    proposed = load_module("policies", entry.root, policy).propose(iter_space(canonical.lower(rule)), entry.arch, top_k)
    return tuple(proposal.candidate for proposal in proposed)


def build_candidate(entry: Entry, candidate: Candidate, folder: str) -> Built:
    """Return the candidate's library, built as kerneldecl builds it; raise whatever its template or its compiler raises."""
    from kerneldecl.compiler import canonical
    from kerneldecl.compiler.cpu import apply_candidate
    from kerneldecl.plugins.load import load_rule

    rule = load_rule(entry.root, entry.workload.rule).of(entry.root, dict(entry.workload.attrs))
    applied = apply_candidate(entry.root, canonical.lower(rule), candidate, entry.arch)
    assert applied is not None, "tuning has applied it before"
    return _linked(label_of(candidate), applied.mod, entry, folder)


def build_default(entry: Entry, folder: str) -> Built:
    """Return TVM's default schedule of the same computation, compiled as the candidates are.

    TVM itself compiles with fast math, which affects neither bandwidth nor GEMM. Indices have 32 bits, TE's default: TVM's
    tensor intrinsics accept no others.
    """
    from tvm import te
    from tvm.s_tir.dlight import ApplyDefaultSchedule, gpu

    from kerneldecl.compiler import canonical
    from kerneldecl.compiler.cpu import target_of
    from kerneldecl.plugins.load import load_rule

    rule_name, attrs = entry.workload.rule, dict(entry.workload.attrs)
    if takes_row := rule_name == "gemv":
        # dlight's GEMV keeps its first operand in shared memory, where the matrix does not fit: in a GEMM of one row it is the vector.
        names = ("n", "k", "dtype", "accum_dtype", "out_dtype")
        rule_name, attrs = "matmul", {**{name: attrs[name] for name in names}, "m": 1, "layout": "nt" if attrs["layout"] == "n" else "nn"}
    rule = load_rule(entry.root, rule_name).of(entry.root, attrs)
    rules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Transpose(), gpu.Fallback())
    try:
        with target_of(entry.arch):
            mod = ApplyDefaultSchedule(*rules)(canonical.canonical_module(te.create_prim_func(rule.lower())))
        return replace(_linked("dlight", mod, entry, folder), takes_row=takes_row)
    except Exception as error:  # noqa: BLE001  a contender that cannot be compared is a result
        lines = str(error).strip().splitlines()
        return Built("dlight", failure=f"{type(error).__name__}: {lines[-1][:200] if lines else 'no message'}")


def _linked(label: str, mod: Any, entry: Entry, folder: str) -> Built:
    from kerneldecl.compiler.cuda import compile_cuda_object
    from kerneldecl.store.local import LocalStore
    from kerneldecl.toolchain.cuda_objects import link_cuda_library

    work = Path(tempfile.mkdtemp(dir=folder))
    path = work / "kernel.o"
    path.write_bytes(compile_cuda_object(mod, entry.arch, SYMBOL, LocalStore(work)).content)
    link_cuda_library(path.with_suffix(".so"), [path])
    return Built(label, str(path.with_suffix(".so")))
