"""Owns the schedule of direct convolutions on CUDA cores: a thread block keeps its receptive field in shared memory once.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names.

As an implicit GEMM, as gpu_matmul_simt computes it, a convolution copies each pixel once for every sliding window that contains it, and
where channels are few, with an address and bounds for each element. Here threads load their operands from the receptive field itself,
several adjacent pixels at once, which their results share; all of a block's weights are in shared memory, and there are no barriers
between the first multiplication and the last.

Parameters:
  rows, columns       rows and columns of the rectangle of output pixels that a thread block computes at once
  row_tiles           rectangles below one another that it computes in turn; meanwhile, cp.async copies the next receptive field
  block_n             output channels of a thread block
  thread_m, thread_n  adjacent output pixels of one row, and output channels, of a thread; channels in vectors of up to 4, distributed
                      over the block's
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.analysis.params import SIMT_WARP_COLUMNS, SIMT_WARP_ROWS, ConvSimtParams, read_params
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.gpu.conv import normalize_conv, receptive_field
from kerneldecl.templates.gpu.gemm import can_copy_async, inline_sources, interleave_lanes, place_store, read_gemm
from kerneldecl.templates.shared.blocks import attempt
from kerneldecl.templates.shared.contraction import fuse_epilogue

PASS_CONFIG = {"tirx.use_async_copy": 1}
OUTER_LOOPS = 4
"""Loops around those of the copy of a receptive field: over tiles, virtual threads, threads and `row_tiles`."""
FIELD_LOOPS = 2
"""Loops of that copy at least: over rows, and over elements of a row."""


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled convolution with its epilogue fused, or None where the function is none or the tile sizes do not suit it."""
    tiles = read_params(ConvSimtParams, params)
    gemm = read_gemm(mod)
    if gemm is None or not _fits(tiles, gemm):
        return None
    return attempt(mod, lambda sch: _schedule(sch, gemm, tiles, arch))


def _fits(tiles: ConvSimtParams, gemm: Contraction) -> bool:
    return (
        not gemm.batch
        and len(gemm.m) == 3
        and len(gemm.k) > 1
        and not gemm.b.is_k_last
        and tiles.columns % tiles.thread_m == 0
        and tiles.groups % SIMT_WARP_ROWS == 0
        and tiles.block_n % (tiles.thread_n * SIMT_WARP_COLUMNS) == 0
    )


class _Loops(NamedTuple):
    """Loops of a tiled convolution."""

    tile: Any
    """The loop over thread blocks."""
    row_tiles: Any
    window: tuple[Any, ...]
    """The loops over the reduction: rows of the sliding window, its columns and channels."""
    column_in: Any
    """The loop over a thread's output pixels."""
    n_in: Any
    """The loop over a vector of channels."""


def _schedule(sch: Schedule, gemm: Contraction, tiles: ConvSimtParams, arch: Arch) -> bool:
    # 1. Normal form: image, row, column and channel of the output, and the reduction axes; in whole tiles.
    fused = fuse_epilogue(sch)
    if fused is None:
        return False
    block = fused.block
    if not all(_stays_in_index(sch.get(block), gemm.a.position, axis) for axis in gemm.k):
        return False
    padding = sch.get_producers(block)
    normalize_conv(sch, block, gemm, [(axis,) for axis in gemm.k])
    sch.pad_einsum(block, [1, tiles.rows * tiles.row_tiles, tiles.columns, tiles.block_n, *[1] * len(gemm.k)])
    store = sch.cache_write(block, 0, "local")

    # 2. Tiles of blocks; in them, threads for groups of pixels and for vectors of channels.
    vector = math.gcd(tiles.thread_n, 4)
    loops = _tile(sch, block, tiles, vector)

    # 3. Operands: weights and receptive field to shared memory, from there to registers.
    if not _load_operands(sch, block, gemm, tiles, loops, padding):
        return False

    # 4. Accumulators, and the pipeline over rectangles.
    place_store(sch, store, loops.row_tiles)
    row, column = sch.get_loops(store)[-2:]
    _, column_vector = sch.split(column, [None, vector if gemm.out_contiguous % vector == 0 else 1])
    sch.unroll(row)
    sch.vectorize(column_vector)
    for loop in (*loops.window[1:], loops.column_in, loops.n_in):
        sch.unroll(loop)
    sch.decompose_reduction(block, loops.window[0])
    if tiles.row_tiles > 1 and arch.the_gpu.async_copy and can_copy_async(gemm.a, 1):
        # Unrolled, as nvcc does not see how addresses are aligned where the stage is a variable.
        sch.unroll(loops.row_tiles)
        sch.annotate(loops.row_tiles, "software_pipeline_stage", [0, 1, 1, 1])
        sch.annotate(loops.row_tiles, "software_pipeline_order", [0, 1, 2, 3])
        sch.annotate(loops.row_tiles, "software_pipeline_async_stages", [0])
    return True


