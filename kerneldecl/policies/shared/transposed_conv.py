"""Owns the reading of a transposed convolution: a convolution of all its phases, and a block that puts their results in their places.

Knows nothing of devices, tiles or TVM.
"""

from __future__ import annotations

from dataclasses import dataclass

from kerneldecl.model import Access, Block, IterSpace

IMAGE, ROW, COLUMN, DOWN, ALONG, CHANNEL, TAP_ROW, TAP_COLUMN, REDUCED = range(9)
"""Axes of the convolution of all phases."""


@dataclass(frozen=True)
class TransposedConv:
    """A transposed convolution as policies see it."""

    block: Block
    """The convolution of all phases: it reads pixels, then weights."""
    rows: int
    """Rows of one phase, as columns are its columns."""
    columns: int
    filters: Access
    """The argument that holds the weights."""

    @property
    def images(self) -> int:
        return self.block.axes[IMAGE].extent

    @property
    def stride(self) -> int:
        return self.block.axes[DOWN].extent

    @property
    def f(self) -> int:
        return self.block.axes[CHANNEL].extent

    @property
    def channels(self) -> int:
        return self.block.axes[REDUCED].extent

    @property
    def phase_taps(self) -> int:
        """Return the taps of one phase, with zeros that fill them up."""
        return self.block.axes[TAP_ROW].extent * self.block.axes[TAP_COLUMN].extent


def transposed_of(space: IterSpace) -> TransposedConv | None:
    """Return the transposed convolution that a function is, by its convolution of all phases; None for any other."""
    reductions = [block for block in space.blocks if block.is_reduction]
    block = reductions[0] if len(reductions) == 1 and len(reductions[0].reads) == 2 else None
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
    return TransposedConv(block, rows, columns, source_of(space, weights))


def source_of(space: IterSpace, access: Access) -> Access:
    """Return the access to the argument that an operand is made of."""
    while access.operand not in space.inputs:
        access = next(block.reads[0] for block in space.blocks if block.writes[0].operand == access.operand)
    return access


def _within(access: Access, at: int, axes: set[int]) -> bool:
    """Say whether no other axes index a dimension."""
    index = access.index[at]
    return index is not None and {axis for axis, _ in index} <= axes
