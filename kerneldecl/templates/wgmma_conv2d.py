"""Owns the convolution kernel on wgmma, an implicit GEMM: TMA loads the windows of images as tiles of A, a fused epilogue.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names.

A tile's rows are results of a box of pixels, w fastest, then h, then images; its columns are filters; with `swap_ab`, the other way
round. A k-tile is 64 channels at one tap: the box of pixels that the tap meets, strided, and zeros where it reaches beyond the image.

Parameters: those of `wgmma_matmul` but for stream_k, with a split_k that divides the k-tiles, and
  tile_w, tile_h   pixels of a tile along a row and along a column of the image, powers of two; what is left of its pixels are images
  pack             1 copies images, or weights, whose channels or filters are no multiples of 16 bytes; 0 where it is left out

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.hopper_limits import MAX_TMA_BOX_STRIDE
from kerneldecl.model import Arch, Value
from kerneldecl.templates.hopper.conv_gemm import conv_gemm, takes_dtypes
from kerneldecl.templates.hopper.conv_operands import image_matrix, weights_matrix
from kerneldecl.templates.hopper.gemm_kernel import build
from kerneldecl.templates.hopper.pack import Packing, packing_of
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.read_conv import Convolution, read_convolution, with_views
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul import has_wgmma


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the convolution with its epilogue as one custom kernel, or None where wgmma, TMA or these parameters do not take it."""
    convolution = read_convolution(mod) if has_wgmma(arch) else None
    if convolution is None or not _takes(convolution):
        return None
    packings: tuple[Packing | None, Packing | None] = (None, None)
    if params.get("pack"):
        packings = packing_of(image_matrix(convolution)), packing_of(weights_matrix(convolution))
        if not any(packings):
            return None
    sides = (params["tile_h"], params["tile_w"])
    kernel = conv_gemm(convolution, GemmParams.of(params), sides, arch, packings=packings)  # type: ignore[arg-type]
    return None if kernel is None else with_views(build(kernel), convolution)


def _takes(convolution: Convolution) -> bool:
    """Say whether wgmma multiplies the dtypes and TMA's boxes have room for the strides."""
    windows = (convolution.rows, convolution.columns)
    return takes_dtypes(convolution) and all(window.stride <= MAX_TMA_BOX_STRIDE for window in windows)
