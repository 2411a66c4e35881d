"""Owns convolutions in groups on CUDA cores, depthwise ones too: each thread block's part of an image in shared memory once.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names.

A thread computes a strip of neighbouring pixels of a row, by a few neighbouring filters of one group or as many depthwise ones. It loads a
row of its windows' pixels to registers, where windows share them. Sums are float32. Image and weights come to shared memory by cp.async,
through registers where the GPU has none.

Parameters:
  rows, columns  rows and columns of a thread block's rectangle of output pixels
  block_n        output channels of a thread block: those of whole groups, or a part of one group's
  strip          neighbouring output pixels of a thread, at most `columns`
  width          neighbouring output channels of a thread, 16 bytes at most
  threads        threads of a block: whole warps

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.grouped_conv import why_not_simt
from kerneldecl.analysis.grouped_conv_params import GroupedConvSimtParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.grouped_conv_launch import convolution_of
from kerneldecl.templates.gpu.grouped_conv_simt_kernel import GroupedConvSimtKernel, build
from kerneldecl.templates.hopper.read_conv import with_views
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the convolution with its epilogue as one custom kernel, or None where it is none or these parameters do not take it."""
    chosen = GroupedConvSimtParams(**{name: params[name] for name in GroupedConvSimtParams._fields})  # type: ignore[arg-type]
    gpu = arch.the_gpu
    convolution = convolution_of(mod, chosen, gpu, why_not_simt)
    if convolution is None:
        return None
    return with_views(build(GroupedConvSimtKernel(convolution, chosen, supports_pdl(gpu), gpu.async_copy)), convolution)
