"""Owns how a kernel on wgmma has TMA copy shares of operands to stages.

Knows nothing of who waits for copies.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kerneldecl.templates._wgmma_results import each

ENCODE = "runtime.cuTensorMapEncodeTiled"
LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes{}"
MULTICAST = ".multicast::cluster"


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


@T.inline
def copy(operand, copies, tensor_map, stage, row, share, at, slot, mask):
    """Have one thread start the copies of a block's share of an operand to a stage; `slot` is the barrier that they are counted by."""
    for piece in T.unroll(copies.count):
        number = T.meta_var(share * copies.count + piece)
        is_there = T.meta_var(True if copies.total == 0 else number < copies.total)
        if is_there:
            _start(operand, copies, tensor_map, stage, row, number, at, slot, mask)
