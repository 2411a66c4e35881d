"""Owns the kernel of convolutions on wgmma: TMA gathers windows of images into the tiles of a product, a fused epilogue.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names.

A tile's rows are results of a box of pixels, w fastest, then h, then images; its columns are filters; with `swap`, the other way round. A
step of the reduction is 64 channels at one tap: the box of pixels that the tap meets, strided, and zeros where it reaches beyond the image.

Parameters: those of `wgmma_matmul`, and
  tile_w, tile_h    pixels of a tile along a row and along a column of the image, powers of two; what is left of its pixels are images

Returns a specialised function of TIRx, not a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import IRModule

from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.hopper.conv_tiles import Boxes, results_of_boxes
from kerneldecl.templates.hopper.gemm_kernel import build
from kerneldecl.templates.hopper.kernel_config import Kernel
from kerneldecl.templates.hopper.operands import MAX_BOX, PITCH_BYTES, ROW_BYTES, SWIZZLES, Copies, Operand, TensorMap
from kerneldecl.templates.hopper.params import SLAB, Tiles
from kerneldecl.templates.hopper.read_conv import Convolution, Window, read_convolution
from kerneldecl.templates.shared.fast_parse import parsed_quickly
from kerneldecl.templates.wgmma_matmul import FIRST_CAPABILITY, SUMS

MAX_STEP = 8
"""Of a box through a dimension of a tensor map."""
STEP_CHANNELS = ROW_BYTES // 2


@parsed_quickly()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the convolution with its epilogue as one specialised kernel, or None where wgmma, TMA or these sizes do not take it."""
    if arch.the_gpu.compute_capability[0] != FIRST_CAPABILITY[0]:
        return None
    convolution = read_convolution(mod)
    if convolution is None or not _takes(convolution):
        return None
    sides = (params["tile_h"], params["tile_w"])
    kernel = _kernel(convolution, Tiles.of(params), sides, arch)  # type: ignore[arg-type]
    return None if kernel is None else build(kernel)


def _takes(convolution: Convolution) -> bool:
    """Say whether wgmma multiplies the dtypes and TMA brings the images."""
    dtypes = {str(convolution.image.dtype), str(convolution.weights.dtype)}
    windows = (convolution.rows, convolution.columns)
    return (
        len(dtypes) == 1
        and all(dtype_bytes(dtype) == 2 and convolution.accum_dtype in SUMS.get(dtype, ()) for dtype in dtypes)
        and convolution.channels * 2 % PITCH_BYTES == 0
        and all(window.stride <= MAX_STEP for window in windows)
    )


