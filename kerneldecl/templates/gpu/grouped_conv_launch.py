"""Owns what both templates of convolutions in groups begin and end with: the convolution that parameters fit, the launch of its kernel.

Knows nothing of what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.grouped_conv import GroupedConvSizes
from kerneldecl.analysis.grouped_conv_params import ConvTile, GroupedConvParams, GroupedConvSimtParams
from kerneldecl.model import Gpu
from kerneldecl.templates.gpu.grouped_conv_config import sizes_of
from kerneldecl.templates.gpu.grouped_conv_copy import are_weights_contiguous
from kerneldecl.templates.gpu.read_grouped_conv import read_grouped_convolution
from kerneldecl.templates.hopper.read_conv import Convolution

WhyNot = Callable[[GroupedConvSizes, Gpu], str]
"""Why a kernel does not take a convolution; empty where it does."""


class Kernel(Protocol):
    """A kernel whose thread blocks compute tiles of a convolution."""

    @property
    def convolution(self) -> Convolution: ...
    @property
    def tile(self) -> ConvTile: ...
    @property
    def has_pdl(self) -> bool: ...


def convolution_of(mod: tvm.IRModule, chosen: GroupedConvParams | GroupedConvSimtParams, gpu: Gpu, why_not: WhyNot) -> Convolution | None:
    """Return the convolution in groups that a module is, None where it is none, or a kernel or its parameters do not take it."""
    convolution = read_grouped_convolution(mod)
    if convolution is None:
        return None
    sizes = sizes_of(convolution)
    takes = not why_not(sizes, gpu) and chosen.fits(sizes, gpu) and are_weights_contiguous(convolution, chosen.tile(sizes))
    return convolution if takes else None


def launched(kernel: Kernel, warps: int, run: Any) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, on the convolution's parameters; `run` takes the kernel, block, warp and lane."""

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        # Without it, ptxas spills rather than hold fewer blocks on an SM.
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        if kernel.has_pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([kernel.tile.blocks])
        warp = T.warp_id([warps])
        lane = T.lane_id([WARP_LANES])
        run(kernel, block, warp, lane)

    func = tirx.PrimFunc(list(kernel.convolution.func_params), main.body)
    return tvm.IRModule({"main": func.with_attr({"global_symbol": "main", "tirx.noalias": True})})
