"""Owns the convolution kernel on wgmma of images with few channels: an implicit GEMM out of an image in shared memory, a fused epilogue.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names.

A CTA keeps the weights of its filters in shared memory, and TMA loads one part of the image after the other. Lanes load the A fragments
of their results from it to registers: a row of a window is contiguous, whatever its taps and channels, and is taken in pairs. So nothing
is copied for each window, and k is no longer than the windows, but for the last half of rows of odd length.

Parameters:
  tile_w     neighbouring results of a tile along a row of the image: 16, 32 or 64
  mma_tiles  MMA tiles of 64 results each, of which a tile consists: 1, 2 or 4
  block_n    filters that a CTA computes: a multiple of 8, 128 at most
  stages     parts of the image that a CTA has in shared memory, or on their way to it: 2 to 8
  blocks     CTAs that share an SM; they take tiles in turn until none is left: 1 to 8

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis import tensor_cores
from kerneldecl.analysis.hopper_limits import MAX_TMA_BOX, MMA_TILE_ROWS, SM_SMEM_BYTES, SYSTEM_SMEM_BYTES, TMA_ALIGN_BYTES
from kerneldecl.analysis.params import WindowParams, read_params
from kerneldecl.model import Arch, Gpu, Value, dtype_bytes
from kerneldecl.templates.hopper.conv_tiles import PixelBoxes, conv_epilogue
from kerneldecl.templates.hopper.epilogue import longest_line
from kerneldecl.templates.hopper.read_conv import Convolution, read_convolution, with_views
from kerneldecl.templates.hopper.smem_conv_config import ITEM_BYTES, PIECE, SmemConvKernel
from kerneldecl.templates.hopper.smem_conv_kernel import build
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul import has_wgmma


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the convolution with its epilogue as one custom kernel, or None where wgmma, TMA or these parameters do not take it."""
    conv_params = read_params(WindowParams, params)
    convolution = read_convolution(mod) if has_wgmma(arch) and _are_in_range(conv_params) else None
    if convolution is None or not _takes(convolution):
        return None
    results = convolution.images, convolution.rows.results, convolution.columns.results
    boxes = PixelBoxes(results, (1, conv_params.tile_h, conv_params.tile_w), longest_line(conv_params.block_n))
    kernel = SmemConvKernel(
        convolution=convolution,
        boxes=boxes,
        epilogue=conv_epilogue(convolution, boxes, conv_params.block_n, is_swapped=False),
        params=conv_params,
        sm_count=arch.the_gpu.sm_count,
    )
    return with_views(build(kernel), convolution) if _fits(kernel, arch.the_gpu) else None


def _are_in_range(params: WindowParams) -> bool:
    return (
        params.tile_w in (16, 32, 64)
        and params.mma_tiles in (1, 2, 4)
        and params.mma_tiles * MMA_TILE_ROWS % params.tile_w == 0
        and 8 <= params.block_n <= 128
        and params.block_n % 8 == 0
        and 2 <= params.stages <= 8
        and 1 <= params.blocks <= 8
    )


def _takes(convolution: Convolution) -> bool:
    """Say whether wgmma multiplies the dtypes, rows of windows are contiguous, and TMA loads images and threads weights in whole pieces."""
    dtypes = {str(convolution.image.dtype), str(convolution.weights.dtype)}
    filter_stride, *strides = convolution.weight_strides
    width = int(convolution.image.shape[2])
    return (
        len(dtypes) == 1
        and all(dtype_bytes(dtype) == ITEM_BYTES and "float32" in tensor_cores.accumulators("wgmma", dtype) for dtype in dtypes)
        and convolution.accum_dtype == "float32"
        and (convolution.columns.dilation == 1 or convolution.columns.taps == 1)
        and width * convolution.channels * ITEM_BYTES % TMA_ALIGN_BYTES == 0
        and filter_stride == 1
        and all(stride % PIECE == 0 for stride in (*strides, convolution.filters))
    )


def _fits(kernel: SmemConvKernel, gpu: Gpu) -> bool:
    """Say whether the parts of the image are TMA boxes, and as many CTAs as asked for have room on an SM."""
    return (
        kernel.pitch <= MAX_TMA_BOX
        and kernel.lines <= MAX_TMA_BOX
        and (not kernel.epilogue.via_smem or kernel.epilogue.map is not None)
        and kernel.smem_bytes <= gpu.smem_per_block_optin_bytes
        and kernel.params.blocks * (kernel.smem_bytes + SYSTEM_SMEM_BYTES) <= SM_SMEM_BYTES
    )
