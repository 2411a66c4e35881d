"""Owns what GPU templates of GEMMs share: the normal form, split-K, copies of operands, the epilogue, software pipelines.

Knows nothing of policies, tile sizes, tensor cores or any one operator.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import IRModule
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError
from tvm.tirx import IndexMap, IntImm

from kerneldecl.analysis.contraction import Contraction, Operand, contraction_of
from kerneldecl.analysis.gpu_limits import MIN_ASYNC_COPY_BYTES, WARP_LANES
from kerneldecl.compiler.blocks import is_reduction
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.shared.contraction import fuse_epilogue, only_reduction

SPLIT_K_VECTOR = 4
"""Results per thread of the split-K reduction at most."""
SPLIT_K_THREADS_WANTED = 1 << 16
"""Threads below which the split-K reduction has fewer results per thread."""
SPLIT_K_BLOCK = 256
"""Threads per block of the split-K reduction at most."""
REST_BLOCK = 256
"""Threads of a block of the kernels behind a GEMM."""
SPLIT_K_BLOCKS_WANTED = 128
"""Blocks below which the split-K reduction has smaller blocks: a few SMs alone do not saturate L2."""


OWN_KERNEL = "kerneldecl.own_kernel"
"""Annotation of a block that puts results in other places, which is no part of the kernel that stores accumulators."""


@dataclass(frozen=True)
class NormalForm:
    """A GEMM in normal form: C[batch, m, n] += A[batch, m or k, …] * B[batch, n or k, …]."""

    gemm: Contraction
    block: Any
    store: Any
    """The block that reads the accumulators; `place_store` moves it to its loop."""
    split_k: Any = None
    """With split-K, whose parts are then a batch axis: the block that adds the accumulators of all parts."""
    rest: tuple[Any, ...] = ()
    """Blocks that read several results for one element each, as gated GEMMs have: kernels of their own, by `schedule_rest`."""


def read_gemm(mod: IRModule) -> Contraction | None:
    """Return the GEMM that a module's function computes, or None."""
    try:
        found = contraction_of(iter_space(mod))
    except ValueError:
        return None
    return found if isinstance(found, Contraction) else None


def normalize(sch: Schedule, gemm: Contraction, tile: Sequence[int], *, k_first: bool = False, split_k: int = 1) -> NormalForm | None:
    """Bring a GEMM into normal form, padded to multiples of the tile (m, n, k), with accumulators in registers.

    Operands keep their own order of k and the other axis, so that what is contiguous stays so; with `k_first`, k always comes
    first. With split-K, accumulators are stored in global memory for `reduce_split_k`. Blocks that are no epilogue are the `rest`. None
    where there are several reductions.
    """
    fused, block = fuse_epilogue(sch, has_behind=True), only_reduction(sch)
    if block is None:
        return None
    behind = None if fused is None else fused.behind
    if behind is not None:
        sch.annotate(behind, OWN_KERNEL, 1)
    rest = (behind,) if behind is not None else () if fused else tuple(sch.get_consumers(block))
    # 1. Copies indexed by the block's own axes, which are inlined later; each group of axes is fused.
    for operand, spatial in ((gemm.a, gemm.m), (gemm.b, gemm.n)):
        sch.reindex(block, ("read", operand.position))
        groups = [gemm.k, spatial] if k_first or not operand.is_k_last else [spatial, gemm.k]
        fuse_dims(sch, block, ("read", operand.position), [gemm.batch, *groups])
    sch.reindex(block, ("write", 0))
    fuse_dims(sch, block, ("write", 0), [gemm.batch, gemm.m, gemm.n])
    sizes = [int(axis.dom.extent) for axis in sch.get(block).iter_vars]
    groups = [group for group in (gemm.batch, gemm.m, gemm.n, gemm.k) if group or group is not gemm.batch]
    index_dtype = str(sch.get(block).iter_vars[0].var.ty.dtype)
    normal = IndexMap.from_func(lambda *axes: [flat(group, axes, sizes) for group in groups], ndim=len(sizes), index_dtype=index_dtype)
    sch.transform_block_layout(block, normal)
    # 2. Whole tiles; the copies that pad are inlined later, too.
    m, n, k = tile
    sch.pad_einsum(block, [*([1] if gemm.batch else []), m, n, k * split_k])
    if split_k == 1:
        return NormalForm(gemm, block, sch.cache_write(block, 0, "local"), rest=rest)
    # 3. Split-K.
    part, _ = sch.split(sch.get_loops(block)[-1], [split_k, None])
    partial = sch.rfactor(part, 0)
    *batch, row, column, part, k = sch.get_loops(partial)
    sch.reorder(part, *batch, row, column, k)
    if batch:
        sch.fuse(part, *batch)
    return NormalForm(gemm, partial, sch.cache_write(partial, 0, "local"), block, rest=rest)


