"""Owns fragments of mma.sync in schedules: their layout over lanes, loads by ldmatrix, initial accumulators, stores.

Knows nothing of policies, of tile sizes or of when operands are copied to shared memory.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tvm.ir import TensorLoad
from tvm.s_tir import Schedule

from kerneldecl.analysis.contraction import Contraction, Operand
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.analysis.params import PERMUTED_ROWS, ROW_MULTIPLE, ConvTcParams, GemmTcParams, row_padding
from kerneldecl.analysis.tensor_cores import shape_of
from kerneldecl.compiler.intrinsics.fragment_loads import LANES, ROWS, operand_place
from kerneldecl.compiler.intrinsics.mma import Interleaved, MmaIntrinsics, accumulator_place, mma_intrinsics
from kerneldecl.model import Gpu, dtype_bytes
from kerneldecl.templates.gpu.gemm import place_store

STORE_VECTOR = 4
"""Accumulators that a thread reads from shared memory with one instruction at most."""


class Results(NamedTuple):
    """What accumulators become, and how they lie in fragments."""

    gemm: Contraction
    interleaved: Interleaved


def intrinsics_of(sch: Schedule, block: Any, gemm: Contraction, gpu: Gpu, *, a_k_last: bool) -> MmaIntrinsics:
    """Return a GPU's intrinsics for the multiply-accumulate as the function writes it; `a_k_last` says that A is contiguous along k."""
    shape = shape_of("mma.sync", gemm.a.dtype, gpu.compute_capability)
    assert shape is not None, "why_no_tensor_cores says so"
    update = sch.get(block).body
    is_accum_first = isinstance(update.value.a, TensorLoad) and update.value.a.source.same_as(update.buffer)
    operands = "ab" if gemm.a.position == 0 else "ba"
    order = f"c+{operands}" if is_accum_first else f"{operands}+c"
    return mma_intrinsics(shape, gemm.accum_dtype, a_k_last=a_k_last, b_k_last=gemm.b.is_k_last, order=order)