def _stays_in_index(sblock: Any, position: int, axis: int) -> bool:
    """Say whether an axis is in an operand's index: an axis of extent 1 is so only where it alone is the index of a dimension."""
    found = sblock.iter_vars[axis]
    return int(found.dom.extent) > 1 or any(dim.min.same_as(found.var) for dim in sblock.reads[position].region)


def _tile(sch: Schedule, block: Any, tiles: ConvSimtParams, vector: int) -> _Loops:
    """Split, reorder and bind the loops of a convolution in normal form."""
    image, row, column, n, *window = sch.get_loops(block)
    row, row_tiles, row_in = sch.split(row, [None, tiles.row_tiles, tiles.rows])
    column, group, column_in = sch.split(column, [None, tiles.columns // tiles.thread_m, tiles.thread_m])
    n, n_vectors, n_warp, n_lane, n_in = sch.split(
        n, [None, tiles.thread_n // vector, tiles.block_n // tiles.thread_n // SIMT_WARP_COLUMNS, SIMT_WARP_COLUMNS, vector]
    )
    sch.reorder(image, row, column, n, n_vectors, row_in, group, n_warp, n_lane, row_tiles, *window, column_in, n_in)
    tile = sch.fuse(image, row, column, n)
    group_warp, group_lane = sch.split(sch.fuse(row_in, group), [None, SIMT_WARP_ROWS])
    sch.reorder(group_warp, n_warp, group_lane, n_lane)
    thread = sch.fuse(group_warp, n_warp, *interleave_lanes(sch, group_lane, n_lane))
    sch.bind(tile, "blockIdx.x")
    sch.bind(n_vectors, "vthread.x")
    sch.bind(thread, "threadIdx.x")
    return _Loops(tile=tile, row_tiles=row_tiles, window=tuple(window), column_in=column_in, n_in=n_in)


def _load_operands(sch: Schedule, block: Any, gemm: Contraction, tiles: ConvSimtParams, loops: _Loops, padding: list[Any]) -> bool:
    """Copy weights and receptive field to shared memory and load both from there; say whether the field has rows."""
    weights = sch.cache_read(block, gemm.b.position, "shared.dyn")
    sch.compute_at(weights, loops.tile)
    load = sch.cache_read(block, gemm.a.position, "local")
    sch.compute_at(load, loops.window[-1])
    load_weights = sch.cache_read(block, gemm.b.position, "local")
    sch.compute_at(load_weights, loops.window[-1])
    inline_sources(sch, weights)
    _copy_weights(sch, weights, tiles, gemm)
    field = receptive_field(sch, load, padding)
    sch.compute_at(field, loops.row_tiles)
    if not _copy_field(sch, field, tiles):
        return False
    for each in (load, load_weights):
        sch.unroll(sch.get_loops(each)[-1])
    return True


def _copy_weights(sch: Schedule, copy: Any, tiles: ConvSimtParams, gemm: Contraction) -> None:
    vector = math.gcd(gemm.b.vector(), tiles.block_n)
    iteration, thread, element = sch.split(sch.fuse(*sch.get_loops(copy)[1:]), [None, tiles.threads, vector])
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(element)
    sch.unroll(iteration)


def _copy_field(sch: Schedule, field: Any, tiles: ConvSimtParams) -> bool:
    """Distribute a row of the receptive field over adjacent threads; rows start at multiples of 16 bytes. Say whether it has rows."""
    loops = sch.get_loops(field)[OUTER_LOOPS:]
    if len(loops) < FIELD_LOOPS:
        return False
    item_bytes = dtype_bytes(str(sch.get(field).writes[0].source.ty.dtype))
    sch.storage_align(field, 0, axis=-3, factor=VECTOR_BYTES // item_bytes, offset=0)
    row, *elements = loops
    iteration, thread = sch.split(sch.fuse(*elements), [None, tiles.threads])
    # Rows are innermost, so that a thread's loads of all rows are in flight together.
    sch.reorder(iteration, thread, row)
    sch.bind(thread, "threadIdx.x")
    for loop in (iteration, row):
        sch.unroll(loop)
    return True
