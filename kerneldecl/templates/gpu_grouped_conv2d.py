"""Owns convolutions in groups of few channels on mma.sync: each group multiplied by itself, out of an image in shared memory.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names.

A thread block copies the part of an image under its results once, and the weights of its filters, by cp.async. A k-step is eight terms of
one group: taps follow each other in it, so that a tile of eight filters takes no zeros of other groups. Where a group has eight channels or
a multiple, ldmatrix reads them; fewer are loaded in pairs. Where it has fewer than eight filters, a tile is multiplied once for each group.

Parameters:
  rows, columns     rows and columns of a thread block's rectangle of output pixels
  block_n           output channels of a thread block: those of whole groups, or a part of one group's
  warps_m, warps_n  warps along the pixels and along the channels
  fragments         fragments of 16 pixels that a warp multiplies at once

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.grouped_conv import why_not
from kerneldecl.analysis.grouped_conv_params import GroupedConvParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.grouped_conv_config import GroupedConvKernel
from kerneldecl.templates.gpu.grouped_conv_kernel import build
from kerneldecl.templates.gpu.grouped_conv_launch import convolution_of
from kerneldecl.templates.hopper.read_conv import with_views
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the convolution with its epilogue as one custom kernel, or None where mma.sync or these parameters do not take it."""
    chosen = GroupedConvParams(**{name: params[name] for name in GroupedConvParams._fields})  # type: ignore[arg-type]
    convolution = convolution_of(mod, chosen, arch.the_gpu, why_not)
    if convolution is None:
        return None
    return with_views(build(GroupedConvKernel(convolution, chosen, supports_pdl(arch.the_gpu))), convolution)
