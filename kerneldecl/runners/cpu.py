"""Owns how a kernel is checked and timed on a CPU, inside a worker: inputs, reference, poisoned outputs, samples.

Knows nothing of which candidates there are, of how many samples are wanted or of what wins. Imports no compiler: TVM's
runtime library is loaded by itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kerneldecl.arrays import Array, aligned, poisoned, relative_error
from kerneldecl.artifact.kernels import kernel_of, load_library, tensor
from kerneldecl.runners.host_roofline import ceilings
from kerneldecl.runners.reference_data import AtHand, Case

__all__ = ["ceilings", "prepare", "sample", "verify"]


@dataclasses.dataclass
class _Brought:
    """The workload at hand: its case, its outputs, and the kernels loaded so far."""

    case: Case
    outputs: list[Array]
    kernels: dict[str, Callable[..., object]]


SETTLE_SECS = 0.1
"""How long the threads of the reference's BLAS may go on waiting for work, in the way of the kernel under test."""


def _bring(case: Case) -> _Brought:
    time.sleep(SETTLE_SECS)
    case = dataclasses.replace(case, inputs=tuple(map(aligned, case.inputs)))
    return _Brought(case, [aligned(poisoned(arg)) for arg in case.signature.outputs], {})


_AT_HAND = AtHand(_bring)


def prepare(case: Mapping[str, Any]) -> dict[str, Any]:
    """Make the random inputs and the reference's outputs of a workload: root, rule, attrs and seed."""
    _AT_HAND.of(case)
    return {}


def verify(case: Mapping[str, Any], library: str, symbol: str) -> dict[str, Any]:
    """Run a kernel once on poisoned outputs; return its relative error and the seconds of a second run."""
    at_hand = _AT_HAND.of(case)
    kernel = kernel_of(load_library(Path(library)), symbol)
    for index, arg in enumerate(at_hand.case.signature.outputs):
        np.copyto(at_hand.outputs[index], poisoned(arg))
    before = [array.tobytes() for array in at_hand.case.inputs]
    kernel(*at_hand.case.inputs, *at_hand.outputs)
    if before != [array.tobytes() for array in at_hand.case.inputs]:
        _AT_HAND.clear()
        return {"failure": "it wrote into its inputs"}
    pairs = zip(at_hand.outputs, at_hand.case.expected, strict=True)
    error = max(relative_error(got, want) for got, want in pairs)
    at_hand.kernels[library] = kernel
    return {"error": error, "secs": _timed(at_hand, kernel, 1)}


def sample(case: Mapping[str, Any], library: str, symbol: str, calls: int, samples: int) -> dict[str, Any]:
    """Return seconds a call, one figure a sample, each the mean of `calls` calls back to back."""
    at_hand = _AT_HAND.of(case)
    kernel = at_hand.kernels.get(library) or kernel_of(load_library(Path(library)), symbol)
    at_hand.kernels[library] = kernel
    if calls > 1:
        _timed(at_hand, kernel, 1)  # another candidate ran before: code and data come back into the caches
    return {"samples": [_timed(at_hand, kernel, calls) for _ in range(samples)]}


def _timed(at_hand: _Brought, kernel: Callable[..., object], calls: int) -> float:
    args = [tensor(array) for array in (*at_hand.case.inputs, *at_hand.outputs)]
    start = time.perf_counter()
    for _ in range(calls):
        kernel(*args)
    return (time.perf_counter() - start) / calls
