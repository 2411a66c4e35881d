"""Owns the schedule on GPUs of functions without long reductions: elementwise operations, broadcasts, transposes, sums of a few elements.

Knows nothing of policies or of any one operator.

Parameters:
  threads  threads of a block
  width    adjacent elements that a thread reads and writes with one instruction
  unroll   vectors of a thread; unused with `tile`
  tile     optional: an operand that is contiguous along another axis than the output is transposed through shared memory, in tiles
           of so many elements along that axis by so many along the output's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm.s_tir import Schedule

from kerneldecl.analysis.short_reduction import is_short
from kerneldecl.model import Access, Arch, Value, dtype_bytes
from kerneldecl.templates.gpu import thread_loops
from kerneldecl.templates.shared import blocks

_OUTER_LOOPS = 3
"""Loops around what a thread computes at once: over blocks, threads and its vectors."""
MOST_LANES, MOST_BYTES = 8, 32
"""Elements and bytes of a vector at most whose elements are longer than a byte."""


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of a function of spatial blocks, all inlined into the last; None where they cannot be."""
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    copied = blocks.attempt(mod, lambda sch: _schedule(sch, params, in_place=False))
    # A block that looks an operand up by indices cannot be moved under a copy: the region that it reads is not known.
    return copied or blocks.attempt(mod, lambda sch: _schedule(sch, params, in_place=True))


def _schedule(sch: Schedule, params: Mapping[str, Value], *, in_place: bool) -> bool:
    # 1. One block, and copies from several places of one operand, such as its halves: merged reads would be no vectors.
    copies = _copies(sch) if "tile" not in params and not in_place else []
    blocks.inline_producers(sch, but=copies)
    blocks.add_missing_loops(sch)
    kept = {sch.get(copy).name_hint for copy in copies}
    found = [leaf for leaf in blocks.leaves(sch) or () if sch.get(leaf.rv).name_hint not in kept]
    if not found or len(found[-1].block.writes) != 1 or not all(leaf.block.is_reduction for leaf in found[:-1]):
        return False
    *short, last = found
    reducing = [leaf for leaf in found if leaf.block.is_reduction]
    if reducing and (in_place or "tile" in params or not all(is_short(leaf.extent_of("reduce")) for leaf in reducing)):
        return False
    # 2. Tiles through shared memory, or vectors alone.
    if "tile" in params:
        return not in_place and _tiles(sch, last, params)
    return _vectors(sch, last, params, None if in_place else copies, short)


def _copies(sch: Schedule) -> list[Any]:
    """Return blocks of the last one's shape that copy an argument, where several copy the same one."""
    found = blocks.leaves(sch) or []
    arguments = list(sch.mod["main"].params)
    by_source: dict[int, list[Any]] = {}
    for leaf in found[:-1]:
        reads = sch.get(leaf.rv).reads
        at = next((at for at, one in enumerate(arguments) if len(reads) == 1 and reads[0].source.same_as(one)), None)
        is_whole = leaf.extent_of("spatial") == found[-1].extent_of("spatial") and not leaf.block.is_reduction
        if at is not None and is_whole and not leaf.block.flops_per_point and leaf.block.reads[0].dtype == leaf.block.writes[0].dtype:
            by_source.setdefault(at, []).append(leaf.rv)
    return [rv for several in by_source.values() if len(several) > 1 for rv in several]


