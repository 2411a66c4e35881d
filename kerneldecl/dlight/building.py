"""Owns the parallel build of one function's configurations, their measurement where the GPU is present, and their results.

Knows nothing of how candidates are compiled, verified or timed: a function becomes a workload of the rule `tensor_ir` in a
folder of its own, and kerneldecl's core does the rest.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.artifact.kernels import kernel_of, load_library
from kerneldecl.compiler import actions, canonical
from kerneldecl.compiler.cpu import ScheduledModule, apply_candidate
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.dlight.device import CUDA, Target
from kerneldecl.dlight.policy import Config
from kerneldecl.dlight.tensorize import prim_func
from kerneldecl.errors import TuningError
from kerneldecl.hardware import host
from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.model import Arch, Proposal, Trial, Workload
from kerneldecl.planning.plan import VERIFYING
from kerneldecl.plugins.find import STANDARD
from kerneldecl.runners.local import LocalRunner
from kerneldecl.store.keys import symbol
from kerneldecl.store.local import LocalStore
from kerneldecl.store.results import Lowered
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.timing import measuring
from kerneldecl.toolchain import nvcc
from kerneldecl.toolchain.versions import PACKAGES, installed
from kerneldecl.tuning.measure import Preparation, measure
from kerneldecl.tuning.no_winner import why_no_winner
from kerneldecl.tuning.race import ranking
from kerneldecl.tuning.search import build_all
from kerneldecl.tuning.task import Task

FILE = "function.json"


class _Folder:
    """A temporary folder that is removed when nothing refers to this object any more, or the process ends."""

    def __init__(self) -> None:
        held = contextlib.ExitStack()
        self.path = held.enter_context(scratch_folder())  # which a later process removes if this one is killed
        weakref.finalize(self, held.close)


@dataclass(frozen=True, repr=False)
class Result:
    """The result of one configuration."""

    config: Config
    arch: Arch
    latency: float | None
    """Milliseconds per call, the median of samples on the GPU; None where it was not measured, see `reason`."""
    error: float | None
    """Largest relative error against the reference; None where the kernel was not run."""
    reason: str
    """Why there is no latency; empty where there is one."""
    library: Path | None
    """The shared library with the kernel's cubin, None where it was not built; it exists as long as a result of the same call."""
    symbol: str
    """The kernel's symbol in the library."""
    registers: int
    """32-bit registers per thread."""
    smem_bytes: int
    """Shared memory per thread block."""
    spill_bytes: int
    """Local memory per thread: 0 where registers suffice."""
    _func: Any
    _folder: _Folder

    def __repr__(self) -> str:
        return f"{self.config}: {f'{self.latency:.4g} ms' if self.measured else self.reason}"

    @property
    def measured(self) -> bool:
        """Say whether the result was verified and timed on the GPU, rather than ranked by the model."""
        return self.latency is not None

    @functools.cached_property
    def _scheduled(self) -> ScheduledModule:
        mod = canonical.canonical_module(self._func)
        scheduled = apply_candidate(STANDARD, mod, self.config.candidate, self.config.arch_of(self.arch))
        if scheduled is None:
            raise TuningError(f"{self.config} has no schedule: {self.reason}")
        return scheduled

    @property
    def schedule(self) -> Any:
        """TVM's schedule of the function, its trace included; None where `mod` is traceless.

        Raise TuningError where the template does not apply.
        """
        return self._scheduled.schedule

    @property
    def mod(self) -> tvm.IRModule:
        """The scheduled module, its function named `main`; raise TuningError where the template does not apply."""
        return self._scheduled.mod

    @functools.cached_property
    def code(self) -> str:
        """The CUDA source that the cubin is compiled from."""
        return cuda_source(self.mod, self.config.arch_of(self.arch), self.symbol)

    @functools.cached_property
    def kernel(self) -> Callable[..., object]:
        """The kernel as a function of arrays on the GPU, inputs then outputs, from TVM, torch or any other DLPack producer.

        Raise TuningError where it was not built.
        """
        if self.library is None:
            raise TuningError(f"{self.config} was not built: {self.reason}")
        return kernel_of(load_library(self.library, "cuda"), self.symbol)


