"""Owns the schedule on CPUs of functions that no other template takes: each block separately, as far as TVM allows.

Knows nothing of policies or of any one operator.

Parameters:
  parallel   True distributes the outer spatial loops over all cores
  vectorize  True vectorizes the innermost spatial loop
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
    """Return the schedule of each block, cheap ones inlined; with neither parameter set, that of the unchanged function."""
    return blocks.attempt(mod, lambda sch: _schedule_all(sch, params, arch))


def _schedule_all(sch: Schedule, params: Mapping[str, Value], arch: Arch) -> bool:
    if not params["parallel"] and not params["vectorize"]:
        return True
    blocks.inline_producers(sch, keep_shared=True)
    for leaf in blocks.leaves(sch) or ():
        lanes = blocks.lanes_of(leaf.block.writes[0].dtype, arch.the_cpu.vector_bytes) if params["vectorize"] else 1
        # A primitive that raises leaves the schedule unchanged.
        with contextlib.suppress(ScheduleError):
            _schedule(sch, leaf, lanes, bool(params["parallel"]))
    return True


def _schedule(sch: Schedule, leaf: blocks.Leaf, lanes: int, is_parallel: bool) -> None:
    spatial, reduce = _written_order(leaf), leaf.loops_of("reduce")
    if not spatial:
        return
    # 1. Reduction loops go around the innermost spatial one, along which vectors are contiguous.
    *outer, inner = spatial
    vector: list[Any] = []
    if lanes > 1:
        sch.reorder(*outer, *reduce, inner)
        if blocks.extent(sch, inner) % lanes == 0:
            inner, lane = sch.split(inner, [None, lanes])
            sch.vectorize(lane)
            vector = [lane]
    sch.reorder(*outer, inner, *reduce, *vector)
    # 2. Parallel loops before the decomposition, after which TVM rejects them.
    if is_parallel and outer:
        sch.parallel(sch.fuse(*outer))
    elif is_parallel:
        sch.parallel(inner)
    if leaf.block.is_reduction and reduce:
        sch.decompose_reduction(leaf.rv, reduce[0])


def _written_order(leaf: blocks.Leaf) -> list[Any]:
    """Return the spatial loops by their strides in the output, the longest first."""
    strides = blocks.strides(leaf.block.writes[0], len(leaf.loops))
    axes = (at for at, axis in enumerate(leaf.block.axes) if axis.kind == "spatial" and leaf.loops[at] is not None)
    return [leaf.loops[at] for at in sorted(axes, key=lambda at: -abs(strides[at] or 0))]
