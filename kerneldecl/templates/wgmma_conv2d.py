"""Owns the convolution kernel on wgmma, an implicit GEMM: TMA loads the windows of images as tiles of A, a fused epilogue.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names.

A tile's rows are results of a box of pixels, w fastest, then h, then images; its columns are filters; with `swap_ab`, the other way
round. A k-tile is 64 channels at one tap: the box of pixels that the tap meets, strided, and zeros where it reaches beyond the image.

Parameters: those of `wgmma_matmul` but for pack and stream_k, with a split_k that divides the k-tiles, and
  tile_w, tile_h   pixels of a tile along a row and along a column of the image, powers of two; what is left of its pixels are images

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import IRModule

from kerneldecl.analysis import tensor_cores
from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MAX_TMA_BOX, MAX_TMA_BOX_STRIDE, MMA_TILE_ROWS, SWIZZLE_ROWS, TMA_ALIGN_BYTES
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.hopper.conv_tiles import PixelBoxes, conv_epilogue
from kerneldecl.templates.hopper.gemm_kernel import build
from kerneldecl.templates.hopper.kernel_config import GemmKernel
from kerneldecl.templates.hopper.operands import SWIZZLES, Operand, TensorMap, TmaBoxes
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.read_conv import Convolution, SlidingWindow, read_convolution, with_views
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul import has_wgmma

ITEM_BYTES = 2
K_TILE_CHANNELS = K_TILE_BYTES // ITEM_BYTES


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the convolution with its epilogue as one custom kernel, or None where wgmma, TMA or these parameters do not take it."""
    convolution = read_convolution(mod) if has_wgmma(arch) else None
    if convolution is None or not _takes(convolution):
        return None
    sides = (params["tile_h"], params["tile_w"])
    kernel = _kernel(convolution, GemmParams.of(params), sides, arch)  # type: ignore[arg-type]
    return None if kernel is None else with_views(build(kernel), convolution)


def _takes(convolution: Convolution) -> bool:
    """Say whether wgmma multiplies the dtypes and TMA loads the images."""
    dtypes = {str(convolution.image.dtype), str(convolution.weights.dtype)}
    windows = (convolution.rows, convolution.columns)
    return (
        len(dtypes) == 1
        and all(
            dtype_bytes(dtype) == ITEM_BYTES and convolution.accum_dtype in tensor_cores.accumulators("wgmma", dtype) for dtype in dtypes
        )
        and convolution.channels * ITEM_BYTES % TMA_ALIGN_BYTES == 0
        and all(window.stride <= MAX_TMA_BOX_STRIDE for window in windows)
    )


