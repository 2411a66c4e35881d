"""Owns the reading of a convolution in groups of channels: which factor of its reduction is the image.

Knows nothing of tiles, instructions or targets.
"""

from __future__ import annotations

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError

from kerneldecl.compiler.blocks import is_reduction
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.templates.hopper.read_conv import Convolution, Operands, read
from kerneldecl.templates.shared.contraction import fuse_epilogue


def read_grouped_convolution(mod: tvm.IRModule) -> Convolution | None:
    """Return the convolution of several groups that a module's function is, None where it is none or its images have another layout."""
    sch = Schedule(mod)
    fused = fuse_epilogue(sch)
    if fused is None:
        return None
    space = iter_space(sch.mod)
    block = next(block for block in space.blocks if block.is_reduction)
    producers = [sch.get(producer) for producer in sch.get_producers(fused.block)]
    is_plain = block.flops_per_point == 2 and block.is_multiply_accumulate and len(block.reads) == 2
    if not is_plain or len(producers) > 1 or any(is_reduction(producer) for producer in producers):
        return None
    accum_dtype = block.writes[0].dtype
    for operands in (Operands(0, 1, accum_dtype), Operands(1, 0, accum_dtype)):
        try:
            found = read(sch, fused, producers, operands)
        except ScheduleError:
            return None
        if found is not None and found.groups > 1:
            return found
    return None
