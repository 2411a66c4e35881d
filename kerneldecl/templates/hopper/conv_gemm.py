"""Owns how a convolution on wgmma is a GEMM: boxes of pixels are rows, filters are columns, phases of a transposed one are the batch.

Knows nothing of how a convolution is read or how tiles are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from kerneldecl.analysis import tensor_cores
from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.model import Arch, dtype_bytes
from kerneldecl.templates.hopper.conv_operands import ITEM_BYTES, image_operand, tap_k_tiles, weights_operand
from kerneldecl.templates.hopper.conv_tiles import PixelBoxes, conv_epilogue
from kerneldecl.templates.hopper.kernel_config import GemmKernel
from kerneldecl.templates.hopper.operands import Operand
from kerneldecl.templates.hopper.pack import Packing
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.read_conv import Convolution


class Phases(NamedTuple):
    """The phases of a transposed convolution, each a convolution of stride 1 that meets pixels and taps of its own."""

    step: int
    """Phases along each side: the stride."""
    image: Callable[[Operand], Operand]
    """Boxes of pixels of the first phase, to boxes of the phase that the batch is."""
    weights: Callable[[Operand], Operand]
    """Taps in order, to those of the phase that the batch is."""


def takes_dtypes(convolution: Convolution) -> bool:
    """Say whether wgmma multiplies the dtypes."""
    dtype, other = str(convolution.image.dtype), str(convolution.weights.dtype)
    is_known = dtype == other and dtype_bytes(dtype) == ITEM_BYTES
    return is_known and convolution.accum_dtype in tensor_cores.accumulators("wgmma", dtype)


def conv_gemm(
    convolution: Convolution,
    params: GemmParams,
    sides: tuple[int, int],
    arch: Arch,
    phases: Phases | None = None,
    packings: tuple[Packing | None, Packing | None] = (None, None),
) -> GemmKernel | None:
    """Return the kernel with tiles of so many rows and columns of pixels, None where it does not take these parameters.

    `packings` are the copies of the image and of the weights that it reads in their place.
    """
    pixels, filters = (params.block_n, params.block_m) if params.swap_ab else (params.block_m, params.block_n)
    if not all(map(_is_power, (pixels, *sides))) or pixels % math.prod(sides) or pixels < MMA_TILE_ROWS:
        return None
    results = convolution.images, convolution.rows.results, convolution.columns.results
    boxes = PixelBoxes(results, (pixels // math.prod(sides), *sides))
    ctas = (params.cluster_m, params.cluster_n) if params.swap_ab else (params.cluster_n, params.cluster_m)
    copies = [packing.copy if packing else None for packing in packings]
    image, weights = image_operand(convolution, boxes, ctas[0], copies[0]), weights_operand(convolution, filters, ctas[1], copies[1])
    k_tiles = convolution.rows.taps * convolution.columns.taps * tap_k_tiles(convolution)
    dtype, accum_dtype = str(convolution.image.dtype), convolution.accum_dtype
    if image is None or weights is None:
        return None
    if phases is not None:
        image, weights = phases.image(image), phases.weights(weights)
    step = 1 if phases is None else phases.step
    if not params.fits(dtype, accum_dtype, k_tiles, image.stage_bytes + weights.stage_bytes):
        return None
    tiles = [(image, boxes.count), (weights, -(-convolution.filters // filters))]
    (a, rows), (b, columns) = reversed(tiles) if params.swap_ab else tiles
    kernel = GemmKernel(
        func_params=convolution.func_params,
        dtype=dtype,
        accum_dtype=accum_dtype,
        a=a,
        b=b,
        epilogue=conv_epilogue(convolution, boxes, filters, is_swapped=bool(params.swap_ab), step=step),
        params=params,
        grid=(step * step, rows, columns),
        k_tiles=k_tiles,
        sm_count=arch.the_gpu.sm_count,
        packings=tuple(filter(None, packings)),
    )
    return kernel if kernel.can_store else None


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
