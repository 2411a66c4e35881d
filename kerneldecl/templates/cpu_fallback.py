"""Owns the schedule of functions that no other template fits: each block by itself, as far as that is legal.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared import blocks


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule each block on its own, cheap ones inlined; with neither parameter set, change nothing.

    `parallel`: spread the outer spatial loops over all cores. `vectorize`: make vectors of the innermost spatial loop.
    """
    return blocks.attempt(mod, lambda sch: _schedule_all(sch, params, arch))


def _schedule_all(sch: Schedule, params: Mapping[str, Value], arch: Arch) -> bool:
    if not params["parallel"] and not params["vectorize"]:
        return True
    blocks.inline_producers(sch, keep_shared=True)
    for leaf in blocks.leaves(sch) or ():
        lanes = blocks.lanes_of(leaf.block.writes[0].dtype, arch.the_cpu.vector_bytes) if params["vectorize"] else 1
        # A primitive that refuses leaves the schedule as it was.
        with contextlib.suppress(ScheduleError):
            _schedule(sch, leaf, lanes, bool(params["parallel"]))
    return True


def _schedule(sch: Schedule, leaf: blocks.Leaf, lanes: int, is_parallel: bool) -> None:
    spatial, reduce = _written_order(leaf), leaf.loops_of("reduce")
    if not spatial:
        return
    # 1. Reduced loops go around the innermost spatial one, which is where vectors are contiguous.
    *outer, inner = spatial
    vector: list[Any] = []
    if lanes > 1:
        sch.reorder(*outer, *reduce, inner)
        if blocks.extent(sch, inner) % lanes == 0:
            inner, lane = sch.split(inner, [None, lanes])
            sch.vectorize(lane)
            vector = [lane]
    sch.reorder(*outer, inner, *reduce, *vector)
    # 2. Cores, then initial values: afterwards no loop becomes parallel.
    if is_parallel and outer:
        sch.parallel(sch.fuse(*outer))
    elif is_parallel:
        sch.parallel(inner)
    if leaf.block.is_reduction and reduce:
        sch.decompose_reduction(leaf.rv, reduce[0])


def _written_order(leaf: blocks.Leaf) -> list[Any]:
    """Return the spatial loops in the order in which the output lies in memory, outermost first."""
    walk = blocks.strides(leaf.block.writes[0], len(leaf.loops))
    axes = (at for at, axis in enumerate(leaf.block.axes) if axis.kind == "spatial" and leaf.loops[at] is not None)
    return [leaf.loops[at] for at in sorted(axes, key=lambda at: -abs(walk[at] or 0))]
