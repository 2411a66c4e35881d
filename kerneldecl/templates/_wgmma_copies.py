"""Owns how a kernel on wgmma has TMA copy shares of operands to stages.

Knows nothing of who waits for copies.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kerneldecl.templates._wgmma_results import each

ENCODE = "runtime.cuTensorMapEncodeTiled"
LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes{}"
MULTICAST = ".multicast::cluster"
PREFETCH = "cp.async.bulk.prefetch.tensor.{}d.L2.global"


@T.inline
def copy(operand, copies, tensor_map, stage, row, share, at, slot, mask):
    """Have one thread start the copies of a block's share of an operand to a stage; `slot` is the barrier that they are counted by."""
    buffer, state = each(stage)
    batch, step = each(at)
    for piece in T.unroll(copies.count):
        number = T.meta_var(share * copies.count + piece)
        if mask is None:
            T.ptx[LOAD.format(copies.map.rank, "")](
                buffer.ptr_to([state.stage, copies.place(number) * operand.row_elements]),
                T.address_of(tensor_map),
                *copies.coords(batch, row, step, number),
                slot,
            )
        else:
            T.ptx[LOAD.format(copies.map.rank, MULTICAST)](
                buffer.ptr_to([state.stage, copies.place(number) * operand.row_elements]),
                T.address_of(tensor_map),
                *copies.coords(batch, row, step, number),
                slot,
                mask,
            )


@T.inline
def _foresee(operand, tensor_map, row, share, at):
    """Have one thread ask the second-level cache for a block's share of an operand: a hint, which reads no values."""
    copies = T.meta_var(operand.copies[0])
    batch, step = each(at)
    for piece in T.unroll(copies.count):
        coords = T.meta_var(copies.coords(batch, row, step, share * copies.count + piece))
        T.ptx[PREFETCH.format(copies.map.rank)](T.address_of(tensor_map), *coords)


@T.inline
def foresee(kernel, walk, maps, place):
    """Have one thread bring the first stages of the larger operand as far as L2; the kernel in front may still write to either."""
    rank_m, rank_n, part = each(place)
    tiles = T.meta_var(kernel.tiles)
    for i in T.serial(min(tiles.stages, kernel.part_steps)):
        at = T.meta_var((walk.batch, part * kernel.part_steps + i))
        if kernel.has_more_rows and kernel.rows.gather is None:
            _foresee(kernel.rows, maps[0], (walk.row * tiles.cluster_m + rank_m) * tiles.block_m, rank_n, at)
        if not kernel.has_more_rows and kernel.columns.gather is None:
            _foresee(kernel.columns, maps[1], (walk.column * tiles.cluster_n + rank_n) * tiles.block_n, rank_m, at)