def _kernel(convolution: Convolution, params: GemmParams, sides: tuple[int, int], arch: Arch) -> GemmKernel | None:
    pixels, filters = (params.block_n, params.block_m) if params.swap_ab else (params.block_m, params.block_n)
    if not all(map(_is_power, (pixels, *sides))) or pixels % math.prod(sides) or pixels < MMA_TILE_ROWS:
        return None
    results = convolution.images, convolution.rows.results, convolution.columns.results
    boxes = PixelBoxes(results, (pixels // math.prod(sides), *sides))
    ctas = (params.cluster_m, params.cluster_n) if params.swap_ab else (params.cluster_n, params.cluster_m)
    image, weights = _image(convolution, boxes, ctas[0]), _weights(convolution, filters, ctas[1])
    k_tiles = convolution.rows.taps * convolution.columns.taps * _tap_k_tiles(convolution)
    dtype, accum_dtype = str(convolution.image.dtype), convolution.accum_dtype
    if image is None or weights is None or not params.fits(dtype, accum_dtype, k_tiles, image.stage_bytes + weights.stage_bytes):
        return None
    tiles = [(image, boxes.count), (weights, -(-convolution.filters // filters))]
    (a, rows), (b, columns) = reversed(tiles) if params.swap_ab else tiles
    kernel = GemmKernel(
        func_params=convolution.func_params,
        dtype=dtype,
        accum_dtype=accum_dtype,
        a=a,
        b=b,
        epilogue=conv_epilogue(convolution, boxes, filters, is_swapped=bool(params.swap_ab)),
        params=params,
        grid=(1, rows, columns),
        k_tiles=k_tiles,
        sm_count=arch.the_gpu.sm_count,
    )
    return kernel if kernel.can_store else None


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _tap_k_tiles(convolution: Convolution) -> int:
    """Return the k-tiles of one tap."""
    return -(-convolution.channels // K_TILE_CHANNELS)


def _image(convolution: Convolution, boxes: PixelBoxes, ctas: int) -> Operand | None:
    """Return how `ctas` CTAs have TMA load the pixels that a tap meets, one box each."""
    box_rows = boxes.pixels // ctas
    buffer, tap_k_tiles, taps = convolution.image, _tap_k_tiles(convolution), convolution.columns.taps
    images, height, width, channels = (int(extent) for extent in buffer.shape)
    sides = boxes.part(box_rows)
    # A box of one pixel along a side has no stride there; in others TMA skips the pixels between.
    along = (1, _box_stride(convolution.rows, sides[1]), _box_stride(convolution.columns, sides[2]))
    box = [side * stride for side, stride in zip(sides, along, strict=True)]
    if max(box) > MAX_TMA_BOX:
        return None
    tensor_map = TensorMap(
        buffer=buffer,
        dtype=str(buffer.dtype),
        dims=(channels, width, height, images),
        strides_bytes=(channels * ITEM_BYTES, width * channels * ITEM_BYTES, height * width * channels * ITEM_BYTES),
        box=(K_TILE_CHANNELS, *reversed(box)),
        swizzle=SWIZZLES[K_TILE_BYTES],
        box_strides=(1, *reversed(along)),
    )

    def coords(_: Any, row: Any, k_tile: Any, number: Any) -> tuple[Any, ...]:
        image, y, x = boxes.pixel(row + number * box_rows)
        tap = k_tile // tap_k_tiles
        return (
            k_tile % tap_k_tiles * K_TILE_CHANNELS,
            x * convolution.columns.stride + tap % taps * convolution.columns.dilation - convolution.columns.padding,
            y * convolution.rows.stride + tap // taps * convolution.rows.dilation - convolution.rows.padding,
            image,
        )

    tma = TmaBoxes(tensor_map, 1, lambda number: number * box_rows, coords)
    return Operand(str(buffer.dtype), boxes.pixels, is_k_last=True, tma=tma)


def _box_stride(window: SlidingWindow, side: int) -> int:
    return window.stride if side > 1 else 1


def _weights(convolution: Convolution, tile_filters: int, ctas: int) -> Operand | None:
    """Return how `ctas` CTAs have TMA load the weights of a tap, whose filters or channels are contiguous."""
    is_k_last = convolution.weight_strides[1] == 1
    stage_rows = tile_filters if is_k_last else -(-tile_filters // MMA_TILE_ROWS) * MMA_TILE_ROWS
    box_rows = tile_filters // ctas if is_k_last else MMA_TILE_ROWS
    is_shared = tile_filters % (SWIZZLE_ROWS * ctas) == 0 if is_k_last else stage_rows // MMA_TILE_ROWS % ctas == 0
    tensor_map = _weight_map(convolution, box_rows) if is_shared else None
    if tensor_map is None:
        return None
    tap_k_tiles, taps = _tap_k_tiles(convolution), convolution.columns.taps

    def coords(_: Any, row: Any, k_tile: Any, number: Any) -> tuple[Any, ...]:
        tap, channel, column = k_tile // tap_k_tiles, k_tile % tap_k_tiles * K_TILE_CHANNELS, row + number * box_rows
        place = (channel, column) if is_k_last else (column, channel)
        return (*place, tap % taps, tap // taps)

    tma = TmaBoxes(tensor_map, stage_rows // box_rows // ctas, lambda number: number * box_rows, coords)
    return Operand(tensor_map.dtype, stage_rows, is_k_last=is_k_last, tma=tma)


def _weight_map(convolution: Convolution, box_rows: int) -> TensorMap | None:
    """Return the tensor map of the weights in boxes of so many filters, None where TMA does not take their strides."""
    filters, channels = convolution.filters, convolution.channels
    filter_stride, channel_stride, column_stride, row_stride = convolution.weight_strides
    is_k_last = channel_stride == 1
    if not is_k_last and filter_stride != 1:
        return None
    inner, outer, pitch = (channels, filters, filter_stride) if is_k_last else (filters, channels, channel_stride)
    dense = -(-inner * ITEM_BYTES // TMA_ALIGN_BYTES) * TMA_ALIGN_BYTES
    strides = [stride * ITEM_BYTES or dense for stride in (pitch, column_stride, row_stride)]
    if any(stride % TMA_ALIGN_BYTES for stride in strides):
        return None
    return TensorMap(
        buffer=convolution.weights,
        dtype=str(convolution.weights.dtype),
        dims=(inner, outer, convolution.columns.taps, convolution.rows.taps),
        strides_bytes=tuple(strides),
        box=(K_TILE_CHANNELS, box_rows, 1, 1) if is_k_last else (MMA_TILE_ROWS, K_TILE_CHANNELS, 1, 1),
        swizzle=SWIZZLES[K_TILE_BYTES],
    )
