"""Owns the schedule on GPUs of chains of reductions and elementwise blocks over the same rows: softmax, normalisations.

Knows nothing of policies or of any one operator.

Parameters:
  threads       threads that share a row
  rows          rows of a thread block
  width         adjacent elements that a thread loads with one instruction
  in_registers  True unrolls the loops along a row, so that nvcc, which sees that each block reads the same elements, keeps the row in
                registers; False has each block read the row again, from the nearest cache
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu import thread_loops
from kerneldecl.templates.shared import blocks, reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of a chain with at least one reduction, where the same threads compute all blocks of a row; None for others."""
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    # What several blocks read, such as a softmax's powers, is computed once if it has the chain's rows, else by each of them.
    shared = blocks.attempt(mod, lambda sch: _schedule(sch, params, keep_shared=True)) if params["in_registers"] else None
    return shared or blocks.attempt(mod, lambda sch: _schedule(sch, params, keep_shared=False))


def _schedule(sch: Schedule, params: Mapping[str, Value], *, keep_shared: bool) -> bool:
    threads, rows, width = (blocks.count(params, name) for name in ("threads", "rows", "width"))
    # 1. Blocks that share their leading axes as rows.
    blocks.inline_producers(sch, keep_shared=keep_shared)
    _inline_row_values(sch)
    blocks.add_missing_loops(sch)
    found = blocks.leaves(sch) or []
    leading = _leading_rows(found) if found else None
    if leading is None or any(_length(leaf, leading) % width for leaf in found if len(leaf.loops) > leading):
        return False
    # 2. Threads along each block's rows; one loop over rows. A last block of whole rows is computed as a copy to the output, one of a
    # single result per row by every thread of the row: all of them have it.
    *_, last = found
    writes_rows = len(last.loops_of("spatial")) > leading
    if sum(leaf.block.is_reduction for leaf in found) + writes_rows < 2:
        return False  # one reduction has a template of its own
    copy = sch.cache_write(last.rv, 0, "local") if writes_rows else None
    nested = [leaf.rv for leaf in found] if copy is None else [*(leaf.rv for leaf in found[:-1]), copy]
    nests = [_along(sch, rv, leading, threads, width) for rv in nested]
    if copy is not None:
        sch.compute_at(last.rv, nests[-1][2], preserve_unit_loops=True)
    row = sch.merge(*(nest[0] for nest in nests)) if len(nests) > 1 else nests[0][0]
    is_whole = blocks.extent(sch, row) % rows == 0
    grid, ty = sch.split(row, [None, rows])
    sch.bind(grid, "blockIdx.x")
    sch.bind(ty, "threadIdx.y")
    # 3. Results in registers, rows in vectors.
    for rv in nested[:-1]:
        sch.set_scope(rv, 0, "local")
    for rv, (_, *loops) in zip(nested, nests, strict=True):
        if loops:
            _thread(sch, rv, loops, last.rv if copy is not None and rv is copy else None, is_unrolled=bool(params["in_registers"]))
    if last.block.is_reduction and not is_whole:
        thread_loops.store_rows(sch, last.rv, ty)
    return True


def _thread(sch: Schedule, rv: Any, loops: Sequence[Any], copied: Any, *, is_unrolled: bool) -> None:
    """Give a block's loops to threads, vectors and lanes; `copied` is the block that it copies to the output, if it is that copy."""
    tx, iteration, lane = loops
    sch.bind(tx, "threadIdx.x")
    thread_loops.load_vectors(sch, rv if copied is None else copied, iteration)
    sch.unroll(lane) if copied is None else sch.vectorize(lane)
    if is_unrolled:
        sch.unroll(iteration)
    if copied is not None:
        sch.unroll(sch.get_loops(copied)[-1])


def _inline_row_values(sch: Schedule) -> None:
    """Inline blocks of one result per row: TVM may store it in the memory through which the row's threads reduce, and overwrite it."""
    found = blocks.leaves(sch) or []
    rows = min((leaf.extent_of("spatial") for leaf in found if leaf.block.is_reduction), default=0)
    for leaf in found:
        if not leaf.block.is_reduction and leaf.extent_of("spatial") <= rows and sch.get_consumers(leaf.rv):
            sch.compute_inline(leaf.rv)


def _along(sch: Schedule, rv: Any, leading: int, threads: int, width: int) -> list[Any]:
    """Return a block's loop over rows and, if it has them, those over threads, iterations and lanes."""
    loops = sch.get_loops(rv)
    row = sch.fuse(*loops[:leading]) if leading > 1 else loops[0]
    if len(loops) == leading:
        return [row]
    *outer, inner = loops[leading:]
    vectors, lane = sch.split(inner, [None, width])
    iteration, tx = sch.split(sch.fuse(*outer, vectors) if outer else vectors, [None, threads])
    sch.reorder(tx, iteration, lane)
    return [row, tx, iteration, lane]


def _leading_rows(found: Sequence[blocks.Leaf]) -> int | None:
    """Return how many leading axes all blocks share as rows; None where they share none or an axis has no loop of its own."""
    rows = reductions.leading_rows(found)
    return rows if all(None not in leaf.loops for leaf in found) else None


def _length(leaf: blocks.Leaf, leading: int) -> int:
    """Return the extent of the innermost axis along a row, which is split into vectors; 1 for a block of one result per row."""
    return leaf.block.axes[-1].extent if len(leaf.block.axes) > leading else 1
