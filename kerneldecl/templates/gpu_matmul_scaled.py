"""Owns the schedule of GEMMs of values times scales on tensor cores: mma.sync in float16 or int8, sums of a k-tile scaled in float32.

Knows nothing of how its parameters are chosen, and recognises the computation by its structure: operands [m, k] and [n, k] whose elements
are exact in float16, dequantised or not, and scales that the elements of a k-tile share.

Parameters, as of `gpu_matmul_tc`:
  block_m, block_n    rows and columns of a thread block's tile
  block_k             extent of a k-tile, of which each row and each column has one scale
  warps_m, warps_n    warps along the rows and the columns of the tile; a warp tile consists of fragments of 16 x 16
  stages              k-tiles of both operands in shared memory at once; 1 copies and computes in turn
  raster_group        rows of tiles visited before the next column of tiles; divides the number of rows of tiles
  smem_epilogue       1 stores results through shared memory, in whole rows; 0 has each lane store its own
  split_k             parts of k, computed by thread blocks of their own and added by a second kernel
  integers            1 multiplies in int8 where all values are integers from -128 to 127; 0, where it is left out, in float16
  words               1 makes int8 of four weights of 4 bits at once, in a word, where values are staged; 0, where it is left out, of each

Where there are several stages, and n and k are whole tiles, values, scales and zero points of columns and groups come to shared memory as
they are, by cp.async; there values become float16 (or int8), in memory of one stage. Else they become that on their way. A thread has
twice the accumulators: of a k-tile, and of all.

Copies are asynchronous where code is generated with the pass option in PASS_CONFIG.

Returns a module without a trace: the schedule is one of another function, which sums up by k-tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm import IRModule
from tvm.s_tir import Schedule
from tvm.tirx import For, ForKind, IterVar, Var
from tvm_ffi import structural

from kerneldecl.analysis.contraction import Contraction, why_no_tensor_cores
from kerneldecl.analysis.params import ROW_MULTIPLE, GemmTcParams, read_params, row_padding
from kerneldecl.analysis.scaled_gemm import INTEGER_DTYPE, VALUE_DTYPE
from kerneldecl.analysis.tensor_cores import K_BYTES
from kerneldecl.compiler.intrinsics.fragment_loads import ROWS
from kerneldecl.compiler.intrinsics.mma import MmaIntrinsics, register
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.gpu.gemm import rasterize, read_gemm, reduce_split_k
from kerneldecl.templates.gpu.mma_fragments import (
    Results,
    accumulator_layout,
    intrinsics_of,
    load_fragments,
    store_accumulators,
)
from kerneldecl.templates.gpu.read_scaled import read_scaled
from kerneldecl.templates.gpu.scaled_products import KTiles, by_k_tiles
from kerneldecl.templates.gpu.staged_values import Staging
from kerneldecl.templates.gpu.value_words import words_of
from kerneldecl.templates.shared.blocks import attempt

PASS_CONFIG = {"tirx.use_async_copy": 1}
CLEAR = "kd.clear.float32"
"""Intrinsic that clears accumulators of all k-tiles."""
BOUND = "kerneldecl.bound"
"""Annotation of a loop with the thread index that it is bound to in the end."""


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the scheduled GEMM with its epilogue fused, or None where it is another computation or the tile sizes do not take it."""
    tiles, found = read_params(GemmTcParams, params), read_gemm(mod)
    dtype = INTEGER_DTYPE if params.get("integers") else VALUE_DTYPE
    problem = None if found is None else read_scaled(mod, dtype)
    if found is None or problem is None:
        return None
    tiled = KTiles(problem, (tiles.block_m, tiles.block_n, tiles.block_k), tiles.split_k, dtype)
    a, b = (replace(operand, dtype=dtype, position=at) for at, operand in enumerate((found.a, found.b)))
    gemm = replace(found, a=a, b=b, accum_dtype=tiled.sum_dtype)
    words = words_of(problem.b.values, *problem.extents[1:]) if params.get("words") else None
    if params.get("words") and (words is None or dtype != INTEGER_DTYPE):
        return None
    if why_no_tensor_cores(gemm, arch.the_gpu) or not _fits(tiles, gemm.extents, dtype) or not tiled.shares_scales:
        return None
    is_staged = arch.the_gpu.async_copy and tiles.stages > 1 and tiled.padded[1:] == problem.extents[1:]
    if words and not is_staged:
        return None
    tiled = replace(tiled, words=words)
    scheduled = attempt(by_k_tiles(tiled), lambda sch: _schedule(sch, gemm, tiles, arch, is_staged=is_staged, has_words=bool(words)))
    return None if scheduled is None else IRModule({"main": _bound(scheduled.mod["main"])})


