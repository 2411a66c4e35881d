"""Owns the schedule of convolutions on CUDA cores whose windows overlap: a block's part of the image is kept in shared memory once.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names.

A product whose left operand is an image needs each pixel once for every window that has it. Copies of the windows, as the
template for products makes them, read the image that often, each element with an address and bounds of its own where channels are
few. Here threads take what they multiply out of the image itself, several neighbours at once, which their results share; the
weights are in shared memory whole, and nothing is waited for between the first multiplication and the last.

Parameters:
  rows, columns       what one thread block computes at once of an image's results
  row_tiles           parts of so many rows that it computes one after the other, below each other; while it computes one, the image's
                      part for the next comes by cp.async
  block_n             channels of the result that it computes
  thread_m, thread_n  results of one row, and channels of them, that one thread computes: channels as vectors of up to 4, spread over
                      the block's
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.gpu.conv import normalize_windows, staged_image
from kerneldecl.templates.gpu.gemm import attempt, inline_sources, interleaved, is_async, place_store, product_of
from kerneldecl.templates.shared.contraction import epilogue_of, merge, only_reduction

PASS_CONFIG = {"tirx.use_async_copy": 1}
GROUPS, LANES = 4, 8
"""Of a warp: groups of neighbouring results, and lanes that divide channels."""
VECTOR_BYTES = 16
AROUND, PLACES = 4, 2
"""Loops around those over a part of an image, and how many of these there are at least: rows, and places in a row."""


class _Tiles(NamedTuple):
    """The template's parameters, as read."""

    rows: int
    columns: int
    row_tiles: int
    block_n: int
    thread_m: int
    thread_n: int

    @property
    def groups(self) -> int:
        return self.rows * self.columns // self.thread_m

    @property
    def threads(self) -> int:
        return self.groups * self.block_n // self.thread_n


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled convolution with its epilogue fused, or None where the function is none."""
    tiles = _Tiles(**{name: params[name] for name in _Tiles._fields})  # type: ignore[arg-type]
    gemm = product_of(mod)
    if gemm is None or not _fits(tiles, gemm):
        return None
    return attempt(mod, lambda sch: _schedule(sch, gemm, tiles, arch))


def _fits(tiles: _Tiles, gemm: Contraction) -> bool:
    return (
        not gemm.batch
        and len(gemm.m) == 3
        and len(gemm.k) > 1
        and not gemm.b.is_k_last
        and tiles.columns % tiles.thread_m == 0
        and tiles.groups % GROUPS == 0
        and tiles.block_n % (tiles.thread_n * LANES) == 0
    )


def _schedule(sch: Schedule, gemm: Contraction, tiles: _Tiles, arch: Arch) -> bool:
    # 1. Normal form: image, row, column, channel of the result, and the window's axes; in whole tiles.
    block = only_reduction(sch)
    epilogue = None if block is None else epilogue_of(sch, block)
    if epilogue is None:
        return False
    if epilogue:
        merge(sch, epilogue)
    if not all(_is_seen(sch.get(block), gemm.a.position, axis) for axis in gemm.k):
        return False
    margin = sch.get_producers(block)
    normalize_windows(sch, block, gemm, [(axis,) for axis in gemm.k])
    sch.pad_einsum(block, [1, tiles.rows * tiles.row_tiles, tiles.columns, tiles.block_n, *[1] * len(gemm.k)])
    store = sch.cache_write(block, 0, "local")

    # 2. Tiles of blocks; in them, threads for groups of results and for vectors of channels.
    vector = math.gcd(tiles.thread_n, 4)
    image, row, column, n, *window = sch.get_loops(block)
    row, row_tiles, row_in = sch.split(row, [None, tiles.row_tiles, tiles.rows])
    column, group, column_in = sch.split(column, [None, tiles.columns // tiles.thread_m, tiles.thread_m])
    n, n_vectors, n_warp, n_lane, n_in = sch.split(
        n, [None, tiles.thread_n // vector, tiles.block_n // tiles.thread_n // LANES, LANES, vector]
    )
    sch.reorder(image, row, column, n, n_vectors, row_in, group, n_warp, n_lane, row_tiles, *window, column_in, n_in)
    tile = sch.fuse(image, row, column, n)
    group_warp, group_lane = sch.split(sch.fuse(row_in, group), [None, GROUPS])
    sch.reorder(group_warp, n_warp, group_lane, n_lane)
    thread = sch.fuse(group_warp, n_warp, *interleaved(sch, group_lane, n_lane))
    sch.bind(tile, "blockIdx.x")
    sch.bind(n_vectors, "vthread.x")
    sch.bind(thread, "threadIdx.x")

    # 3. Operands: weights and the image's part to shared memory, from there to registers.
    line, *places = window
    weights = sch.cache_read(block, gemm.b.position, "shared.dyn")
    sch.compute_at(weights, tile)
    held = sch.cache_read(block, gemm.a.position, "local")
    sch.compute_at(held, places[-1])
    held_weights = sch.cache_read(block, gemm.b.position, "local")
    sch.compute_at(held_weights, places[-1])
    inline_sources(sch, weights)
    _copy_weights(sch, weights, tiles, gemm)
    staged = staged_image(sch, held, margin)
    sch.compute_at(staged, row_tiles)
    if not _copy_image(sch, staged, tiles):
        return False
    for load in (held, held_weights):
        sch.unroll(sch.get_loops(load)[-1])

    # 4. Sums.
    place_store(sch, store, row_tiles)
    row, column = sch.get_loops(store)[-2:]
    _, column_vector = sch.split(column, [None, vector if gemm.out_contiguous % vector == 0 else 1])
    sch.unroll(row)
    sch.vectorize(column_vector)
    for loop in (*places, column_in, n_in):
        sch.unroll(loop)
    sch.decompose_reduction(block, line)
    if tiles.row_tiles > 1 and arch.the_gpu.async_copy and is_async(gemm.a, 1):
        # Spelt out, for where stages are in turn nvcc does not see how addresses are aligned.
        sch.unroll(row_tiles)
        sch.annotate(row_tiles, "software_pipeline_stage", [0, 1, 1, 1])
        sch.annotate(row_tiles, "software_pipeline_order", [0, 1, 2, 3])
        sch.annotate(row_tiles, "software_pipeline_async_stages", [0])
    return True


def _is_seen(stage: Any, position: int, axis: int) -> bool:
    """Say whether an axis stays in an operand's index: one of one place does so where it is an index by itself."""
    found = stage.iter_vars[axis]
    return int(found.dom.extent) > 1 or any(dim.min.same_as(found.var) for dim in stage.reads[position].region)


def _copy_weights(sch: Schedule, copy: Any, tiles: _Tiles, gemm: Contraction) -> None:
    vector = math.gcd(gemm.b.vector(), tiles.block_n)
    flat_loop = sch.fuse(*sch.get_loops(copy)[1:])
    step, thread, element = sch.split(flat_loop, [None, tiles.threads, vector])
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(element)
    sch.unroll(step)


def _copy_image(sch: Schedule, staged: Any, tiles: _Tiles) -> bool:
    """Spread the image's part over neighbouring threads; rows begin at whole vectors. Say whether it has rows."""
    loops = sch.get_loops(staged)[AROUND:]
    if len(loops) < PLACES:
        return False
    item_bytes = dtype_bytes(str(sch.get(staged).writes[0].source.ty.dtype))
    sch.storage_align(staged, 0, axis=-3, factor=VECTOR_BYTES // item_bytes, offset=0)
    row, *places = loops
    step, thread = sch.split(sch.fuse(*places), [None, tiles.threads])
    # Rows are innermost, so that a thread asks for all of them before it waits for the first.
    sch.reorder(step, thread, row)
    sch.bind(thread, "threadIdx.x")
    for loop in (step, row):
        sch.unroll(loop)
    return True
