"""Owns the schedule of one reduction with what comes before and after it element by element: sums, extremes, means.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates import _blocks


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule one reduction along rows or down columns of memory."""
    return _blocks.attempt(mod, lambda sch: _schedule(sch, params, arch))


def _schedule(sch: Schedule, params: Mapping[str, Value], arch: Arch) -> bool:
    _blocks.inline_producers(sch)
    _blocks.give_loops(sch)
    found = _blocks.leaves(sch)
    if found is None or not found[0].block.is_reduction or any(leaf.block.is_reduction for leaf in found[1:]):
        return False
    lanes = _blocks.lanes_of(found[0].block.writes[0].dtype, arch.cpu.vector_bytes)
    cut = _blocks.RowCut(lanes, int(str(params["accumulators"])), chunks=int(str(params["chunks"])))
    row = _blocks.row_reduction(sch, found[0], cut, bool(params["parallel"]))
    for leaf in found[1:]:
        if params["chunks"] == 1: sch.reverse_compute_at(leaf.rv, row)
    return True
