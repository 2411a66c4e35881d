"""Owns the kernels of a comparison as libraries: a workload's candidate, built as kerneldecl does, and TVM's default schedule.

Knows nothing of how they are timed or of who else contends.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

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
    failure: str = ""


def label_of(candidate: Candidate) -> str:
    return f"{candidate.template} " + " ".join(f"{name}={value}" for name, value in candidate.params)


def proposals(case: Case, policy: str, top_k: int) -> tuple[Candidate, ...]:
    """Return what a policy proposes, best first."""
    from kerneldecl.compiler import tensorir
    from kerneldecl.compiler.space import iter_space
    from kerneldecl.plugins import load_policy, load_rule

    rule = load_rule(case.root, case.workload.rule).of(case.root, dict(case.workload.attrs))
    proposed = load_policy(case.root, policy).propose(iter_space(tensorir.lower(rule)), case.arch, top_k, ())
    return tuple(proposal.candidate for proposal in proposed)


def build_candidate(case: Case, candidate: Candidate, folder: str) -> Built:
    """Return the candidate's library, built as kerneldecl builds it; raise what its template or its compiler raise."""
    from kerneldecl.compiler import tensorir
    from kerneldecl.compiler.codegen import apply_candidate
    from kerneldecl.compiler.cuda import compile_cuda_object
    from kerneldecl.cudalink import link_cuda_library
    from kerneldecl.plugins import load_rule
    from kerneldecl.stores.local import LocalStore

    rule = load_rule(case.root, case.workload.rule).of(case.root, dict(case.workload.attrs))
    schedule = apply_candidate(case.root, tensorir.lower(rule), candidate, case.arch)
    assert schedule is not None, "tuning has applied it before"
    work = Path(tempfile.mkdtemp(dir=folder))
    path = work / "kernel.o"
    path.write_bytes(compile_cuda_object(schedule.mod, case.arch, SYMBOL, LocalStore(work)).content)
    link_cuda_library(path.with_suffix(".so"), [path])
    return Built(label_of(candidate), str(path.with_suffix(".so")))


def build_default(case: Case, folder: str) -> Built:
    """Return TVM's default schedule of the same computation, compiled as TVM compiles it where it finds CUDA.

    In a process that `import_torch_first` has prepared.
    """
    import tvm
    from tvm.s_tir import dlight

    from kerneldecl.compiler import tensorir
    from kerneldecl.compiler.codegen import target_of
    from kerneldecl.plugins import load_rule

    gpu = dlight.gpu
    try:
        rule = load_rule(case.root, case.workload.rule).of(case.root, dict(case.workload.attrs))
        target = target_of(case.arch)
        with target:
            rules = (gpu.Matmul(), gpu.GEMV(), gpu.Reduction(), gpu.GeneralReduction(), gpu.Transpose(), gpu.Fallback())
            mod = dlight.ApplyDefaultSchedule(*rules)(tensorir.lower(rule))
            compiled = tvm.compile(mod, target=target)
        path = Path(tempfile.mkdtemp(dir=folder)) / "default.so"
        compiled.export_library(str(path))
    except Exception as error:  # noqa: BLE001  it is a contender; that it cannot compete is a result
        return Built("dlight", failure=_last_words(error))
    return Built("dlight", str(path), "main")


def import_torch_first() -> None:
    """Prepare a process for TVM's own compilation: torch brings the CUDA runtime that TVM links to, and must come before it."""
    import torch  # noqa: F401


def _last_words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1][:200] if lines else 'no message'}"
