"""Owns how schedules hold fragments of mma.sync: which lane has which element, how fragments are loaded, cleared and stored.

Knows nothing of policies, tile sizes or how operands come into shared memory.
"""

from __future__ import annotations

import math
from typing import Any

from tvm.ir import TensorLoad
from tvm.s_tir import Schedule

from kerneldecl.analysis.contraction import Contraction, Operand
from kerneldecl.compiler.intrinsics.mma import LANES, ROWS, MmaIntrinsics, fragment_place, mma_intrinsics
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.gpu.gemm import place_store

STORED_AT_ONCE = 4
"""Sums that a thread takes from shared memory in one go: 16 bytes."""
PERMUTED_ROWS = (32, 64, 128, 256)
"""Lengths of rows of 16-bit elements in shared memory that are permuted; others are padded."""


def intrinsics_of(sch: Schedule, block: Any, gemm: Contraction, *, a_k_last: bool) -> MmaIntrinsics:
    """Return the intrinsics for the product as its author wrote it; `a_k_last` says that A is contiguous along k."""
    total = sch.get(block).body
    is_sum_first = isinstance(total.value.a, TensorLoad) and total.value.a.source.same_as(total.buffer)
    operands = "ab" if gemm.a.position == 0 else "ba"
    order = f"c+{operands}" if is_sum_first else f"{operands}+c"
    return mma_intrinsics(gemm.a.dtype, gemm.accum_dtype, a_k_last=a_k_last, b_k_last=gemm.b.is_k_last, order=order)


def placed(dtype: str) -> Any:
    """Return the layout of a buffer whose last two dimensions are cut into fragments, each spread over a warp."""
    columns = 32 // dtype_bytes(dtype) if dtype_bytes(dtype) == 1 else ROWS

    def layout(*index: Any) -> list[Any]:
        *batch, row, column = index
        return [*batch, row // ROWS, column // columns, *fragment_place(row % ROWS, column % columns, dtype)]

    return layout


def spread(sch: Schedule, block: Any, below: Any, *, is_paired: bool) -> Any:
    """Have each lane work on the elements that it holds, pairs of neighbours in two rows and two columns of each fragment.

    The loops below `below` are unrolled: TVM's CUDA reads a pair into a variable that it takes for the next pair as well where both
    are in one loop. Return the loop around a pair.
    """
    *outer, row, column = _below(sch, block, below)
    m, m_half, m_lane = sch.split(row, [None, 2, 8])
    n, n_half, n_lane, pair = sch.split(column, [None, 2, 4, 2])
    sch.reorder(m, n, m_lane, n_lane, m_half, n_half, pair)
    sch.bind(sch.fuse(m_lane, n_lane), "threadIdx.x")
    for loop in (*outer, m, n, m_half, n_half):
        sch.unroll(loop)
    if is_paired:
        sch.vectorize(pair)
    else:
        sch.unroll(pair)
    return n_half


def _below(sch: Schedule, block: Any, outer: Any) -> list[Any]:
    """Return the loops between a loop around a block and the block."""
    loops: list[Any] = list(sch.get_loops(block))
    return loops[1 + next(at for at, loop in enumerate(loops) if sch.get(loop).same_as(sch.get(outer))) :]


def load_by_matrices(sch: Schedule, load: Any, operand: Operand, steps: int, intrinsic: str) -> Any:
    """Have ldmatrix load an operand's fragments; return the block that is one fragment."""
    rows, columns = (ROWS, steps) if operand.is_k_last else (steps, ROWS)
    sch.transform_layout(load, ("write", 0), placed(operand.dtype))
    row, column = sch.get_loops(load)[-2:]
    row, row_in = sch.split(row, [None, rows])
    column, column_in = sch.split(column, [None, columns])
    sch.reorder(row, column, row_in, column_in)
    whole = sch.blockize(row_in)
    sch.tensorize(whole, intrinsic)
    return whole


def spread_copy(sch: Schedule, copy: Any, warps: int, vector: int) -> Any:
    """Spread a copy over a block's threads, in vectors; return the loop around them.

    TVM must see that a vector lies within the operand or beyond it, and within one run of channels, or it takes it apart.
    With rows of a power of 2 it sees both where rows are joined first; with others, the former where they are cut first.
    """
    row, column = sch.get_loops(copy)[-2:]
    if int(sch.get(column).extent).bit_count() == 1:
        step, by_warp, lane, element = sch.split(sch.fuse(row, column), [None, warps, LANES, vector])
    else:
        column, element = sch.split(column, [None, vector])
        step, by_warp, lane = sch.split(sch.fuse(row, column), [None, warps, LANES])
    sch.bind(by_warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    sch.vectorize(element)
    return step


def keep_apart(sch: Schedule, copy: Any, load: Any, row_length: int, dtype: str) -> None:
    """Have rows of a tile in shared memory lie so that ldmatrix reads eight of them from different banks."""
    if dtype_bytes(dtype) == 2 and row_length in PERMUTED_ROWS:
        sch.annotate(copy, "permuted_layout", 1)
        sch.annotate(load, "permuted_layout", 1)
    else:
        sch.storage_align(copy, 0, axis=-2, factor=32, offset=16 // dtype_bytes(dtype))


def store_sums(sch: Schedule, store: Any, warp: Any, gemm: Contraction) -> Any:
    """Have each lane store the sums that mma.sync leaves with it; return the block that takes them from there."""
    sums = sch.cache_read(store, 0, "local")
    sch.reverse_compute_at(sums, warp)
    place_store(sch, store, warp)
    sch.compute_at(sums, spread(sch, store, warp, is_paired=gemm.out_contiguous % 2 == 0), preserve_unit_loops=True)
    sch.unroll(sch.get_loops(sums)[-1])
    return sums


def store_tile(sch: Schedule, store: Any, loops: tuple[Any, Any], warps: int, gemm: Contraction) -> Any:
    """Have a block gather its sums in shared memory and store whole rows of them; return the block that takes them from the lanes.

    `loops` are those over blocks and over warps. A lane alone stores 4 to 8 bytes here and there; L2 takes 32 in one go.
    """
    tile, warp = loops
    gathered = sch.cache_read(store, 0, "shared.dyn")
    sums = sch.cache_read(gathered, 0, "local")
    for following in (sums, gathered):
        sch.reverse_compute_at(following, warp)
    sch.compute_at(sums, spread(sch, gathered, warp, is_paired=True), preserve_unit_loops=True)
    sch.unroll(sch.get_loops(sums)[-1])
    sch.storage_align(gathered, 0, axis=-2, factor=32, offset=8)
    place_store(sch, store, tile)
    places = _below(sch, store, tile)
    vector = math.gcd(gemm.out_contiguous, STORED_AT_ONCE)
    step, by_warp, lane, element = sch.split(sch.fuse(*places), [None, warps, LANES, vector])
    sch.bind(by_warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    sch.vectorize(element)
    sch.unroll(step)
    return sums


def clear_sums(sch: Schedule, fragment: Any, sums: Any, reduction: Any, names: MmaIntrinsics, dtype: str) -> None:
    """Have fragments of sums be zero before the reduction's loop."""
    start = sch.decompose_reduction(fragment, reduction)
    sch.transform_layout(sums, ("read", 0), placed(dtype))
    sch.tensorize(sch.get_loops(sch.get_child_blocks(start)[0])[-2], names.clear)
