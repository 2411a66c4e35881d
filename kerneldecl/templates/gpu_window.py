"""Owns the schedule on GPUs of reductions over windows that overlap, across contiguous memory: pooling, depthwise convolutions.

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
from kerneldecl.templates import _blocks, _gpu_blocks, _reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule one reduction of channels that lie side by side, everything after it computed where its results are.

    Each thread computes `width` neighbouring channels of one window in registers, from vectors that it loads itself: what windows
    share comes from an SM's first-level cache. `threads` of a block lie side by side over channels, `rows` of these over windows.
    """
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return _blocks.attempt(mod, lambda sch: _schedule(sch, params))


def _schedule(sch: Schedule, params: Mapping[str, Value]) -> bool:
    threads, rows, width = (_blocks.count(params, name) for name in ("threads", "rows", "width"))
    # 1. The reduction, what pads its image, and what follows: no block in between, and none before that computes.
    _blocks.give_loops(sch)
    found = _blocks.leaves(sch)
    if found is None:
        return False
    sums = [at for at, leaf in enumerate(found) if leaf.block.is_reduction]
    if len(sums) != 1 or any(leaf.block.is_reduction for leaf in found[sums[0] + 1 :]):
        return False
    before, leaf, after = found[: sums[0]], found[sums[0]], found[sums[0] + 1 :]
    column = _reductions.contiguous_axis(leaf)
    if column is None or leaf.block.axes[column].kind != "spatial" or leaf.block.axes[column].extent % (threads * width):
        return False
    # 2. A thread for each vector of results; its sums over the window, of each place a vector, all of them on their way together.
    kinds = [axis.kind for axis in leaf.block.axes]
    windows = [loop for at, loop in enumerate(leaf.loops) if kinds[at] == "spatial" and at != column and loop is not None]
    vectors, tx, lane = sch.split(leaf.loops[column], [None, threads, width])
    sch.reorder(*windows, vectors, tx, *leaf.loops_of("reduce"), lane)
    window, ty = sch.split(_blocks.fused(sch, windows, leaf.rv), [None, rows])
    if _blocks.extent(sch, window) * rows != _blocks.extent_of(leaf.block, "spatial") // leaf.block.axes[column].extent:
        return False  # moving blocks loses what bounds uneven loops
    sch.reorder(window, vectors, ty, tx)
    for loop, thread in ((sch.fuse(window, vectors), "blockIdx.x"), (ty, "threadIdx.y"), (tx, "threadIdx.x")):
        sch.bind(loop, thread)
    place = _blocks.fused(sch, leaf.loops_of("reduce"), leaf.rv)
    # 3. What follows, on a thread's results in registers.
    for other in after[:-1]:
        with contextlib.suppress(ScheduleError):
            sch.compute_inline(other.rv)
    if after:
        sch.set_scope(leaf.rv, 0, "local")
    last = after[-1].rv if after else sch.cache_write(leaf.rv, 0, "local")
    sch.reverse_compute_at(last, tx, preserve_unit_loops=True)
    sch.vectorize(sch.get_loops(last)[-1])
    # 4. What comes before, in vectors.
    for producer in before:
        if not _into_registers(sch, producer, place):
            sch.compute_inline(producer.rv)
    _gpu_blocks.load_vectors(sch, leaf.rv, place)
    sch.unroll(place)
    sch.unroll(lane)
    start = sch.decompose_reduction(leaf.rv, place)
    sch.unroll(sch.get_loops(start)[-1])
    return True


def _into_registers(sch: Schedule, producer: _blocks.Leaf, loop: Any) -> bool:
    """Have a thread make what a padding block makes of one place of a window; say whether that was such a block."""
    if producer.block.is_reduction or len(producer.block.reads) != 1:
        return False
    sch.compute_at(producer.rv, loop, preserve_unit_loops=True)
    sch.set_scope(producer.rv, 0, "local")
    _gpu_blocks.vectorize_copy(sch, producer.rv)
    return True