def operand_layout(dtype: str, rows: int, columns: int, *, k_last: bool) -> Any:
    """Return the layout of a buffer whose last two dimensions are split into an operand's fragments, distributed over a warp's lanes."""

    def layout(*index: Any) -> list[Any]:
        *batch, row, column = index
        return [*batch, row // rows, column // columns, *operand_place(row % rows, column % columns, dtype, k_last=k_last)]

    return layout


def accumulator_layout(interleaved: Interleaved) -> Any:
    """Return the layout of a buffer whose last two dimensions are split into accumulators' fragments, distributed over a warp's lanes."""

    def layout(*index: Any) -> list[Any]:
        *batch, row, column = index
        return [*batch, row // ROWS, column // ROWS, *accumulator_place(row % ROWS, column % ROWS, interleaved)]

    return layout


def distribute_fragments(sch: Schedule, block: Any, outer_loop: Any, interleaved: Interleaved = (False, False), *, vectorize: bool) -> Any:
    """Bind a block's loops so that each lane handles its own elements: of a fragment, adjacent ones in two rows and one or two columns.

    The loops within `outer_loop` are unrolled: where two pairs are in one loop, TVM's CUDA reads the first into a variable and uses it
    for the second as well. Return the loop around adjacent elements, which `vectorize` makes one access: two, or four where columns
    are interleaved.
    """
    *outer, row, column = _loops_within(sch, block, outer_loop)
    if interleaved[0]:
        m, m_lane, m_half = sch.split(row, [None, 8, 2])
    else:
        m, m_half, m_lane = sch.split(row, [None, 2, 8])
    n, n_half, n_lane, pair = sch.split(column, [None, 1, 4, 4] if interleaved[1] else [None, 2, 4, 2])
    sch.reorder(m, n, m_lane, n_lane, m_half, n_half, pair)
    sch.bind(sch.fuse(m_lane, n_lane), "threadIdx.x")
    for loop in (*outer, m, n, m_half, n_half):
        sch.unroll(loop)
    if vectorize:
        sch.vectorize(pair)
    else:
        sch.unroll(pair)
    return n_half


def _loops_within(sch: Schedule, block: Any, outer: Any) -> list[Any]:
    """Return a block's loops within an outer one."""
    loops: list[Any] = list(sch.get_loops(block))
    return loops[1 + next(at for at, loop in enumerate(loops) if sch.get(loop).same_as(sch.get(outer))) :]


def load_fragments(sch: Schedule, load: Any, operand: Operand, k: int, intrinsic: str) -> Any:
    """Load an operand's fragments, of extent `k` along k, by ldmatrix; return the block that is one fragment."""
    rows, columns = (ROWS, k) if operand.is_k_last else (k, ROWS)
    sch.transform_layout(load, ("write", 0), operand_layout(operand.dtype, rows, columns, k_last=operand.is_k_last))
    row, column = sch.get_loops(load)[-2:]
    row, row_in = sch.split(row, [None, rows])
    column, column_in = sch.split(column, [None, columns])
    sch.reorder(row, column, row_in, column_in)
    fragment = sch.blockize(row_in)
    sch.tensorize(fragment, intrinsic)
    return fragment


def distribute_copy(sch: Schedule, copy: Any, warps: int, vector: int, *, is_computed: bool = False) -> Any:
    """Distribute a copy over a block's threads, in vectors; return the loop around the threads.

    Where elements are computed, such as dequantised weights, a thread computes those of a vector one by one: TVM's CUDA has no vectors of
    their indices.

    TVM splits a vector into elements unless it can prove that the vector is within the operand or beyond it, and in contiguous
    channels. With rows of a power of 2 it proves both where rows are fused first; with others, the former where they are split first.
    """
    row, column = sch.get_loops(copy)[-2:]
    if int(sch.get(column).extent).bit_count() == 1:
        iteration, by_warp, lane, element = sch.split(sch.fuse(row, column), [None, warps, LANES, vector])
    else:
        column, element = sch.split(column, [None, vector])
        iteration, by_warp, lane = sch.split(sch.fuse(row, column), [None, warps, LANES])
    sch.bind(by_warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    if is_computed:
        sch.unroll(element)
    else:
        sch.vectorize(element)
    return iteration


def avoid_bank_conflicts(sch: Schedule, copy: Any, load: Any, row_length: int, dtype: str) -> None:
    """Permute or pad a tile's rows in shared memory so that ldmatrix reads eight of them from different banks."""
    if dtype_bytes(dtype) == 2 and row_length in PERMUTED_ROWS:
        sch.annotate(copy, "permuted_layout", 1)
        sch.annotate(load, "permuted_layout", 1)
    else:
        sch.storage_align(copy, 0, axis=-2, factor=ROW_MULTIPLE, offset=row_padding(dtype_bytes(dtype)))


def store_accumulators(sch: Schedule, store: Any, loops: tuple[Any, Any], tiles: GemmTcParams | ConvTcParams, results: Results) -> Any:
    """Store the accumulators as the parameters say; return the block that reads them in registers. `loops` are over blocks and warps."""
    if tiles.smem_epilogue:
        return _store_through_smem(sch, store, loops, tiles.warps, results)
    return _store_from_registers(sch, store, loops[1], results)


def _store_from_registers(sch: Schedule, store: Any, warp: Any, results: Results) -> Any:
    """Have each lane store the accumulators in its registers."""
    accum = sch.cache_read(store, 0, "local")
    sch.reverse_compute_at(accum, warp)
    place_store(sch, store, warp)
    adjacent = 4 if results.interleaved[1] else 2
    pair = distribute_fragments(sch, store, warp, results.interleaved, vectorize=results.gemm.out_contiguous % adjacent == 0)
    sch.compute_at(accum, pair, preserve_unit_loops=True)
    sch.unroll(sch.get_loops(accum)[-1])
    return accum


def _store_through_smem(sch: Schedule, store: Any, loops: tuple[Any, Any], warps: int, results: Results) -> Any:
    """Have a block store whole rows of its tile, through shared memory.

    A lane's own stores are scattered pieces of 4 to 8 bytes; sectors of L2 have 32.
    """
    tile, warp = loops
    staged = sch.cache_read(store, 0, "shared.dyn")
    accum = sch.cache_read(staged, 0, "local")
    for following in (accum, staged):
        sch.reverse_compute_at(following, warp)
    sch.compute_at(accum, distribute_fragments(sch, staged, warp, results.interleaved, vectorize=True), preserve_unit_loops=True)
    sch.unroll(sch.get_loops(accum)[-1])
    sch.storage_align(staged, 0, axis=-2, factor=32, offset=8)
    place_store(sch, store, tile)
    elements = sch.fuse(*_loops_within(sch, store, tile))
    vector = math.gcd(results.gemm.out_contiguous, STORE_VECTOR, VECTOR_BYTES // dtype_bytes(results.gemm.accum_dtype))
    iteration, by_warp, lane, element = sch.split(elements, [None, warps, LANES, vector])
    sch.bind(by_warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    sch.vectorize(element)
    sch.unroll(iteration)
    return accum


def clear_accumulators(sch: Schedule, mma: Any, accum: Any, k_loop: Any, intrinsics: MmaIntrinsics) -> None:
    """Set accumulator fragments to zero before the k-loop; `mma` is the block that updates them and `accum` the one that reads them."""
    init = sch.decompose_reduction(mma, k_loop)
    sch.transform_layout(accum, ("read", 0), accumulator_layout(intrinsics.interleaved))
    sch.tensorize(sch.get_loops(sch.get_child_blocks(init)[0])[-2], intrinsics.clear)
