"""Owns which register tiles and tasks of a convolution with channels first a CPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import math

from kerneldecl.model import Arch, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.cpu import time_model as model
from kerneldecl.policies.cpu.phased_conv import PhasedConv, choices, estimate, points_of

TEMPLATES = ("cpu_conv_packed",)
AUTO = {"cpu": 17}
HAS_TRACES = False

LEAST_TERMS = 32
"""Products of one result at least: with fewer, copies take as long as they do."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no convolution with channels first."""
    conv = convolution_of(space)
    if conv is None or conv.taps * conv.channels < LEAST_TERMS:
        return ()
    return model.ranked(estimate(TEMPLATES[0], conv, params, arch.the_cpu) for params in choices(conv, arch.the_cpu))[:top_k]


def convolution_of(space: IterSpace) -> PhasedConv | None:
    """Return the convolution of sequences or images in one group, with channels first, that a function is; None for any other."""
    block = model.two_operand_reduction(space)
    sides = 0 if block is None else (len(block.axes) - 3) // 2
    if block is None or sides not in (1, 2) or [axis.kind for axis in block.axes] != ["spatial"] * (2 + sides) + ["reduce"] * (1 + sides):
        return None
    extent = [axis.extent for axis in block.axes]
    images, f, *results = extent[: 2 + sides]
    channels, *taps = extent[2 + sides :]
    pixels, weights = block.reads
    first_tap = 3 + sides
    if weights.shape != (f, channels, *taps) or pixels.shape[:2] != (images, channels):
        return None
    for at in range(sides):
        index = pixels.index[2 + at]
        if index is None or not {axis for axis, _ in index} <= {2 + at, first_tap + at}:
            return None
    return PhasedConv(
        images=images,
        rows=results[0] if sides == 2 else 1,
        columns=results[-1],
        stride=1,
        f=f,
        taps=math.prod(taps),
        channels=channels,
        dtype=block.writes[0].dtype,
        image_bytes=points_of(pixels) * dtype_bytes(block.writes[0].dtype),
        has_panels=True,
    )