def apply_and_build(
    func: Any, configs: Sequence[Config], arch: CUDA | Target, parallel_build: bool = True, runner: LocalRunner | None = None
) -> tuple[list[Result], Result]:
    """Build every configuration, measure all where the arch is this machine's GPU, and return the results and the best one.

    Results are in the order of the configurations, each with its own. The best is the fastest that computes, on random
    inputs and poisoned memory, what the function itself does on the CPU at a higher precision (`kerneldecl.compiler.reference`).
    Without that GPU the best is the model's first one without register spills, and no result is `measured`.

    Worker processes can be shared by the tuning of several functions: `with workers() as runner:`.

    Raise TuningError where nothing passes, ToolchainError without a CUDA compiler for the arch, ValueError or TypeError
    for a function that takes anything but inputs and then outputs of fixed shapes.
    """
    device = arch if isinstance(arch, CUDA) else CUDA(arch)
    if runner is not None:
        return _built_and_measured(func, configs, device, runner)
    with workers(parallel_build=parallel_build) as started:
        return _built_and_measured(func, configs, device, started)


def workers(*, parallel_build: bool = True) -> LocalRunner:
    """Return worker processes as a context manager: one per core to build, and one to measure.

    They start when they are first needed. The measuring process holds a lock on its GPU, which other processes of kerneldecl wait for.
    """
    cores = host.detect().the_cpu.cores
    return LocalRunner(cores if parallel_build else 1, cores)


def _built_and_measured(func: Any, configs: Sequence[Config], device: CUDA, runner: LocalRunner) -> tuple[list[Result], Result]:
    func = prim_func(func)
    if not configs:
        raise ValueError("there are no configurations to build")
    folder = _Folder()
    task = _task(func, configs, device.arch, folder.path)
    proposals = [Proposal(config.candidate, config.predicted_secs) for config in configs]
    reason = why_not_measured_here(device.arch)
    preparation = Preparation(task, runner, store := LocalStore(task.cache))
    found = build_all(task, proposals, runner, _quiet, None if reason else preparation.start_for)
    if not reason:
        found = measure(task, found, preparation, runner, store, _quiet)
    unmeasured = f"not measured: {reason}; ranked by the model" if reason else ""
    results = [_result(task, m, config, unmeasured, (func, folder)) for m, config in zip(found, configs, strict=True)]
    return results, results[_best(found, is_measured=not reason)]


def _task(func: Any, configs: Sequence[Config], arch: Arch, root: Path) -> Task:
    """Return the function as a workload of the rule `tensor_ir`, in a folder that becomes a workspace for it alone."""
    (root / FILE).write_text(tvm.ir.save_json(func), encoding="utf-8")
    (root / "objects").mkdir()
    lowered = Lowered(actions.lower(str(root), "tensor_ir", {"file": FILE}))
    workload = Workload(
        name="function",
        target=arch.name,
        rule="tensor_ir",
        attrs=(("file", FILE),),
        policy="",
        top_k=0,
        tolerance=None,
        tags=(),
        line=0,
    )
    cuda = nvcc.compiler_for(str(dict(arch.tvm_target)["arch"])).version
    toolchain = {**{tool: installed(package) for tool, package in PACKAGES.items()}, "cuda": cuda}
    return Task(
        root=root,
        cache=root / "cache",
        workload=workload,
        arch=arch,
        groups=(),
        lowered=lowered,
        tolerance=lowered.tolerance,
        protocol=measuring(arch.kind),
        seed=int(VERIFYING["seed"]),
        reference_digest="",
        toolchain=toolchain,
        folder=root / "objects",
        times_finalists=False,
        build_archs={config.candidate: config.arch_of(arch) for config in configs},
    )


def _result(task: Task, found: Trial, config: Config, unmeasured: str, kept: tuple[Any, _Folder]) -> Result:
    return Result(
        config=config,
        arch=task.arch,
        latency=found.run_secs * 1e3 if found.samples else None,
        error=found.error,
        reason=found.failure or unmeasured,
        library=task.library_path(found.code_digest) if found.code_digest else None,
        symbol=symbol(task.lowered.computation),
        registers=found.registers,
        smem_bytes=found.smem_bytes,
        spill_bytes=found.spill_bytes,
        _func=kept[0],
        _folder=kept[1],
    )


def _best(found: Sequence[Trial], *, is_measured: bool) -> int:
    """Return the index of the best result; raise TuningError where there is none."""
    if is_measured:
        winner = ranking(found)[0][0]
        places = [place for place, m in enumerate(found) if m is winner and m.samples]
    else:
        built_places = [place for place, m in enumerate(found) if m.code_digest]
        places = sorted(built_places, key=lambda place: (found[place].spill_bytes > 0, found[place].predicted_secs, place))
    if not places:
        raise TuningError(why_no_winner(found))
    return places[0]


def _quiet(doing: str, done: int, total: int, best_secs: float | None) -> None:
    del doing, done, total, best_secs
