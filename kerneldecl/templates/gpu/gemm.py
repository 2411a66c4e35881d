"""Owns what the GPU's contraction templates share: the normal form of a product, its copies, its results' way out.

Knows nothing of policies, tile sizes, tensor cores or any one operator.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import IRModule
from tvm.error import InternalError
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError
from tvm.tirx import IndexMap

from kerneldecl.analysis.contraction import Contraction, Operand, contraction_of
from kerneldecl.compiler.blocks import is_reduction
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.shared.contraction import epilogue_of, merge, only_reduction

WARP = 32
SUMMED_AT_ONCE = 4
MANY_RESULTS = 1 << 16
SUMMING_THREADS = 256
SUMMING_BLOCKS = 128
"""Of threads at least, where there are so many warps: few blocks would draw from L2 what few SMs can."""
MAX_GRID_Z = 65535
"""The launch's limit (CUDA C++ Programming Guide, table of technical specifications)."""


@dataclass(frozen=True)
class Normal:
    """A product in normal form: C[batch, m, n] += A[batch, m or k, …] * B[batch, n or k, …]."""

    gemm: Contraction
    block: Any
    store: Any
    """The block that takes the sums out of where they are kept; `place_store` puts it in its place."""
    whole: Any = None
    """Where the reduction is cut into parts, which are as the batch's axis: the block that adds their sums."""


def attempt(mod: IRModule, recipe: Callable[[Schedule], bool]) -> Schedule | None:
    """Return the schedule that a recipe makes of the module, None where the recipe says no or a primitive refuses."""
    sch = Schedule(mod)
    try:
        return sch if recipe(sch) else None
    except (ScheduleError, InternalError):
        return None


def product_of(mod: IRModule) -> Contraction | None:
    """Return the product that a module's function is, or None."""
    try:
        found = contraction_of(iter_space(mod))
    except ValueError:
        return None
    return found if isinstance(found, Contraction) else None


def normalize(
    sch: Schedule, gemm: Contraction, tile: Sequence[int], scope: str, *, k_first: bool = False, split_k: int = 1
) -> Normal | None:
    """Bring a product into normal form, padded to multiples of the tile (m, n, k), its sums kept in `scope`.

    Operands keep their own order of k and the other axis, so that what is contiguous stays so; with `k_first`, k comes
    before it in any case. Sums of more than one part are left in global memory for `sum_parts`. None where what follows
    the product cannot be merged into one block.
    """
    block = only_reduction(sch)
    epilogue = None if block is None else epilogue_of(sch, block)
    if epilogue is None:
        return None
    if epilogue:
        merge(sch, epilogue)
    # 1. Copies indexed by the block's own axes, which are to disappear again; each group of axes becomes one.
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
    # 2. Whole tiles; the copies that pad disappear as well.
    m, n, k = tile
    sch.pad_einsum(block, [*([1] if gemm.batch else []), m, n, k * split_k])
    if split_k == 1:
        return Normal(gemm, block, sch.cache_write(block, 0, scope))
    # 3. Parts.
    part, _ = sch.split(sch.get_loops(block)[-1], [split_k, None])
    part_sums = sch.rfactor(part, 0)
    *batch, row, column, part, step = sch.get_loops(part_sums)
    sch.reorder(part, *batch, row, column, step)
    if batch:
        sch.fuse(part, *batch)
    return Normal(gemm, part_sums, sch.cache_write(part_sums, 0, scope), block)


