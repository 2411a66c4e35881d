"""Owns the schedule on GPUs of one reduction with elementwise producers and consumers: sums, extremes, means.

Knows nothing of policies or of any one operator.

Parameters:
  strided  whether the largest operand is contiguous along a spatial axis instead of a reduction axis
  threads  threads that share a row; where strided, threads along the columns
  rows     rows of a thread block; where strided, threads that share a column
  width    elements that a thread loads with one instruction
  unroll   loads of a thread in flight together
  chunks   chunks into which the reduction is split, for more thread blocks; a second kernel reduces over them
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu import thread_loops
from kerneldecl.templates.shared import blocks, reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of one reduction, fused with the blocks around it; None where the function has another form."""
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return blocks.attempt(mod, lambda sch: _schedule(sch, params))


def _schedule(sch: Schedule, params: Mapping[str, Value]) -> bool:
    found = reductions.isolate_reduction(sch)
    if found is None or reductions.is_strided(found[0]) != params["strided"]:
        return False
    return thread_loops.reduction(sch, found, params)
