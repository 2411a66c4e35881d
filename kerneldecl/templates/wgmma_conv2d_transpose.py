"""Owns transposed convolutions on wgmma: results by their phases, each an implicit GEMM with a batch's place in one kernel.

Knows nothing of how its parameters are chosen, and recognises a transposed convolution by its structure, never by its names.

Results whose places are equal modulo the stride are of one phase: a convolution of stride 1 with every stride-th tap. The phase is the
batch of the GEMM: it says at which pixel windows begin and which taps they have. A k-tile is 64 channels at one tap; no product with
a zero between pixels is computed. TMA stores a tile's pixels a stride apart: what lies between are dimensions of its tensor map.

Parameters: those of `wgmma_conv2d`.

Returns a custom kernel of TIRx, a PrimFunc without a trace; None where the stride does not divide the sides of the result.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.hopper.conv_gemm import conv_gemm, takes_dtypes
from kerneldecl.templates.hopper.gemm_kernel import build
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.read_conv_transpose import read_transposed
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul import has_wgmma


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the transposed convolution with its epilogue as one kernel, or None where wgmma, TMA or these parameters do not take it."""
    transposed = read_transposed(mod) if has_wgmma(arch) else None
    if transposed is None or not takes_dtypes(transposed.convolution):
        return None
    sides = (params["tile_h"], params["tile_w"])
    kernel = conv_gemm(transposed.convolution, GemmParams.of(params), sides, arch, transposed.phases)  # type: ignore[arg-type]
    return None if kernel is None else build(kernel)
