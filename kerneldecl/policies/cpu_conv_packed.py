"""Owns which register tiles and tasks of a convolution whose operands are copied first a CPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import math

from kerneldecl.model import Arch, Block, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.cpu import time_model as model
from kerneldecl.policies.cpu.phased_conv import PhasedConv, choices, estimate, points_of

TEMPLATES = ("cpu_conv_packed",)
AUTO = {"cpu": 17}
HAS_TRACES = False

LEAST_TERMS = 32
"""Multiply-adds of one result at least, with channels first: with fewer, copies take as long as they do."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no such convolution.

    With channels last, output channels that are whole vectors are left to `cpu_conv2d`, whose tiles divide them.
    """
    conv = convolution_of(space)
    if conv is None or (conv.is_first and conv.taps * conv.channels < LEAST_TERMS):
        return ()
    if not conv.is_first and conv.f % model.compute_lanes(arch.the_cpu, conv.dtype) == 0:
        return ()
    return model.ranked(estimate(TEMPLATES[0], conv, params, arch.the_cpu) for params in choices(conv, arch.the_cpu))[:top_k]


def convolution_of(space: IterSpace) -> PhasedConv | None:
    """Return the convolution of sequences or images in one group that a function is; None for any other."""
    block = model.two_operand_reduction(space)
    sides = 0 if block is None else (len(block.axes) - 3) // 2
    if block is None or sides not in (1, 2) or [axis.kind for axis in block.axes] != ["spatial"] * (2 + sides) + ["reduce"] * (1 + sides):
        return None
    return _with_channels(space, block, sides, is_last=False) or _with_channels(space, block, sides, is_last=True)


def _with_channels(space: IterSpace, block: Block, sides: int, *, is_last: bool) -> PhasedConv | None:
    """Return the convolution that a block is if its channels come last, or first; else None."""
    outputs, reduced = tuple(range(2 + sides)), tuple(range(2 + sides, 3 + 2 * sides))
    places, f = (outputs[1:-1], outputs[-1]) if is_last else (outputs[2:], 1)
    taps, c = (reduced[:-1], reduced[-1]) if is_last else (reduced[1:], reduced[0])
    extent = [axis.extent for axis in block.axes]
    pixels, weights = block.reads
    wanted = (*taps, c, f) if is_last else (f, c, *taps)
    if weights.shape != tuple(extent[axis] for axis in wanted) or len(pixels.shape) != 2 + sides:
        return None
    first = 1 if is_last else 2
    if (pixels.shape[0], pixels.shape[-1 if is_last else 1]) != (extent[0], extent[c]):
        return None
    for at, place, tap in zip(range(first, first + sides), places, taps, strict=True):
        index = pixels.index[at]
        if index is None or not {axis for axis, _ in index} <= {place, tap}:
            return None
    dtype = block.writes[0].dtype
    has_panels = not is_last or weights.dtype != dtype
    copied = has_panels or pixels.operand not in space.inputs
    return PhasedConv(
        images=extent[0],
        rows=extent[places[0]] if sides == 2 else 1,
        columns=extent[places[-1]],
        stride=1,
        f=extent[f],
        taps=math.prod(extent[axis] for axis in taps),
        channels=extent[c],
        dtype=dtype,
        image_bytes=points_of(pixels) * dtype_bytes(dtype) if copied else 0,
        has_panels=has_panels,
        is_first=not is_last,
    )
