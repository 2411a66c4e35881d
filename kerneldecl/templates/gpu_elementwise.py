"""Owns the schedule on GPUs of functions without reductions: elementwise operations, broadcasts, transposes.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu import thread_loops
from kerneldecl.templates.shared import blocks


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule a function of spatial blocks, all inlined into the last.

    Blocks of `threads` threads read and write `width` neighbours at once, each thread `unroll` times. With `tile`, an
    operand that is contiguous along another axis than the output goes through shared memory in tiles of so many
    elements along that axis by so many along the output's.
    """
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return blocks.attempt(mod, lambda sch: _schedule(sch, params))


def _schedule(sch: Schedule, params: Mapping[str, Value]) -> bool:
    # 1. One block.
    blocks.inline_producers(sch)
    blocks.give_loops(sch)
    found = blocks.leaves(sch)
    if found is None or len(found) != 1 or found[0].block.is_reduction or len(found[0].block.writes) != 1:
        return False
    # 2. Tiles where an operand is contiguous along another axis, else vectors alone.
    return _tiles(sch, found[0], params) if "tile" in params else _vectors(sch, found[0], params)


def _vectors(sch: Schedule, leaf: blocks.Leaf, params: Mapping[str, Value]) -> bool:
    threads, width, unroll = (blocks.count(params, name) for name in ("threads", "width", "unroll"))
    # Loops are those of a copy to the output, under which the rest is moved: moving the copy would lose what bounds it at the end.
    copy = sch.cache_write(leaf.rv, 0, "local")
    *outer, inner = sch.get_loops(copy)
    vectors, lane = sch.split(inner, [None, width])
    loop = sch.fuse(*outer, vectors) if outer else vectors
    grid, turn, tx = sch.split(loop, [None, unroll, threads])
    sch.reorder(grid, tx, turn, lane)
    sch.bind(grid, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    thread_loops.compute_under(sch, leaf.rv, turn)
    sch.unroll(turn)
    sch.vectorize(lane)
    return True


def _tiles(sch: Schedule, leaf: blocks.Leaf, params: Mapping[str, Value]) -> bool:
    across = _transposed(leaf)
    tile = params["tile"]
    threads, width = blocks.count(params, "threads"), blocks.count(params, "width")
    assert isinstance(tile, tuple)
    if across is None:
        return False
    operand, dim = across
    rows, columns = (int(str(size)) for size in tile)
    # 1. Tiles over both dimensions of the output, a block of threads for each.
    copy = sch.cache_write(leaf.rv, 0, "local")
    loops = sch.get_loops(copy)
    row, row_in = sch.split(loops[dim], [None, rows])
    column, column_in = sch.split(loops[-1], [None, columns])
    vectors, lane = sch.split(column_in, [None, width])
    others = [loop for at, loop in enumerate(loops[:-1]) if at != dim]
    sch.reorder(*others, row, column, row_in, vectors, lane)
    grid = sch.fuse(*others, row, column)
    turn, tx = sch.split(sch.fuse(row_in, vectors), [None, threads])
    sch.compute_at(leaf.rv, tx, preserve_unit_loops=True)
    # 2. The transposed operand: read along its own axis into a tile whose rows start in different banks.
    shared = sch.cache_read(leaf.rv, operand, "shared")
    sch.compute_at(shared, grid, preserve_unit_loops=True)
    _, *others, last = sch.get_loops(shared)
    vectors_in, lane_in = sch.split(last, [None, width])
    turn_in, tx_in = sch.split(sch.fuse(*others, vectors_in), [None, threads])
    sch.storage_align(shared, 0, -2, rows, 1)
    # 3. Between global memory and registers, vectors.
    for loop, thread in ((grid, "blockIdx.x"), (tx, "threadIdx.x"), (tx_in, "threadIdx.x")):
        sch.bind(loop, thread)
    thread_loops.load_vectors(sch, shared, tx_in)
    sch.vectorize(lane)
    for loop in (turn, turn_in, lane_in, sch.get_loops(leaf.rv)[-1]):
        sch.unroll(loop)
    return True


def _transposed(leaf: blocks.Leaf) -> tuple[int, int] | None:
    """Return which operand is contiguous along another dimension of the output than the last, and that dimension."""
    (out,) = leaf.block.writes
    if len(out.index) < 2 or not out.index[-1]:
        return None
    for at, access in enumerate(leaf.block.reads):
        walk = blocks.strides(access, len(leaf.loops))
        for dim, index in enumerate(out.index[:-1]):
            if index and walk[index[0][0]] == 1 and walk[out.index[-1][0][0]] not in {0, 1, None}:
                return at, dim
    return None