def _kernel(convolution: Convolution, tiles: Tiles, sides: tuple[int, int], arch: Arch) -> Kernel | None:
    pixels, filters = (tiles.block_n, tiles.block_m) if tiles.swap_ab else (tiles.block_m, tiles.block_n)
    if not all(map(_is_power, (pixels, *sides))) or pixels % math.prod(sides) or pixels < SLAB:
        return None
    results = convolution.images, convolution.rows.results, convolution.columns.results
    boxes = Boxes(results, (pixels // math.prod(sides), *sides))
    shares = (tiles.cluster_m, tiles.cluster_n) if tiles.swap_ab else (tiles.cluster_n, tiles.cluster_m)
    image, weights = _image(convolution, boxes, shares[0]), _weights(convolution, filters, shares[1])
    blocks = -(-convolution.channels // STEP_CHANNELS)
    steps = convolution.rows.taps * convolution.columns.taps * blocks
    dtype = str(convolution.image.dtype)
    if image is None or weights is None or not tiles.fit(dtype, convolution.accum_dtype, steps, image.stage_bytes + weights.stage_bytes):
        return None
    operands, counts = (image, weights), (boxes.count, -(-convolution.filters // filters))
    if tiles.swap_ab:
        operands, counts = (weights, image), (counts[1], counts[0])
    made = results_of_boxes(convolution, boxes, filters, is_swapped=bool(tiles.swap_ab))
    kernel = Kernel(convolution.params, dtype, convolution.accum_dtype, *operands, made, tiles, (1, *counts), steps, arch.the_gpu.sm_count)
    return kernel if kernel.buffers or not made.is_staged or tiles.split_k > 1 else None


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _image(convolution: Convolution, boxes: Boxes, share: int) -> Operand | None:
    """Return how TMA brings one of `share` parts of the pixels that a tap meets."""
    copy_rows = boxes.pixels // share
    buffer, blocks, taps = convolution.image, -(-convolution.channels // STEP_CHANNELS), convolution.columns.taps
    images, height, width, channels = (int(extent) for extent in buffer.shape)
    sides = boxes.part(copy_rows)
    # A box of one pixel along a side walks nowhere; of others TMA skips what lies between.
    along = (1, _step(convolution.rows, sides[1]), _step(convolution.columns, sides[2]))
    box = [side * step for side, step in zip(sides, along, strict=True)]
    if max(box) > MAX_BOX:
        return None
    strides = (channels * 2, width * channels * 2, height * width * channels * 2)
    tensor_map = TensorMap(
        buffer,
        str(buffer.dtype),
        (channels, width, height, images),
        strides,
        (STEP_CHANNELS, *reversed(box)),
        SWIZZLES[ROW_BYTES],
        (1, *reversed(along)),
    )

    def coords(_: Any, row: Any, step: Any, number: Any) -> tuple[Any, ...]:
        image, y, x = boxes.pixel(row + number * copy_rows)
        tap = step // blocks
        return (
            step % blocks * STEP_CHANNELS,
            x * convolution.columns.stride + tap % taps * convolution.columns.dilation - convolution.columns.padding,
            y * convolution.rows.stride + tap // taps * convolution.rows.dilation - convolution.rows.padding,
            image,
        )

    copies = Copies(tensor_map, 1, lambda number: number * copy_rows, coords)
    return Operand(str(buffer.dtype), (copies,), boxes.pixels, is_k_last=True)


def _step(window: Window, side: int) -> int:
    return window.stride if side > 1 else 1


def _weights(convolution: Convolution, tile_columns: int, share: int) -> Operand | None:
    """Return how TMA brings the weights of a tap, with filters or channels side by side."""
    buffer, blocks, taps = convolution.weights, -(-convolution.channels // STEP_CHANNELS), convolution.columns.taps
    filters, channels = convolution.filters, convolution.channels
    filter_stride, channel_stride, column_stride, row_stride = convolution.weight_strides
    is_k_last = channel_stride == 1
    if not is_k_last and filter_stride != 1:
        return None
    item, dtype = 2, str(buffer.dtype)
    inner, outer, pitch = (channels, filters, filter_stride) if is_k_last else (filters, channels, channel_stride)
    dense = -(-inner * item // PITCH_BYTES) * PITCH_BYTES
    strides = [stride * item or dense for stride in (pitch, column_stride, row_stride)]
    stage_rows = tile_columns if is_k_last else -(-tile_columns // SLAB) * SLAB
    copy_rows = tile_columns // share if is_k_last else SLAB
    is_shared = tile_columns % (8 * share) == 0 if is_k_last else stage_rows // SLAB % share == 0
    if any(stride % PITCH_BYTES for stride in strides) or not is_shared:
        return None
    box = (STEP_CHANNELS, copy_rows, 1, 1) if is_k_last else (SLAB, STEP_CHANNELS, 1, 1)
    dims = (inner, outer, convolution.columns.taps, convolution.rows.taps)
    tensor_map = TensorMap(buffer, dtype, dims, tuple(strides), box, SWIZZLES[ROW_BYTES])

    def coords(_: Any, row: Any, step: Any, number: Any) -> tuple[Any, ...]:
        tap, channel, column = step // blocks, step % blocks * STEP_CHANNELS, row + number * copy_rows
        place = (channel, column) if is_k_last else (column, channel)
        return (*place, tap % taps, tap // taps)

    copies = Copies(tensor_map, stage_rows // copy_rows // share, lambda number: number * copy_rows, coords)
    return Operand(dtype, (copies,), stage_rows, is_k_last=is_k_last)
