"""Owns the question what a kernel reads or writes outside of its arguments.

Knows nothing of how it was built.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kerneldecl.artifact.kernels import tensor
from kerneldecl.runners.guard_pages import Guarded, GuardedArray


def touched_outside(rule: Any, kernel: Any, *, at_end: bool) -> str:
    """Return what a kernel does to pages before its arguments, or behind them (`at_end`), that must not be touched; empty where nothing."""
    signature = rule.signature()
    arrays = [GuardedArray(arg, is_input=arg in signature.inputs) for arg in signature.args]
    placed = [array.placed(at_end=at_end) for array in arrays]
    for place, value in zip(placed, rule.inputs(np.random.default_rng(0)), strict=False):
        place[...] = value
    tensors = [tensor(place) for place in placed]
    return Guarded(arrays).watched(lambda: kernel(*tensors))