def schedule_rest(sch: Schedule, rest: Sequence[Any]) -> None:
    """Run the blocks behind a GEMM, which read it from global memory, with a thread for each element."""
    for block in rest:
        loops = sch.get_loops(block)
        grid, thread = sch.split(sch.fuse(*loops) if len(loops) > 1 else loops[0], [None, REST_BLOCK])
        sch.bind(grid, "blockIdx.x")
        sch.bind(thread, "threadIdx.x")


def reduce_split_k(sch: Schedule, block: Any, gemm: Contraction) -> None:
    """Add the accumulators of all parts, always in the same order, in a second kernel that stores results through the epilogue."""
    store = sch.cache_write(block, 0, "local")
    *outer, column, part = sch.get_loops(block)
    results = math.prod(int(sch.get(loop).extent) for loop in (*outer, column))
    # A thread has a few loads in flight, however wide they are: few results need many threads.
    vector = math.gcd(gemm.out_contiguous, SPLIT_K_VECTOR, max(1, results // SPLIT_K_THREADS_WANTED))
    column, element = sch.split(column, [None, vector])
    grid = sch.fuse(*outer, column)
    grid, thread = sch.split(grid, [None, _split_k_block(int(sch.get(grid).extent))])
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    sch.reorder(part, element)
    place_store(sch, store, thread)
    sch.unroll(part)
    if vector > 1:
        sch.vectorize(sch.get_loops(store)[-1])
        sch.vectorize(element)
    init = sch.decompose_reduction(block, part)
    if vector > 1:
        sch.vectorize(sch.get_loops(init)[-1])


def _split_k_block(threads: int) -> int:
    """Return the threads per block of a split-K reduction with so many threads."""
    return min(SPLIT_K_BLOCK, max(WARP_LANES, threads // SPLIT_K_BLOCKS_WANTED // WARP_LANES * WARP_LANES))


def place_store(sch: Schedule, store: Any, loop: Any, *, keeps_unit_loops: bool = False) -> None:
    """Move the store of accumulators under a loop, through the epilogue, with the bounds of the result.

    The blocks after the store bring the bounds. TVM drops the predicate of a block that it moves, so they are inlined after the move.
    """
    sch.reverse_compute_at(store, loop, preserve_unit_loops=keeps_unit_loops)
    while (following := sch.get_consumers(store)) and _is_one_to_one(sch.get(following[0])):
        sch.reverse_compute_inline(following[0])


def _is_one(extent: Any) -> bool:
    return isinstance(extent, IntImm) and int(extent) == 1


def _is_one_to_one(block: Any) -> bool:
    """Say whether a block makes one element of one: TVM gives the region from the first to the last one that it reads."""
    return (
        not is_reduction(block)
        and OWN_KERNEL not in block.annotations
        and all(_is_one(dim.extent) for read in block.reads for dim in read.region)
    )


def fuse_dims(sch: Schedule, block: Any, operand: tuple[str, int], groups: Sequence[Sequence[int]]) -> None:
    """Lay an operand out with one dimension per group of the block's axes, in their order; an empty first group has none."""
    sblock = sch.get(block)
    variables = [axis.var for axis in sblock.iter_vars]
    sizes = [int(axis.dom.extent) for axis in sblock.iter_vars]
    region = (sblock.reads if operand[0] == "read" else sblock.writes)[operand[1]]
    dims = {next(at for at, var in enumerate(variables) if dim.min.same_as(var)): dim_at for dim_at, dim in enumerate(region.region)}

    def fused(*index: Any) -> list[Any]:
        axes = {at: index[dim_at] for at, dim_at in dims.items()}
        kept = [group for at, group in enumerate(groups) if group or at]
        return [flat([at for at in group if at in axes], axes, sizes) for group in kept]

    sch.transform_layout(block, operand, fused)


def flat(group: Sequence[int], axes: Any, sizes: Sequence[int]) -> Any:
    """Return one index over a group of axes, without those of extent 1 where there are others: TVM simplifies two of them to 0."""
    flat: Any = 0
    for at in [at for at in group if sizes[at] > 1] or group[-1:]:
        flat = axes[at] if isinstance(flat, int) else flat * sizes[at] + axes[at]
    return flat


def inline_sources(sch: Schedule, copy: Any, but: Sequence[Any] = ()) -> None:
    """Inline all producers of a copy except the blocks in `but`, so that it reads these or the function's arguments."""
    while True:
        inlined = False
        kept = [sch.get(block) for block in but]
        for producer in sch.get_producers(copy):
            if any(sch.get(producer).same_as(block) for block in kept):
                continue
            with contextlib.suppress(ScheduleError):  # what TVM cannot inline stays a kernel of its own, and fails later
                sch.compute_inline(producer)
                inlined = True
        if not inlined:
            return


def copy_vector(operand: Operand, elements: int, threads: int) -> int:
    """Return the elements per copy instruction of a thread with which all threads copy a tile in whole passes."""
    return math.gcd(operand.vector(), max(1, elements // threads))


def can_copy_async(operand: Operand, vector: int) -> bool:
    """Say whether cp.async can copy vectors of an operand: 4, 8 or 16 bytes at offsets that TVM computes in 32 bits."""
    return vector * dtype_bytes(operand.dtype) >= MIN_ASYNC_COPY_BYTES and operand.size_bytes < 2**31


def interleave_lanes(sch: Schedule, rows: Any, columns: Any) -> list[Any]:
    """Return the loops over a warp's lanes, innermost last: lanes that differ by 1 share a row, lanes that differ by 2 a column.

    Shared memory serves 16-byte loads of half a warp at once where each address is loaded by a pair of lanes that differ by 1 or
    by 2; otherwise those of a quarter of a warp.
    """
    row, row_pair = sch.split(rows, [None, 2])
    column, column_pair = sch.split(columns, [None, 2])
    sch.reorder(row, column, row_pair, column_pair)
    return [row, column, row_pair, column_pair]


def rasterize(sch: Schedule, rows: Any, columns: Any, group: int) -> Any:
    """Return one loop over tiles that visits `group` rows of tiles in a column before the next column, for reuse in L2."""
    outer, inner = sch.split(rows, [None, group])
    sch.reorder(outer, columns, inner)
    return sch.fuse(outer, columns, inner)


def pipeline(sch: Schedule, loop: Any, stages: int, *, asynchronous: bool, within: Any = None) -> None:
    """Software-pipeline a k-loop of two copies and a computation with `stages` stages: copies run `stages - 1` iterations ahead.

    Where the computation is a loop `within` of two loads and an MMA, its loads are double-buffered in registers, also across
    iterations of the k-loop: its first loads come between its other loads and its last MMA.
    """
    if stages < 2:
        return
    if within is not None:
        sch.annotate(within, "software_pipeline_stage", [0, 0, 1])
        sch.annotate(within, "software_pipeline_order", [0, 1, 2])
    computing = [stages - 1] if within is None else [stages - 2, stages - 1, stages - 1]
    sch.annotate(loop, "software_pipeline_stage", [0, 0, *computing])
    sch.annotate(loop, "software_pipeline_order", [0, 1, 2] if within is None else [0, 1, 3, 2, 4])
    if asynchronous:
        sch.annotate(loop, "software_pipeline_async_stages", [0])
