"""Owns how the last waves of tiles are dealt evenly over clusters (stream-K): whose steps are whose, and how partial sums meet.

Knows nothing of loading, multiplying or storing results.

Osama, Merrill, Cecka, Garland, Owens, "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU",
PPoPP 2023. Each cluster takes one share of the steps, in a row. What it begins with may be the end of another's tile: it leaves those sums
in a workspace, without having waited for anything. Who began the tile comes to it last, and adds what the others left in one order.
Shares go to clusters backwards, so that a cluster waits only for clusters that were started before it.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import each
from kerneldecl.templates.hopper.kernel_config import Kernel
from kerneldecl.templates.hopper.params import WARPGROUP

VECTOR = 4
"""Sums in 16 bytes."""
AT_ONCE = 32
"""Most sums that a thread asks for at once, in registers beside its own."""


class Workspace:
    """Partial sums in global memory, a place for each block's, and the flags that say that they are there: one for each consumer."""

    def __init__(self, kernel: Kernel) -> None:
        blocks, consumers = kernel.clusters * kernel.tiles.cluster, kernel.tiles.consumers
        shape = (blocks, consumers, kernel.tiles.sums // VECTOR, WARPGROUP, VECTOR)
        self.sums = tirx.decl_buffer(shape, kernel.registers_dtype, "partial_sums")
        self.flags = tirx.decl_buffer((blocks * consumers,), "uint32", "flags")

    def allocated_for(self, body: Any) -> Any:
        """Return a function's body with this memory, whose flags a kernel of their own clears first: the memory may be anyone's before."""
        return tirx.SeqStmt([tirx.AllocBuffer(self.sums), tirx.AllocBuffer(self.flags), _clearing(self.flags), body])


def _clearing(flags: Any) -> Any:
    count = int(flags.shape[0])
    warps = -(-count // 32)

    @T.prim_func(check_well_formed=False)
    def clear():
        T.device_entry()
        T.attr({"tirx.use_programtic_dependent_launch": True})
        T.cta_id([1])
        warp = T.warp_id([warps])
        lane = T.lane_id([32])
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
        if warp * 32 + lane < count:
            flags[warp * 32 + lane] = T.uint32(0)

    return clear.body


@T.inline
def leave_sums(kernel, workspace, acc, block, worker, lanes):
    """Have a warpgroup put the sums of its piece of a tile where the one that began the tile finds them, and say so."""
    warp, lane = each(lanes)
    for i in T.unroll(kernel.tiles.sums // VECTOR):
        T.ptx[f"st.global.v4.{kernel.word}"](
            workspace.sums.ptr_to([block, worker, i, warp * 32 + lane, 0]), *[acc[i * VECTOR + v] for v in range(VECTOR)]
        )
    T.cuda.warpgroup_sync(1 + worker)
    if (warp == 0) & (lane == 0):
        T.ptx.st.release.gpu.global_.u32(T.address_of(workspace.flags[block * kernel.tiles.consumers + worker]), T.uint32(1))


@T.inline
def add_sums(kernel, workspace, acc, block, worker, lanes):
    """Have a warpgroup wait for the sums that a block left of its tile, and add them to its own."""
    warp, lane = each(lanes)
    if (warp == 0) & (lane == 0):
        is_there = T.local_scalar("uint32")
        is_there = T.uint32(0)
        while is_there == T.uint32(0):
            T.ptx.ld.acquire.gpu.global_.u32(is_there, T.address_of(workspace.flags[block * kernel.tiles.consumers + worker]))
    T.cuda.warpgroup_sync(1 + worker)
    at_once = T.meta_var(math.gcd(kernel.tiles.sums, AT_ONCE))
    theirs = T.alloc_local((at_once,), kernel.registers_dtype)
    for group in T.unroll(kernel.tiles.sums // at_once):
        for i in T.unroll(at_once // VECTOR):
            T.ptx[f"ld.global.v4.{kernel.word}"](
                *[theirs[i * VECTOR + v] for v in range(VECTOR)],
                workspace.sums.ptr_to([block, worker, group * (at_once // VECTOR) + i, warp * 32 + lane, 0]),
            )
        for i in T.unroll(at_once):
            acc[group * at_once + i] = acc[group * at_once + i] + theirs[i]