def sum_parts(sch: Schedule, whole: Any, gemm: Contraction) -> None:
    """Add the sums of all parts, always in one order, in a kernel of its own that stores the result through the epilogue."""
    store = sch.cache_write(whole, 0, "local")
    *places, column, part = sch.get_loops(whole)
    results = math.prod(int(sch.get(loop).extent) for loop in (*places, column))
    # A thread has a few loads on its way, however wide they are: few results want many threads.
    vector = math.gcd(gemm.out_contiguous, SUMMED_AT_ONCE, max(1, results // MANY_RESULTS))
    column, element = sch.split(column, [None, vector])
    place = sch.fuse(*places, column)
    place, thread = sch.split(place, [None, _summing_threads(int(sch.get(place).extent))])
    sch.bind(place, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    sch.reorder(part, element)
    place_store(sch, store, thread)
    sch.unroll(part)
    if vector > 1:
        sch.vectorize(sch.get_loops(store)[-1])
        sch.vectorize(element)
    start = sch.decompose_reduction(whole, part)
    if vector > 1:
        sch.vectorize(sch.get_loops(start)[-1])


def _summing_threads(places: int) -> int:
    return min(SUMMING_THREADS, max(WARP, places // SUMMING_BLOCKS // WARP * WARP))


def place_store(sch: Schedule, store: Any, loop: Any) -> None:
    """Have a loop store the results of its sums, through the epilogue, and nothing beyond the result's bounds.

    The bounds come with what follows the sums; TVM drops those of a block that it moves, so the block moves first.
    """
    sch.reverse_compute_at(store, loop)
    while (following := sch.get_consumers(store)) and not is_reduction(sch.get(following[0])):
        sch.reverse_compute_inline(following[0])


def fuse_dims(sch: Schedule, block: Any, operand: tuple[str, int], groups: Sequence[Sequence[int]]) -> None:
    """Lay an operand out with one dimension for each group of the block's axes, in their order; none for an empty first group."""
    stage = sch.get(block)
    variables = [axis.var for axis in stage.iter_vars]
    sizes = [int(axis.dom.extent) for axis in stage.iter_vars]
    region = (stage.reads if operand[0] == "read" else stage.writes)[operand[1]]
    place = {next(at for at, var in enumerate(variables) if dim.min.same_as(var)): dim_at for dim_at, dim in enumerate(region.region)}

    def fused(*index: Any) -> list[Any]:
        axes = {at: index[dim_at] for at, dim_at in place.items()}
        kept = [group for at, group in enumerate(groups) if group or at]
        return [flat([at for at in group if at in axes], axes, sizes) for group in kept]

    sch.transform_layout(block, operand, fused)


def flat(group: Sequence[int], axes: Any, sizes: Sequence[int]) -> Any:
    """Return one index over a group of axes. Those of extent 1 count only where there are no others: TVM makes 0 of two."""
    flat: Any = 0
    for at in [at for at in group if sizes[at] > 1] or group[-1:]:
        flat = axes[at] if isinstance(flat, int) else flat * sizes[at] + axes[at]
    return flat


def inline_sources(sch: Schedule, copy: Any, but: Sequence[Any] = ()) -> None:
    """Inline all that a copy is made from, so that it reads the function's arguments or the results of the blocks in `but`."""
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


def vector_of(operand: Operand, elements: int, threads: int) -> int:
    """Return how many elements each thread copies at once, so that all threads copy a whole tile in whole steps."""
    return math.gcd(operand.vector(), max(1, elements // threads))


def is_async(operand: Operand, vector: int) -> bool:
    """Say whether cp.async can copy vectors: it takes 4, 8 or 16 bytes, and TVM counts bytes for it in 32 bits."""
    return vector * dtype_bytes(operand.dtype) >= 4 and operand.size_bytes < 2**31


def interleaved(sch: Schedule, rows: Any, columns: Any) -> list[Any]:
    """Return the lanes of a warp, innermost last, so that lanes 1 apart share a row and lanes 2 apart a column.

    Shared memory serves 16-byte loads of half a warp at once if each address is wanted by a pair of lanes whose numbers
    differ by 1, or by 2; else a quarter of a warp.
    """
    row, row_pair = sch.split(rows, [None, 2])
    column, column_pair = sch.split(columns, [None, 2])
    sch.reorder(row, column, row_pair, column_pair)
    return [row, column, row_pair, column_pair]


def rasterize(sch: Schedule, rows: Any, columns: Any, group: int) -> Any:
    """Return one loop over tiles that walks `group` rows of a column before the next column: what both read stays in L2."""
    outer, inner = sch.split(rows, [None, group])
    sch.reorder(outer, columns, inner)
    return sch.fuse(outer, columns, inner)


def pipeline(sch: Schedule, loop: Any, stages: int, *, asynchronous: bool, within: Any = None) -> None:
    """Have a loop of two copies and a computation copy `stages - 1` iterations ahead.

    Where the computation is a loop `within` of two loads and a computation, that one loads an iteration ahead, across the
    outer loop's iterations as well: its first loads come between the others and its last computation.
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
