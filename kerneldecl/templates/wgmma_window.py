"""Owns the kernel of convolutions on wgmma of images with few channels: windows are read out of shared memory, a fused epilogue.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names.

A block keeps the weights of its filters in shared memory, and TMA brings one part of the image after the other. Of that, lanes load
the factors of their results to registers: a row of a window is one piece of memory, whatever its taps and channels, and is taken in pairs.
So nothing is copied for each window, and the reduction has no more terms than the windows, but for the last half of rows of odd length.

Parameters:
  tile_w    neighbouring results of a tile along a row of the image: 16, 32 or 64
  mma_tiles     64 results each, of which a tile consists: 1, 2 or 4
  block_n   filters that a block computes: a multiple of 8, 128 at most
  stages    parts of the image that a block has in shared memory, or on their way to it: 2 to 8
  blocks    that share an SM; they take tiles in turn until none is left: 1 to 8

Returns a specialised function of TIRx, not a schedule.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.model import Arch, Gpu, Value, dtype_bytes
from kerneldecl.templates.hopper.conv_tiles import Boxes, results_of_boxes
from kerneldecl.templates.hopper.kernel_config import SM_BYTES, SYSTEM_BYTES
from kerneldecl.templates.hopper.operands import MAX_BOX, PITCH_BYTES
from kerneldecl.templates.hopper.params import SLAB
from kerneldecl.templates.hopper.read_conv import Convolution, read_convolution
from kerneldecl.templates.hopper.smem_conv_config import ITEM_BYTES, PIECE, Kernel, Tiles
from kerneldecl.templates.hopper.smem_conv_kernel import build
from kerneldecl.templates.shared.fast_parse import parsed_quickly
from kerneldecl.templates.wgmma_matmul import FIRST_CAPABILITY, SUMS


@parsed_quickly()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the convolution with its epilogue as one specialised kernel, or None where wgmma, TMA or these sizes do not take it."""
    gpu, tiles = arch.the_gpu, Tiles.of(params)
    if gpu.compute_capability[0] != FIRST_CAPABILITY[0] or not _in_range(tiles):
        return None
    convolution = read_convolution(mod)
    if convolution is None or not _takes(convolution):
        return None
    results = convolution.images, convolution.rows.results, convolution.columns.results
    boxes = Boxes(results, (1, tiles.tile_h, tiles.tile_w))
    made = results_of_boxes(convolution, boxes, tiles.block_n, is_swapped=False)
    kernel = Kernel(convolution, boxes, made, tiles, gpu.sm_count)
    return build(kernel) if _fits(kernel, gpu) else None


def _in_range(tiles: Tiles) -> bool:
    return (
        tiles.tile_w in (16, 32, 64)
        and tiles.mma_tiles in (1, 2, 4)
        and tiles.mma_tiles * SLAB % tiles.tile_w == 0
        and 8 <= tiles.block_n <= 128
        and tiles.block_n % 8 == 0
        and 2 <= tiles.stages <= 8
        and 1 <= tiles.blocks <= 8
    )


def _takes(convolution: Convolution) -> bool:
    """Say whether wgmma multiplies the dtypes, rows of windows are one piece, and TMA brings images and threads weights in whole pieces."""
    dtypes = {str(convolution.image.dtype), str(convolution.weights.dtype)}
    filter_stride, *strides = convolution.weight_strides
    width = int(convolution.image.shape[2])
    return (
        len(dtypes) == 1
        and all(dtype_bytes(dtype) == ITEM_BYTES and "float32" in SUMS.get(dtype, ()) for dtype in dtypes)
        and convolution.accum_dtype == "float32"
        and (convolution.columns.dilation == 1 or convolution.columns.taps == 1)
        and width * convolution.channels * ITEM_BYTES % PITCH_BYTES == 0
        and filter_stride == 1
        and all(stride % PIECE == 0 for stride in (*strides, convolution.filters))
    )


def _fits(kernel: Kernel, gpu: Gpu) -> bool:
    """Say whether the parts of the image are boxes that TMA copies, and as many blocks as asked for have room on an SM."""
    return (
        kernel.pitch <= MAX_BOX
        and kernel.lines <= MAX_BOX
        and (not kernel.results.is_staged or kernel.results.map is not None)
        and kernel.smem_bytes <= gpu.smem_per_block_optin_bytes
        and kernel.parameters.blocks * (kernel.smem_bytes + SYSTEM_BYTES) <= SM_BYTES
    )
