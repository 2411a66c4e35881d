"""Owns the schedule on GPUs of reductions over windows that overlap, across contiguous memory: pooling, depthwise convolutions.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu import thread_loops
from kerneldecl.templates.shared import blocks, reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule one reduction of channels that lie side by side, everything after it computed where its results are.

    Each thread computes `width` neighbouring channels of one window in registers, from vectors that it loads itself: what windows
    share comes from an SM's first-level cache. `threads` of a block lie side by side over channels, `rows` of these over windows.
    """
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return blocks.attempt(mod, lambda sch: _schedule(sch, params))


def _schedule(sch: Schedule, params: Mapping[str, Value]) -> bool:
    # 1. The reduction, what comes before it, and what follows.
    blocks.give_loops(sch)
    found = blocks.leaves(sch) or []
    sums = [at for at, leaf in enumerate(found) if leaf.block.is_reduction]
    if len(sums) != 1:
        return False
    before, leaf, after = found[: sums[0]], found[sums[0]], found[sums[0] + 1 :]
    # 2. A thread for each vector of results.
    loops = _threads(sch, leaf, params)
    if loops is None:
        return False
    thread, place, lane = loops
    # 3. What follows, on a thread's results in registers.
    for other in after[:-1]:
        sch.compute_inline(other.rv)
    if after:
        sch.set_scope(leaf.rv, 0, "local")
    last = after[-1].rv if after else sch.cache_write(leaf.rv, 0, "local")
    sch.reverse_compute_at(last, thread, preserve_unit_loops=True)
    sch.vectorize(sch.get_loops(last)[-1])
    # 4. What comes before, in vectors.
    for producer in before:
        if not _into_registers(sch, producer, place):
            sch.compute_inline(producer.rv)
    thread_loops.load_vectors(sch, leaf.rv, place)
    # 5. Sums over the window, of each place a vector, all of them on their way together.
    sch.unroll(place)
    sch.unroll(lane)
    start = sch.decompose_reduction(leaf.rv, place)
    sch.unroll(sch.get_loops(start)[-1])
    return True


def _threads(sch: Schedule, leaf: blocks.Leaf, params: Mapping[str, Value]) -> tuple[Any, Any, Any] | None:
    """Cut a reduction into threads; return the loops of a thread, of the places of its window, and of its channels."""
    threads, rows, width = (blocks.count(params, name) for name in ("threads", "rows", "width"))
    column, axes = reductions.contiguous_axis(leaf), leaf.block.axes
    if column is None or axes[column].kind != "spatial" or not leaf.loops_of("reduce"):
        return None
    # Blocks are moved later, and moving loses what bounds uneven loops.
    if axes[column].extent % (threads * width) or leaf.extent_of("spatial") // axes[column].extent % rows:
        return None
    windows = [loop for at, loop in enumerate(leaf.loops) if axes[at].kind == "spatial" and at != column and loop is not None]
    vectors, tx, lane = sch.split(leaf.loops[column], [None, threads, width])
    sch.reorder(*windows, vectors, tx, *leaf.loops_of("reduce"), lane)
    window, ty = sch.split(blocks.fused(sch, windows, leaf.rv), [None, rows])
    sch.reorder(window, vectors, ty, tx)
    for loop, name in ((sch.fuse(window, vectors), "blockIdx.x"), (ty, "threadIdx.y"), (tx, "threadIdx.x")):
        sch.bind(loop, name)
    return tx, blocks.fused(sch, leaf.loops_of("reduce"), leaf.rv), lane


def _into_registers(sch: Schedule, producer: blocks.Leaf, loop: Any) -> bool:
    """Have a thread make what a padding block makes of one place of a window; say whether that was such a block."""
    if producer.block.is_reduction or len(producer.block.reads) != 1:
        return False
    sch.compute_at(producer.rv, loop, preserve_unit_loops=True)
    sch.set_scope(producer.rv, 0, "local")
    thread_loops.vectorize_copy(sch, producer.rv)
    return True
