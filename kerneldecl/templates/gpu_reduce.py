"""Owns the schedule on GPUs of one reduction with what comes before and after it element by element: sums, extremes, means.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu import thread_loops
from kerneldecl.templates.shared import blocks, reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule one reduction, everything before it inlined, everything after it computed where its results are.

    Each thread loads `width` neighbours at once, `unroll` times before it waits. Where the largest operand is contiguous
    along a reduced axis, `threads` share one of a block's `rows`. Where it is contiguous along a spatial axis (`across`),
    `threads` lie side by side along it and `rows` of them share a column. `chunks`: parts computed apart, by more blocks.
    """
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return blocks.attempt(mod, lambda sch: _schedule(sch, params))


def _schedule(sch: Schedule, params: Mapping[str, Value]) -> bool:
    found = reductions.only_reduction(sch)
    if found is None or reductions.is_across(found[0]) != params["strided"]:
        return False
    return thread_loops.reduction(sch, found, params)
