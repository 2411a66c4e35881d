"""Owns the verification of a function that TVM compiled for a model: run in a worker on random inputs, compared with its reference.

Knows nothing of schedules, nor of what becomes of a wrong function. A function is a workload of rule `tensor_ir` here, so that
reference, inputs, tolerance, poison and guards are those of kernels.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.compiler.model_import.read_model import function_problem
from kerneldecl.hardware import gpu_lock, host
from kerneldecl.plugins.load import load_rule
from kerneldecl.relax.default_schedules import Verdict, Verify
from kerneldecl.runners.local import LocalRunner
from kerneldecl.toolchain.cxx import compiler

LIMIT_SECS = 120.0
SEED = 23
_RULE = "tensor_ir"


def verification(target: tvm.target.Target) -> Callable[[], contextlib.AbstractContextManager[Verify]]:
    """Return what gives the judge of functions that are compiled for a target, with its worker processes."""

    @contextlib.contextmanager
    def judging() -> Iterator[Verify]:
        unseen = _why_not_here(target)
        with tempfile.TemporaryDirectory(prefix="kerneldecl-") as folder, LocalRunner(1, len(os.sched_getaffinity(0))) as runner:
            numbers = itertools.count()

            def judge(func: Any, library: Any, symbol: str) -> Verdict:
                if reason := unseen or function_problem(func):
                    return Verdict(is_wrong=False, text=f"not verified: {reason}")
                return _verdict(Path(folder), func, (library, f"f{next(numbers)}", symbol), (runner, target.kind.name))

            yield judge

    return judging


def _why_not_here(target: tvm.target.Target) -> str:
    """Return why this machine cannot run code for a target; empty if it can."""
    if target.kind.name == "cuda":
        return gpu_lock.why_not_here("")
    processor, features = str(target.attrs.get("mcpu", "")), [str(feature) for feature in target.attrs.get("mattr", ())]
    if not host.runs(processor) or any(not feature.startswith("-") for feature in features):
        return f"it is for {' '.join([processor, *features])}; this machine is {dict(host.detect().tvm_target).get('mcpu', 'another')}"
    return ""


def _verdict(folder: Path, func: Any, compiled: tuple[Any, str, str], where: tuple[LocalRunner, str]) -> Verdict:
    """Return the verdict on a compiled function: `compiled` is its library, a name for files, and its symbol."""
    library, name, symbol = compiled
    runner, kind = where
    (folder / f"{name}.json").write_text(tvm.ir.save_json(canonical_module(func)["main"]), encoding="utf-8")
    library.export_library(str(folder / f"{name}_{symbol}.so"), cc=compiler())
    attrs = {"file": f"{name}.json"}
    spec = {"root": str(folder), "rule": _RULE, "attrs": attrs, "seed": SEED}
    on = {"device": "cuda" if kind == "cuda" else "cpu", "model": "", "spec": spec}
    prepared = runner.measure({"action": "prepare", **on}, LIMIT_SECS)
    if "failure" in prepared:
        return Verdict(is_wrong=False, text=f"not verified: its reference fails: {prepared['failure']}")
    answer = runner.measure({"action": "verify", **on, "library": str(folder / f"{name}_{symbol}.so"), "symbol": symbol}, LIMIT_SECS)
    if "failure" in answer:
        return Verdict(is_wrong=True, text=str(answer["failure"]))
    tolerance, error = load_rule(folder, _RULE).of(folder, attrs).tolerance(), float(answer["error"])
    if not error <= tolerance:
        return Verdict(is_wrong=True, text=f"relative error {error:.2g} over {tolerance:.2g}")
    return Verdict(is_wrong=False, text=f"verified, relative error {error:.2g}")
