"""Owns how TMA loads the operands of a convolution on wgmma: boxes of the pixels that a tap meets, and the weights of a tap.

Knows nothing of stages, epilogues or how tiles are chosen.
"""

from __future__ import annotations

import math
from typing import Any

from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MAX_TMA_BOX, MMA_TILE_ROWS, SWIZZLE_ROWS, TMA_ALIGN_BYTES
from kerneldecl.templates.hopper.conv_tiles import PixelBoxes
from kerneldecl.templates.hopper.operands import SWIZZLES, Operand, TensorMap, TmaBoxes
from kerneldecl.templates.hopper.read_conv import Convolution, SlidingWindow
from kerneldecl.templates.hopper.read_gemm import Matrix

ITEM_BYTES = 2
K_TILE_CHANNELS = K_TILE_BYTES // ITEM_BYTES


def tap_k_tiles(convolution: Convolution) -> int:
    """Return the k-tiles of one tap."""
    return -(-convolution.channels // K_TILE_CHANNELS)


def image_matrix(convolution: Convolution) -> Matrix:
    """Return the pixels of all images as rows of channels."""
    *pixels, channels = (int(extent) for extent in convolution.image.shape)
    return Matrix(convolution.image, str(convolution.image.dtype), rows=(math.prod(pixels), channels), columns=(channels, 1))


def weights_matrix(convolution: Convolution) -> Matrix:
    """Return the weights as a matrix whose lines are those of contiguous filters, or channels."""
    inner = _contiguous_weights(convolution)
    lines = math.prod(int(extent) for extent in convolution.weights.shape) // inner
    rows, columns = (inner, 1), (lines, inner)
    if convolution.weight_strides[1] == 1:
        rows, columns = (lines, inner), (inner, 1)
    return Matrix(convolution.weights, str(convolution.weights.dtype), rows, columns)


def _contiguous_weights(convolution: Convolution) -> int:
    return convolution.channels if convolution.weight_strides[1] == 1 else convolution.filters


def image_operand(convolution: Convolution, boxes: PixelBoxes, ctas: int, copy: Matrix | None = None) -> Operand | None:
    """Return how `ctas` CTAs have TMA load the pixels that a tap meets, one box each, from the image or a copy of it."""
    box_rows = boxes.pixels // ctas
    per_tap, taps = tap_k_tiles(convolution), convolution.columns.taps
    images, height, width, channels = (int(extent) for extent in convolution.image.shape)
    pitch_bytes = (copy.rows[1] if copy else channels) * ITEM_BYTES
    sides = boxes.part(box_rows)
    # A box of one pixel along a side has no stride there; in others TMA skips the pixels between.
    along = (1, _box_stride(convolution.rows, sides[1]), _box_stride(convolution.columns, sides[2]))
    box = [side * stride for side, stride in zip(sides, along, strict=True)]
    if max(box) > MAX_TMA_BOX or pitch_bytes % TMA_ALIGN_BYTES:
        return None
    dtype = str(convolution.image.dtype)
    tensor_map = TensorMap(
        buffer=copy.buffer if copy else convolution.image,
        dtype=dtype,
        dims=(channels, width, height, images),
        strides_bytes=(pitch_bytes, width * pitch_bytes, height * width * pitch_bytes),
        box=(K_TILE_CHANNELS, *reversed(box)),
        swizzle=SWIZZLES[K_TILE_BYTES],
        box_strides=(1, *reversed(along)),
    )

    def coords(_: Any, row: Any, k_tile: Any, number: Any) -> tuple[Any, ...]:
        image, y, x = boxes.pixel(row + number * box_rows)
        tap = k_tile // per_tap
        return (
            k_tile % per_tap * K_TILE_CHANNELS,
            x * convolution.columns.stride + tap % taps * convolution.columns.dilation - convolution.columns.padding,
            y * convolution.rows.stride + tap // taps * convolution.rows.dilation - convolution.rows.padding,
            image,
        )

    tma = TmaBoxes(tensor_map, 1, lambda number: number * box_rows, coords)
    return Operand(dtype, boxes.pixels, is_k_last=True, tma=tma)


def _box_stride(window: SlidingWindow, side: int) -> int:
    return window.stride if side > 1 else 1


def weights_operand(convolution: Convolution, tile_filters: int, ctas: int, copy: Matrix | None = None) -> Operand | None:
    """Return how `ctas` CTAs have TMA load the weights of a tap, whose filters or channels are contiguous, or a copy of them."""
    is_k_last = convolution.weight_strides[1] == 1
    stage_rows = tile_filters if is_k_last else -(-tile_filters // MMA_TILE_ROWS) * MMA_TILE_ROWS
    box_rows = tile_filters // ctas if is_k_last else MMA_TILE_ROWS
    is_shared = tile_filters % (SWIZZLE_ROWS * ctas) == 0 if is_k_last else stage_rows // MMA_TILE_ROWS % ctas == 0
    tensor_map = _weight_map(convolution, box_rows, copy) if is_shared else None
    if tensor_map is None:
        return None
    per_tap, taps = tap_k_tiles(convolution), convolution.columns.taps

    def coords(_: Any, row: Any, k_tile: Any, number: Any) -> tuple[Any, ...]:
        tap, channel, column = k_tile // per_tap, k_tile % per_tap * K_TILE_CHANNELS, row + number * box_rows
        place = (channel, column) if is_k_last else (column, channel)
        return (*place, tap % taps, tap // taps)

    tma = TmaBoxes(tensor_map, stage_rows // box_rows // ctas, lambda number: number * box_rows, coords)
    return Operand(tensor_map.dtype, stage_rows, is_k_last=is_k_last, tma=tma)


def _weight_map(convolution: Convolution, box_rows: int, copy: Matrix | None) -> TensorMap | None:
    """Return the tensor map of the weights in boxes of so many filters, None where TMA does not take their strides."""
    filters, channels = convolution.filters, convolution.channels
    filter_stride, channel_stride, column_stride, row_stride = convolution.weight_strides
    is_k_last = channel_stride == 1
    if not is_k_last and filter_stride != 1:
        return None
    inner, outer, pitch = (channels, filters, filter_stride) if is_k_last else (filters, channels, channel_stride)
    dense = -(-inner * ITEM_BYTES // TMA_ALIGN_BYTES) * TMA_ALIGN_BYTES
    line = max(copy.rows[1], copy.columns[1]) if copy else inner
    strides = [stride // inner * line * ITEM_BYTES or dense for stride in (pitch, column_stride, row_stride)]
    if any(stride % TMA_ALIGN_BYTES for stride in strides):
        return None
    return TensorMap(
        buffer=copy.buffer if copy else convolution.weights,
        dtype=str(convolution.weights.dtype),
        dims=(inner, outer, convolution.columns.taps, convolution.rows.taps),
        strides_bytes=tuple(strides),
        box=(K_TILE_CHANNELS, box_rows, 1, 1) if is_k_last else (MMA_TILE_ROWS, K_TILE_CHANNELS, 1, 1),
        swizzle=SWIZZLES[K_TILE_BYTES],
    )
