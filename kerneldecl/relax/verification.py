"""Owns the verification of a function that TVM compiled for a model: run in a worker on random inputs, compared with its reference.

Knows nothing of schedules, nor of what becomes of a wrong function. A function is a workload of rule `tensor_ir` here, so that
reference, inputs, tolerance, poison and guards are those of kernels.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.compiler.model_import.read_model import function_problem
from kerneldecl.errors import ToolchainError
from kerneldecl.hardware import gpu_lock, host
from kerneldecl.hardware.cuda_driver import DriverGpu
from kerneldecl.plugins.load import load_rule
from kerneldecl.relax.default_schedules import Verdict, Verify
from kerneldecl.runners.local import LocalRunner
from kerneldecl.runners.verdict import judged
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.toolchain.cxx import compiler

LIMIT_SECS = 120.0
SEED = 23
_RULE = "tensor_ir"


def verification(target: tvm.target.Target) -> Callable[[], contextlib.AbstractContextManager[Verify]]:
    """Return what gives the judge of functions that are compiled for a target, with its worker processes."""

    @contextlib.contextmanager
    def judging() -> Iterator[Verify]:
        model = _model_here(target)
        unseen = "" if model is not None else f"it is for {_named(target)}, which is not here"
        with scratch_folder() as folder, LocalRunner(1, len(os.sched_getaffinity(0))) as runner:
            numbers = itertools.count()

            def judge(func: Any, library: Any, symbol: str) -> Verdict:
                if reason := unseen or function_problem(func):
                    return Verdict(is_wrong=False, text=f"not verified: {reason}")
                return _verdict(folder, func, (library, f"f{next(numbers)}", symbol), (runner, model or ""))

            yield judge

    return judging


def _model_here(target: tvm.target.Target) -> str | None:
    """Return the model of a GPU of this machine that runs code for a target, empty for its CPU; None where there is neither."""
    if target.kind.name == "cuda":
        wanted = str(target.attrs["arch"]).rstrip("af")
        return next(
            (gpu.model for gpu in _gpus_here() if f"sm_{gpu.compute_capability_major}{gpu.compute_capability_minor}" == wanted), None
        )
    features = (str(feature) for feature in target.attrs.get("mattr", ()))
    runs = host.runs(str(target.attrs.get("mcpu", "")), str(target.attrs.get("mtriple", ""))) and all(
        feature.startswith("-") or feature == host.NO_SCATTER for feature in features
    )
    return "" if runs else None


def _gpus_here() -> tuple[DriverGpu, ...]:
    try:
        return gpu_lock.gpus_of("")
    except ToolchainError:
        return ()


def _named(target: tvm.target.Target) -> str:
    return (
        str(target.attrs["arch"])
        if target.kind.name == "cuda"
        else " ".join([str(target.attrs.get("mcpu", "")), *target.attrs.get("mattr", ())])
    )


def _verdict(folder: Path, func: Any, compiled: tuple[Any, str, str], where: tuple[LocalRunner, str]) -> Verdict:
    """Return the verdict on a compiled function: `compiled` is its library, a name for files, and its symbol.

    It runs `where` says: with a runner, on a model of GPU, or on the CPU where that is empty.
    """
    library, name, symbol = compiled
    runner, gpu = where
    (folder / f"{name}.json").write_text(tvm.ir.save_json(canonical_module(func)["main"]), encoding="utf-8")
    library.export_library(str(folder / f"{name}_{symbol}.so"), cc=compiler())
    attrs = {"file": f"{name}.json"}
    # TVM's own schedules leave NaN out of maxima and minima.
    spec = {"root": str(folder), "rule": _RULE, "attrs": attrs, "seed": SEED, "nan": "ignore"}
    on = {"device": "cuda" if gpu else "cpu", "model": gpu, "spec": spec}
    prepared = runner.measure({"action": "prepare", **on}, LIMIT_SECS)
    if "failure" in prepared:
        return Verdict(is_wrong=False, text=f"not verified: its reference fails: {prepared['failure']}")
    answer = runner.measure({"action": "verify", **on, "library": str(folder / f"{name}_{symbol}.so"), "symbol": symbol}, LIMIT_SECS)
    if failure := judged(answer, load_rule(folder, _RULE).of(folder, attrs).tolerance()):
        return Verdict(is_wrong=True, text=failure.removeprefix("wrong: "))
    return Verdict(is_wrong=False, text=f"verified, relative error {float(answer['error']):.2g}")
