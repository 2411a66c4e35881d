"""Owns stream-K's fixup: how clusters that have parts of a tile hand over partial accumulators, by a workspace in global memory.

Knows nothing of loading, multiplying or storing results.

Osama, Merrill, Cecka, Garland, Owens, "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU",
PPoPP 2023. Each cluster takes as many consecutive k-tiles. What it begins with may be the end of another's tile: it stores those partial
accumulators in the workspace, without having waited for anything. The cluster that has a tile's first k-tiles comes to it last, and adds
the others' partial accumulators in one order. K-tiles go to clusters backwards, so that a cluster waits only for clusters that were
started before it.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import WARPGROUP_THREADS
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.kernel_config import GemmKernel

VECTOR = 4
"""Accumulators in 16 bytes."""
AT_ONCE = 32
"""Most partial accumulators that a thread loads at once, in registers beside its own."""


class Workspace:
    """Partial accumulators in global memory, a place for each CTA's, and the flags that say that they are stored: one for each consumer."""

    def __init__(self, kernel: GemmKernel) -> None:
        ctas, self.consumers = kernel.clusters * kernel.params.cluster_ctas, kernel.params.consumers
        shape = (ctas, self.consumers, kernel.accum.count // VECTOR, WARPGROUP_THREADS, VECTOR)
        self.partials = tirx.decl_buffer(shape, kernel.accum.register_dtype, "partial_sums")
        self.flags = tirx.decl_buffer((ctas * self.consumers,), "uint32", "flags")

    def flag(self, cta: Any, consumer: Any) -> Any:
        return T.address_of(self.flags[cta * self.consumers + consumer])

    def allocated_for(self, body: Any) -> Any:
        """Return a function's body with this memory, whose flags a kernel of their own clears first: other kernels may have used it."""
        return tirx.SeqStmt([tirx.AllocBuffer(self.partials), tirx.AllocBuffer(self.flags), _clearing(self.flags), body])


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
def store_partials(kernel, workspace, acc, cta, consumer, lanes):
    """Have a warpgroup store the accumulators of its part of a tile for the cluster that finishes the tile, and set its flag."""
    warp, lane = meta_vars(lanes)
    for i in T.unroll(kernel.accum.count // VECTOR):
        T.ptx[f"st.global.v4.{kernel.accum.ptx_type}"](
            workspace.partials.ptr_to([cta, consumer, i, warp * 32 + lane, 0]), *[acc[i * VECTOR + v] for v in range(VECTOR)]
        )
    T.cuda.warpgroup_sync(1 + consumer)
    if (warp == 0) & (lane == 0):
        T.ptx.st.release.gpu.global_.u32(workspace.flag(cta, consumer), T.uint32(1))


@T.inline
def add_partials(kernel, workspace, acc, cta, consumer, lanes):
    """Have a warpgroup wait for the accumulators that a CTA stored of its tile, and add them to its own."""
    warp, lane = meta_vars(lanes)
    if (warp == 0) & (lane == 0):
        is_there = T.local_scalar("uint32")
        is_there = T.uint32(0)
        while is_there == T.uint32(0):
            T.ptx.ld.acquire.gpu.global_.u32(is_there, workspace.flag(cta, consumer))
    T.cuda.warpgroup_sync(1 + consumer)
    at_once = T.meta_var(math.gcd(kernel.accum.count, AT_ONCE))
    theirs = T.alloc_local((at_once,), kernel.accum.register_dtype)
    for group in T.unroll(kernel.accum.count // at_once):
        for i in T.unroll(at_once // VECTOR):
            T.ptx[f"ld.global.v4.{kernel.accum.ptx_type}"](
                *[theirs[i * VECTOR + v] for v in range(VECTOR)],
                workspace.partials.ptr_to([cta, consumer, group * (at_once // VECTOR) + i, warp * 32 + lane, 0]),
            )
        for i in T.unroll(at_once):
            acc[group * at_once + i] = acc[group * at_once + i] + theirs[i]
