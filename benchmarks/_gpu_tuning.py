"""Owns what a comparison is built from: a workload's candidates and the default schedule, as libraries, in many processes.

Knows nothing of how they are timed or of who else contends.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kerneldecl.model import Arch, Candidate, Proposal, Workload

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
    """A kernel in a library of its own, or why there is none."""

    label: str
    library: str = ""
    symbol: str = SYMBOL
    predicted_secs: float = 0.0
    build_secs: float = 0.0
    note: str = ""
    """Registers and spills, or the failure."""


def label_of(candidate: Candidate) -> str:
    return f"{candidate.template} " + " ".join(f"{name}={value}" for name, value in candidate.params)


def proposals(case: Case, top_k: int) -> list[Proposal]:
    """Return what the first policy proposes that has anything to propose, best first."""
    from kerneldecl.compiler import tensorir
    from kerneldecl.compiler.space import iter_space
    from kerneldecl.plugins import load_policy, load_rule
    from kerneldecl.policies.auto import BY_KIND

    rule = load_rule(case.root, case.workload.rule).of(case.root, dict(case.workload.attrs))
    space = iter_space(tensorir.lower(rule))
    policies = BY_KIND[case.arch.kind] if case.workload.policy == "auto" else (case.workload.policy,)
    found = (load_policy(case.root, policy).propose(space, case.arch, top_k, ()) for policy in policies)
    return list(next(filter(None, found), ()))


def build_candidate(case: Case, proposal: Proposal, folder: str) -> Built:
    """Return the candidate's library, built as kerneldecl builds it."""
    from kerneldecl.compiler import tensorir
    from kerneldecl.compiler.codegen import apply_candidate
    from kerneldecl.compiler.cuda import compile_cuda_object
    from kerneldecl.cudalink import link_cuda_library
    from kerneldecl.plugins import load_rule
    from kerneldecl.stores.local import LocalStore

    start = time.perf_counter()
    candidate, label = proposal.candidate, label_of(proposal.candidate)
    try:
        rule = load_rule(case.root, case.workload.rule).of(case.root, dict(case.workload.attrs))
        schedule = apply_candidate(case.root, tensorir.lower(rule), candidate, case.arch)
        if schedule is None:
            return Built(label, note="the template does not apply")
        work = Path(tempfile.mkdtemp(dir=folder))
        made = compile_cuda_object(schedule.mod, case.arch, SYMBOL, LocalStore(work))
        (work / "kernel.o").write_bytes(made.content)
        link_cuda_library(work / "kernel.so", [work / "kernel.o"])
    except Exception as error:  # noqa: BLE001  whatever a template raises is told beside its candidate
        return Built(label, predicted_secs=proposal.predicted_secs, note=_last_words(error))
    usage = [launch.usage for launch in made.launches]
    note = f"{'+'.join(str(used.registers) for used in usage)} registers, {sum(used.spill_bytes for used in usage)} bytes spilled"
    return Built(label, str(work / "kernel.so"), SYMBOL, proposal.predicted_secs, time.perf_counter() - start, note)


def build_default(case: Case, folder: str) -> Built:
    """Return TVM's default schedule of the same computation, compiled as TVM compiles it where it finds CUDA.

    In a process that `import_torch_first` has prepared.
    """
    import tvm
    from tvm.s_tir import dlight

    from kerneldecl.compiler import tensorir
    from kerneldecl.compiler.codegen import target_of
    from kerneldecl.plugins import load_rule

    start = time.perf_counter()
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
        return Built("dlight", note=_last_words(error))
    return Built("dlight", str(path), "main", build_secs=time.perf_counter() - start)


def import_torch_first() -> None:
    """Prepare a process for TVM's own compilation: torch brings the CUDA runtime that TVM links to, and must come before it."""
    import torch  # noqa: F401


def _last_words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1][:200] if lines else 'no message'}"
