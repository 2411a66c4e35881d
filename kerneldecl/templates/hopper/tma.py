"""Owns how a kernel on wgmma has TMA copy shares of operands to stages, or bring them to the second-level cache first.

Knows nothing of who waits for copies.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import each

ENCODE = "runtime.cuTensorMapEncodeTiled"
LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes{}"
MULTICAST = ".multicast::cluster"
PREFETCH = "cp.async.bulk.prefetch.tensor.{}d.L2.global"


@T.inline
def _start(operand, copies, tensor_map, stage, row, number, at, slot, mask):
    buffer, state = each(stage)
    batch, step = each(at)
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


def _is_there(copies, number):
    return True if copies.total == 0 else number < copies.total


@T.inline
def copy(operand, copies, tensor_map, stage, row, share, at, slot, mask):
    """Have one thread start the copies of a block's share of an operand to a stage; `slot` is the barrier that they are counted by."""
    for piece in T.unroll(copies.count):
        number = T.meta_var(share * copies.count + piece)
        if _is_there(copies, number):
            _start(operand, copies, tensor_map, stage, row, number, at, slot, mask)


@T.inline
def prefetch(copies, tensor_map, row, share, at):
    """Have one thread ask for what `copy` will copy; it comes to the second-level cache."""
    batch, step = each(at)
    for piece in T.unroll(copies.count):
        number = T.meta_var(share * copies.count + piece)
        if _is_there(copies, number):
            T.ptx[PREFETCH.format(copies.map.rank)](T.address_of(tensor_map), *copies.coords(batch, row, step, number))
