"""Owns which register tiles and tasks of a transposed convolution a CPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

from kerneldecl.model import Access, Arch, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.cpu import time_model as model
from kerneldecl.policies.cpu.phased_conv import PhasedConv, choices, estimate, points_of, source_of

TEMPLATES = ("cpu_conv2d_transpose",)
AUTO = {"cpu": 22}
HAS_TRACES = False

IMAGE, ROW, COLUMN, DOWN, ALONG, CHANNEL, TAP_ROW, TAP_COLUMN, REDUCED = range(9)
"""Axes of the convolution of all phases."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no transposed convolution."""
    conv = transposed_of(space)
    if conv is None:
        return ()
    return model.ranked(estimate(TEMPLATES[0], conv, params, arch.the_cpu) for params in choices(conv, arch.the_cpu))[:top_k]


def transposed_of(space: IterSpace) -> PhasedConv | None:
    """Return the transposed convolution that a function is, by its convolution of all phases; None for any other."""
    block = model.two_operand_reduction(space)
    if block is None or [axis.kind for axis in block.axes] != ["spatial"] * 6 + ["reduce"] * 3:
        return None
    extent = [axis.extent for axis in block.axes]
    pixels, weights = block.reads
    sides = ((ROW, TAP_ROW, DOWN), (COLUMN, TAP_COLUMN, ALONG))
    is_it = len(pixels.shape) == 4 and weights.shape[2:] == (extent[REDUCED], extent[CHANNEL])
    for at, (place, tap, phase) in enumerate(sides):
        is_it = is_it and _within(pixels, 1 + at, {place, tap}) and _within(weights, at, {phase, tap})
        is_it = is_it and weights.shape[at] == extent[tap] * extent[phase]
    if not is_it or extent[DOWN] != extent[ALONG] or space.blocks.index(block) == len(space.blocks) - 1:
        return None
    behind = space.blocks[space.blocks.index(block) + 1]
    if len(behind.axes) != 4 or len(behind.reads) != 1 or len(behind.reads[0].index) != 6:
        return None
    channel = behind.reads[0].index[-1]
    order = (2, 3) if channel == ((1, 1),) else (1, 2)
    rows, columns = (-(-behind.axes[at].extent // extent[DOWN]) for at in order)
    filters = source_of(space, weights)
    copied = pixels.operand not in space.inputs or pixels.dtype != block.writes[0].dtype
    return PhasedConv(
        images=extent[IMAGE],
        rows=rows,
        columns=columns,
        stride=extent[DOWN],
        f=extent[CHANNEL],
        taps=points_of(filters) // (extent[REDUCED] * extent[CHANNEL]),
        channels=extent[REDUCED],
        dtype=block.writes[0].dtype,
        image_bytes=points_of(pixels) * dtype_bytes(block.writes[0].dtype) if copied else 0,
        has_panels=filters.shape[2:] != weights.shape[2:] or filters.dtype != block.writes[0].dtype,
    )


def _within(access: Access, at: int, axes: set[int]) -> bool:
    """Say whether no other axes index a dimension."""
    index = access.index[at]
    return index is not None and {axis for axis, _ in index} <= axes
