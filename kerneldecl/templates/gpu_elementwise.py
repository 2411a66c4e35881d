"""Owns the schedule on GPUs of functions without reductions: elementwise operations, broadcasts, transposes.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates import _blocks, _gpu_blocks


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule a function of spatial blocks, all inlined into the last.

    Blocks of `threads` threads read and write `width` neighbours at once, each thread `unroll` times. With `tile`, an
    operand that is contiguous along another axis than the output goes through shared memory in tiles of so many
    elements along that axis by so many along the output's.
    """
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return _blocks.attempt(mod, lambda sch: _schedule(sch, params))


def _schedule(sch: Schedule, params: Mapping[str, Value]) -> bool:
    # 1. One block, its axes in the order of the output's memory.
    _blocks.inline_producers(sch)
    _blocks.give_loops(sch)
    found = _blocks.leaves(sch)
    if found is None or len(found) != 1 or found[0].block.is_reduction or len(found[0].block.writes) != 1:
        return False
    leaf = found[0]
    order = _gpu_blocks.written_order(leaf)
    if order is None:
        return False
    # 2. Tiles where an operand is contiguous along another axis, else vectors alone.
    if "tile" in params:
        return _tiles(sch, leaf, order, params)
    _vectors(sch, leaf, order, params)
    return True


def _vectors(sch: Schedule, leaf: _blocks.Leaf, order: list[int], params: Mapping[str, Value]) -> None:
    threads, width, unroll = (_blocks.count(params, name) for name in ("threads", "width", "unroll"))
    loops = [leaf.loops[axis] for axis in order] or sch.get_loops(leaf.rv)
    *outer, inner = loops
    vectors, lane = sch.split(inner, [None, width])
    sch.reorder(*outer, vectors, lane)
    loop = sch.fuse(*outer, vectors) if outer else vectors
    grid, turn, tx = sch.split(loop, [None, unroll, threads])
    sch.reorder(grid, tx, turn, lane)
    sch.bind(grid, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    _gpu_blocks.load_vectors(sch, leaf.rv, turn)
    _gpu_blocks.store_vectors(sch, leaf.rv, turn)
    sch.unroll(turn)
    sch.unroll(lane)


def _tiles(sch: Schedule, leaf: _blocks.Leaf, order: list[int], params: Mapping[str, Value]) -> bool:
    across = _transposed(leaf, order)
    tile = params["tile"]
    threads, width = _blocks.count(params, "threads"), _blocks.count(params, "width")
    assert isinstance(tile, tuple)
    if across is None:
        return False
    operand, axis = across
    rows, columns = (int(str(size)) for size in tile)
    # 1. Tiles over both axes, a block of threads for each.
    row, row_in = sch.split(leaf.loops[axis], [None, rows])
    column, column_in = sch.split(leaf.loops[order[-1]], [None, columns])
    vectors, lane = sch.split(column_in, [None, width])
    outer = [leaf.loops[other] for other in order[:-1] if other != axis]
    sch.reorder(*outer, row, column, row_in, vectors, lane)
    grid = sch.fuse(*outer, row, column)
    turn, tx = sch.split(sch.fuse(row_in, vectors), [None, threads])
    # 2. The transposed operand: read along its own axis into a tile whose rows start in different banks.
    copy = sch.cache_read(leaf.rv, operand, "shared")
    sch.compute_at(copy, grid, preserve_unit_loops=True)
    _, *others, last = sch.get_loops(copy)
    vectors_in, lane_in = sch.split(last, [None, width])
    turn_in, tx_in = sch.split(sch.fuse(*others, vectors_in), [None, threads])
    sch.storage_align(copy, 0, -2, rows, 1)
    # 3. The rest straight into registers, and results from there.
    sch.bind(grid, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    sch.bind(tx_in, "threadIdx.x")
    _gpu_blocks.store_vectors(sch, leaf.rv, tx)
    _gpu_blocks.stage(sch, copy, tx_in)
    for loop in (turn, lane, turn_in, lane_in):
        sch.unroll(loop)
    return True


def _transposed(leaf: _blocks.Leaf, order: list[int]) -> tuple[int, int] | None:
    """Return which operand is contiguous along another axis than the output, and that axis."""
    for at, access in enumerate(leaf.block.reads):
        walk = _blocks.strides(access, len(leaf.loops))
        if order and walk[order[-1]] not in {0, 1, None}:
            axis: Any = next((axis for axis in order[:-1] if walk[axis] == 1 and leaf.block.axes[axis].extent > 1), None)
            if axis is not None:
                return at, axis
    return None