def _vectors(
    sch: Schedule, leaf: blocks.Leaf, params: Mapping[str, Value], copies: Sequence[Any] | None, short: Sequence[blocks.Leaf] = ()
) -> bool:
    """Give vectors to threads; `copies` are blocks to be computed in registers before, None to compute a block in place.

    So are `short`, reductions of few elements.
    """
    threads, width, unroll = (blocks.count(params, name) for name in ("threads", "width", "unroll"))
    # The loops are those of a copy to the output, under which the block is moved: moving the copy would drop its predicate at the end.
    for block in copies or ():
        sch.set_scope(block, 0, "local")
    copy = leaf.rv if copies is None else sch.cache_write(leaf.rv, 0, "local")
    *outer, inner = sch.get_loops(copy)
    vectors, lane = sch.split(inner, [None, width])
    loop = sch.fuse(*outer, vectors) if outer else vectors
    grid, iteration, tx = sch.split(loop, [None, unroll, threads])
    sch.reorder(grid, tx, iteration, lane)
    sch.bind(grid, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    if copies is not None:
        for one in short:
            sch.set_scope(one.rv, 0, "local")
        for each in (leaf, *reversed(short)):
            thread_loops.compute_under(sch, each.rv, iteration)
            for rolled in sch.get_loops(each.rv)[_OUTER_LOOPS:-1] if each.block.is_reduction else ():
                sch.unroll(rolled)
        for block in copies:
            sch.compute_at(block, iteration, preserve_unit_loops=True)
            thread_loops.vectorize_copy(sch, block)
    sch.unroll(iteration)
    lanes = _lanes(width, _along(leaf) if copies is None else leaf.block.writes)
    if lanes < width:  # the narrowest argument allows so many, and others have wider elements
        pieces, lane = sch.split(lane, [None, lanes])
        sch.unroll(pieces)
    sch.vectorize(lane)
    return True


def _along(leaf: blocks.Leaf) -> list[Access]:
    """Return what a block accesses at another place for each element of a vector of results."""
    (out,) = leaf.block.writes
    axes = {axis for axis, _ in out.index[-1]} if out.index and out.index[-1] else set()
    return [each for each in (*leaf.block.reads, out) if any(index is None or axes & {axis for axis, _ in index} for index in each.index)]


def _lanes(width: int, accesses: Sequence[Access]) -> int:
    """Return how many elements of a vector of accesses TVM's code generator has types for in CUDA: 16 bytes, 8 half-words or words, 4
    double words."""
    while width > 1 and any(
        dtype_bytes(each.dtype) > 1 and (width > MOST_LANES or width * dtype_bytes(each.dtype) > MOST_BYTES) for each in accesses
    ):
        width //= 2
    return width


def _tiles(sch: Schedule, leaf: blocks.Leaf, params: Mapping[str, Value]) -> bool:
    transposed = _transposed(leaf)
    tile = params["tile"]
    threads, width = blocks.count(params, "threads"), blocks.count(params, "width")
    assert isinstance(tile, tuple)
    if transposed is None:
        return False
    operand, dim = transposed
    rows, columns = (int(str(size)) for size in tile)
    # 1. Tiles over both dimensions of the output, with a thread block for each.
    copy = sch.cache_write(leaf.rv, 0, "local")
    loops = sch.get_loops(copy)
    row, row_in = sch.split(loops[dim], [None, rows])
    column, column_in = sch.split(loops[-1], [None, columns])
    vectors, lane = sch.split(column_in, [None, width])
    others = [loop for at, loop in enumerate(loops[:-1]) if at != dim]
    sch.reorder(*others, row, column, row_in, vectors, lane)
    grid = sch.fuse(*others, row, column)
    iteration, tx = sch.split(sch.fuse(row_in, vectors), [None, threads])
    sch.compute_at(leaf.rv, tx, preserve_unit_loops=True)
    # 2. The transposed operand: read along its contiguous axis into a tile whose rows start in different banks.
    shared = sch.cache_read(leaf.rv, operand, "shared")
    sch.compute_at(shared, grid, preserve_unit_loops=True)
    _, *others, last = sch.get_loops(shared)
    vectors_in, lane_in = sch.split(last, [None, width])
    iteration_in, tx_in = sch.split(sch.fuse(*others, vectors_in), [None, threads])
    sch.storage_align(shared, 0, -2, rows, 1)
    # 3. Vectors between global memory and registers.
    for loop, thread in ((grid, "blockIdx.x"), (tx, "threadIdx.x"), (tx_in, "threadIdx.x")):
        sch.bind(loop, thread)
    thread_loops.load_vectors(sch, shared, tx_in)
    sch.vectorize(lane)
    for loop in (iteration, iteration_in, lane_in, sch.get_loops(leaf.rv)[-1]):
        sch.unroll(loop)
    return True


def _transposed(leaf: blocks.Leaf) -> tuple[int, int] | None:
    """Return the operand that is contiguous along another dimension of the output than the last, and that dimension; None without one."""
    (out,) = leaf.block.writes
    if len(out.index) < 2 or not out.index[-1]:
        return None
    for at, access in enumerate(leaf.block.reads):
        strides = blocks.strides(access, len(leaf.loops))
        for dim, index in enumerate(out.index[:-1]):
            if index and strides[index[0][0]] == 1 and strides[out.index[-1][0][0]] not in {0, 1, None}:
                return at, dim
    return None