def _fits(tiles: GemmTcParams, extents: tuple[int, int, int, int], dtype: str) -> bool:
    _, m, _, k = extents
    return (
        tiles.block_m % (ROWS * tiles.warps_m) == 0
        and tiles.block_n % (ROWS * tiles.warps_n) == 0
        and tiles.block_k % (K_BYTES // dtype_bytes(dtype)) == 0
        and -(-m // tiles.block_m) % tiles.raster_group == 0
        and -(-k // (tiles.block_k * tiles.split_k)) >= max(2, tiles.stages - 1)
        and not tiles.double_buffer
    )


def _schedule(sch: Schedule, gemm: Contraction, tiles: GemmTcParams, arch: Arch, *, is_staged: bool, has_words: bool) -> bool:
    products, scaled = sch.get_sblock("products"), sch.get_sblock("scaled")
    mma = intrinsics_of(sch, products, gemm, arch.the_gpu, a_k_last=True)
    # 1. Parts of k.
    whole = None
    if tiles.split_k > 1:
        part, _ = sch.split(sch.get_loops(scaled)[-1], [tiles.split_k, None])
        whole, scaled = scaled, sch.rfactor(part, 0)
        row, column, part, k = sch.get_loops(scaled)
        sch.reorder(part, row, column, k)
    store = sch.cache_write(scaled, 0, "local")
    if whole is not None:
        reduce_split_k(sch, whole, gemm)

    # 2. Tiles of blocks, of warps, fragments.
    *parts, m, n, k = sch.get_loops(scaled)
    m, m_warp, m_fragment, m_in = sch.split(m, [None, tiles.warps_m, tiles.block_m // tiles.warps_m // ROWS, ROWS])
    n, n_warp, n_fragment, n_in = sch.split(n, [None, tiles.warps_n, tiles.block_n // tiles.warps_n // ROWS, ROWS])
    sch.reorder(*parts, m, n, m_warp, n_warp, k, m_fragment, n_fragment, m_in, n_in)
    tile = rasterize(sch, m, n, tiles.raster_group)
    warp = sch.fuse(m_warp, n_warp)
    sch.bind(tile, "blockIdx.x")
    if parts:
        sch.bind(parts[0], "blockIdx.z")
    sch.bind(warp, "threadIdx.y")

    # 3. Sums of a k-tile.
    sch.set_scope(products, 0, "local")
    sch.compute_at(products, k)
    fragment, k_step = _fragments(sch, products, tiles, mma)
    staging = Staging(sch, k, tiles, is_staged, has_words)
    (left, left_copies), (right, right_copies) = (staging.values(name, fragment) for name in ("left", "right"))
    scale_copies = staging.scales()
    loads = [sch.cache_read(fragment, operand.position, "local") for operand in (gemm.a, gemm.b)]
    for load in loads:
        sch.compute_at(load, k_step)

    # 4. Accumulators of all k-tiles, and of one, in the lanes where mma.sync leaves them.
    accum = store_accumulators(sch, store, (tile, warp), tiles, Results(gemm, mma.interleaved))
    cleared = sch.decompose_reduction(scaled, k)
    sch.transform_layout(accum, ("read", 0), accumulator_layout(mma.interleaved))
    register((CLEAR,))
    sch.tensorize(sch.get_loops(cleared)[-2], CLEAR)
    _distribute(sch, scaled)
    cleared = sch.decompose_reduction(fragment, k_step)
    sch.transform_layout(cleared, ("write", 0), accumulator_layout(mma.interleaved))
    sch.tensorize(sch.get_loops(sch.get_child_blocks(cleared)[0])[-2], mma.clear)
    for operand, load, copy, intrinsic in zip((gemm.a, gemm.b), loads, (left, right), (mma.load_a, mma.load_b), strict=True):
        load_fragments(sch, load, operand, mma.k, intrinsic)
        sch.storage_align(copy, 0, axis=-2, factor=ROW_MULTIPLE, offset=row_padding(dtype_bytes(operand.dtype)))
    sch.tensorize(fragment, mma.mma)
    staging.pipeline((left_copies, right_copies, scale_copies))
    return True


def _fragments(sch: Schedule, products: Any, tiles: GemmTcParams, mma: MmaIntrinsics) -> tuple[Any, Any]:
    """Split the GEMM of a k-tile into fragments; return the block that is one, and the loop over its steps along k."""
    m, n, k = sch.get_loops(products)[-3:]
    m, m_in = sch.split(m, [None, ROWS])
    n, n_in = sch.split(n, [None, ROWS])
    k, k_in = sch.split(k, [tiles.block_k // mma.k, mma.k])
    sch.reorder(k, m, n, m_in, n_in, k_in)
    return sch.blockize(m_in), k


def _distribute(sch: Schedule, scaled: Any) -> None:
    """Have each lane scale its own sums of a k-tile, and add them to its accumulators.

    TVM binds no loop over a block that was parted from its initialization: `_bound` does.
    """
    m, n, row, column = sch.get_loops(scaled)[-4:]
    m_half, m_lane = sch.split(row, [2, 8])
    n_half, n_lane, pair = sch.split(column, [2, 4, 2])
    sch.reorder(m, n, m_lane, n_lane, m_half, n_half, pair)
    sch.annotate(sch.fuse(m_lane, n_lane), BOUND, "threadIdx.x")
    for loop in (m, n, m_half, n_half, pair):
        sch.unroll(loop)


def _bound(func: Any) -> Any:
    """Return a function whose loops that say so are bound to a thread index."""

    def loop(node: Any) -> Any:
        tag = node.annotations.get(BOUND)
        if tag is None:
            return node
        index = IterVar(None, Var(str(tag), "int64"), IterVar.ThreadIndex, str(tag))
        return For(node.loop_var, node.min, node.extent, ForKind.THREAD_BINDING, node.body, index, {})

    return func.with_body(structural.structural_map(func.body, [(For, loop)]))
