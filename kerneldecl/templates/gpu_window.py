"""Owns the schedule on GPUs of strided reductions over sliding windows: pooling, depthwise convolutions.

Knows nothing of policies or of any one operator.

Parameters:
  threads  threads of a block along the channels
  rows     output pixels of a block, each with threads of its own
  width    adjacent channels of one output pixel that a thread computes in registers, from vectors that it loads
  strip    neighbouring output pixels of a row, by one channel, that a thread computes, with rows = 0 and width = 1: threads go over strips
           and channels as one line, so that channels need not divide into threads. Without it, each row has threads along the channels
  column   as strip, but output pixels of a column, whose windows a thread loads once, with the weights, before it multiplies; the last
           ones of an image need not be whole

Windows that overlap share loads through L1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm.s_tir import Schedule

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.gpu import thread_loops
from kerneldecl.templates.shared import blocks, reductions

DOUBLE_BYTES = 8
MOST_LANES = {1: 16, 2: 8, 4: 8, DOUBLE_BYTES: 4}
"""Elements of the largest vector that TVM 0.27's CUDA has, by the bytes of one."""
BYTES_LANES = 4
"""Elements of the largest vector of float8 that CUDA's headers convert, and of the largest of 8-bit zeros that TVM 0.27 writes."""


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of one reduction whose channels are contiguous, fused with the blocks around it; None for any other function."""
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return blocks.attempt(mod, lambda sch: _schedule(sch, params))


def _schedule(sch: Schedule, params: Mapping[str, Value]) -> bool:
    # 1. The reduction, and the blocks before and after it.
    blocks.add_missing_loops(sch)
    found = blocks.leaves(sch) or []
    reducing = [at for at, leaf in enumerate(found) if leaf.block.is_reduction]
    if len(reducing) != 1:
        return False
    before, leaf, after = found[: reducing[0]], found[reducing[0]], found[reducing[0] + 1 :]
    # 2. A thread for each vector of results.
    loops = _threads(sch, leaf, params)
    if loops is None:
        return False
    thread, point, lane = loops
    # 3. The blocks after it, on a thread's results in registers.
    for other in after[:-1]:
        sch.compute_inline(other.rv)
    if after:
        sch.set_scope(leaf.rv, 0, "local")
    last = after[-1].rv if after else sch.cache_write(leaf.rv, 0, "local")
    sch.reverse_compute_at(last, thread, preserve_unit_loops=True)
    # 4. The blocks before it, in vectors; with columns, whole windows.
    if "column" in params:
        _unroll_in_thread(sch, last)
        _load_windows(sch, before, leaf, thread)
    else:
        _store(sch, last, params)
        for producer in before:
            _load_or_inline(sch, producer, leaf, point, params)
        thread_loops.load_vectors(sch, leaf.rv, point)
    # 5. The reduction over the window, a vector for each of its points, with all loads in flight together.
    sch.unroll(point)
    sch.unroll(lane)
    init = sch.decompose_reduction(leaf.rv, point)
    sch.unroll(sch.get_loops(init)[-1])
    return True


def _threads(sch: Schedule, leaf: blocks.Leaf, params: Mapping[str, Value]) -> tuple[Any, Any, Any] | None:
    """Bind a reduction's loops to threads; return the loops over threads, over the points of a window, and over a thread's channels."""
    if "strip" in params or "column" in params:
        return _threads_of_line(sch, leaf, params)
    threads, rows, width = (blocks.count(params, name) for name in ("threads", "rows", "width"))
    column, axes = reductions.contiguous_axis(leaf), leaf.block.axes
    if column is None or axes[column].kind != "spatial" or not leaf.loops_of("reduce"):
        return None
    # Blocks are moved later, and moving drops predicates of uneven loops.
    if axes[column].extent % (threads * width) or leaf.extent_of("spatial") // axes[column].extent % rows:
        return None
    pixels = [loop for at, loop in enumerate(leaf.loops) if axes[at].kind == "spatial" and at != column and loop is not None]
    vectors, tx, lane = sch.split(leaf.loops[column], [None, threads, width])
    sch.reorder(*pixels, vectors, tx, *leaf.loops_of("reduce"), lane)
    pixel, ty = sch.split(blocks.fused(sch, pixels, leaf.rv), [None, rows])
    sch.reorder(pixel, vectors, ty, tx)
    for loop, name in ((sch.fuse(pixel, vectors), "blockIdx.x"), (ty, "threadIdx.y"), (tx, "threadIdx.x")):
        sch.bind(loop, name)
    return tx, blocks.fused(sch, leaf.loops_of("reduce"), leaf.rv), lane


def _threads_of_line(sch: Schedule, leaf: blocks.Leaf, params: Mapping[str, Value]) -> tuple[Any, Any, Any] | None:
    """Bind a reduction's loops to threads that go over strips of pixels and channels alike; return loops over threads, points, a strip."""
    is_column = "column" in params
    threads, strip = (blocks.count(params, name) for name in ("threads", "column" if is_column else "strip"))
    contiguous, axes = reductions.contiguous_axis(leaf), leaf.block.axes
    pixels = [at for at, axis in enumerate(axes) if axis.kind == "spatial" and at != contiguous and axis.extent > 1]
    if contiguous is None or axes[contiguous].kind != "spatial" or not leaf.loops_of("reduce") or len(pixels) < 1 + is_column:
        return None
    cut = pixels[-1 - is_column]
    strips = -(-axes[cut].extent // strip)
    # Threads are whole blocks, so that only a column's last pixels test bounds.
    if (axes[cut].extent % strip and not is_column) or leaf.extent_of("spatial") // axes[cut].extent * strips % threads:
        return None
    outer, pixel = sch.split(leaf.loops[cut], [None, strip])
    line = [outer if at == cut else leaf.loops[at] for at in pixels] + [leaf.loops[contiguous]]
    sch.reorder(*line, *leaf.loops_of("reduce"), pixel)
    block, tx = sch.split(sch.fuse(*line), [None, threads])
    sch.bind(block, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    return tx, blocks.fused(sch, leaf.loops_of("reduce"), leaf.rv), pixel


def _load_windows(sch: Schedule, before: Sequence[blocks.Leaf], leaf: blocks.Leaf, thread: Any) -> None:
    """Load all that a thread multiplies into registers, before it multiplies: windows of a column's pixels overlap."""
    for producer in before:
        if producer.block.is_reduction or len(producer.block.reads) != 1:
            sch.compute_inline(producer.rv)
            continue
        sch.compute_at(producer.rv, thread, preserve_unit_loops=True)
        sch.set_scope(producer.rv, 0, "local")
        _unroll_in_thread(sch, producer.rv)
    for at, read in enumerate(sch.get(leaf.rv).reads):
        if read.source.scope() == "global":
            copy = sch.cache_read(leaf.rv, at, "local", consumer_blocks=[leaf.rv])
            sch.compute_at(copy, thread, preserve_unit_loops=True)
            _unroll_in_thread(sch, copy)


def _store(sch: Schedule, store: Any, params: Mapping[str, Value]) -> None:
    """Store a thread's results, in vectors unless they are a strip's: its pixels are not neighbours in memory."""
    loop = sch.get_loops(store)[-1]
    if "strip" in params:
        sch.unroll(loop)
        return
    lanes = math.gcd(blocks.extent(sch, loop), _most_lanes(sch.get(store)))
    if lanes < blocks.extent(sch, loop):
        outer, loop = sch.split(loop, [None, lanes])
        sch.unroll(outer)
    sch.vectorize(loop)


def _most_lanes(block: Any) -> int:
    """Return the elements of the largest vector that TVM 0.27's CUDA converts between the dtypes that a block reads and writes."""
    reads, writes = ({str(region.source.dtype) for region in regions} for regions in (block.reads, block.writes))
    both = reads | writes
    widest = max(map(dtype_bytes, both))
    if len(both) == 1 or not any(dtype.startswith("float8") for dtype in both):
        return MOST_LANES[widest]
    # CUDA's headers convert float8 to single float64 only.
    return 1 if widest == DOUBLE_BYTES and any(dtype.startswith("float8") for dtype in reads) else BYTES_LANES


def _unroll_in_thread(sch: Schedule, block: Any) -> None:
    """Unroll all loops of a block within those over thread blocks and threads."""
    _, _, *inner = sch.get_loops(block)
    for loop in inner:
        sch.unroll(loop)


def _load_or_inline(sch: Schedule, producer: blocks.Leaf, leaf: blocks.Leaf, point: Any, params: Mapping[str, Value]) -> None:
    """Compute a block before a reduction for one point of a window: in registers where it pads, else within the reduction."""
    if not _pad_in_registers(sch, producer, point):
        sch.compute_inline(producer.rv)
        return
    for pixels in sch.get_loops(producer.rv)[len(sch.get_loops(leaf.rv)) - 1 :]:
        if blocks.extent(sch, pixels) > 1 and "strip" in params:
            sch.unroll(pixels)


def _pad_in_registers(sch: Schedule, producer: blocks.Leaf, loop: Any) -> bool:
    """Compute a padding block in registers, for one point of a window; say whether the producer is such a block."""
    if producer.block.is_reduction or len(producer.block.reads) != 1:
        return False
    sch.compute_at(producer.rv, loop, preserve_unit_loops=True)
    sch.set_scope(producer.rv, 0, "local")
    written = str(sch.get(producer.rv).writes[0].source.dtype)
    thread_loops.vectorize_copy(sch, producer.rv, BYTES_LANES if dtype_bytes(written) == 1 else VECTOR_BYTES)
    return True
