"""Owns the sizes of one kernel of convolutions in groups: tiles, where elements are in shared memory, which terms a lane holds.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.analysis.grouped_conv import ITEM_BYTES, K_STEP, N_TILE, GroupedConvSizes, Side
from kerneldecl.analysis.grouped_conv_params import ConvTile, GroupedConvParams
from kerneldecl.analysis.tensor_cores import K_BYTES, PTX_TYPES
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.gpu.grouped_conv_copy import place_in_line
from kerneldecl.templates.hopper.read_conv import Convolution, SlidingWindow

WORD = 4 // ITEM_BYTES
"""Elements of a word of 32 bits, in which shared memory is addressed."""


def sizes_of(convolution: Convolution) -> GroupedConvSizes:
    """Return what policies see of a convolution."""
    return GroupedConvSizes(
        images=convolution.images,
        rows=_side(convolution.rows),
        columns=_side(convolution.columns),
        groups=convolution.groups,
        channels=convolution.channels // convolution.groups,
        filters=convolution.filters // convolution.groups,
        dtype=str(convolution.image.dtype),
        accum_dtype=convolution.accum_dtype,
        out_dtype=str(convolution.out.dtype),
    )


def _side(window: SlidingWindow) -> Side:
    return Side(window.image, window.results, window.taps, window.stride, window.dilation)


@dataclass(frozen=True)
class GroupedConvKernel:
    """One kernel: a thread block computes a rectangle of pixels of one image, for the filters of some groups."""

    convolution: Convolution
    params: GroupedConvParams
    has_pdl: bool

    @functools.cached_property
    def sizes(self) -> GroupedConvSizes:
        return sizes_of(self.convolution)

    @property
    def tile(self) -> ConvTile:
        return self.params.tile(self.sizes)

    @property
    def turns(self) -> int:
        """Return how often a warp multiplies fragments of pixels."""
        return -(-self.params.pixel_fragments() // (self.params.warps_m * self.params.fragments))

    # ---- the image in shared memory

    def pixel(self, index: Any) -> tuple[Any, Any]:
        """Return row and column of a result within the thread block's rectangle; the last one's for those behind it."""
        last = self.params.rows * self.params.columns - 1
        at = index if self.params.rows * self.params.columns % 16 == 0 and self._is_even else T.min(index, last)
        return at // self.params.columns, at % self.params.columns

    @property
    def _is_even(self) -> bool:
        """Say whether all warps have equally many whole fragments."""
        return self.turns * self.params.warps_m * self.params.fragments == self.params.pixel_fragments()

    def window(self, index: Any) -> Any:
        """Return where the window of a result begins, in words."""
        row, column = self.pixel(index)
        return (row * (self.sizes.rows.stride * self.tile.line) + column) * (self.tile.pitch // WORD)

    # ---- the reduction

    @property
    def steps(self) -> int:
        return self.sizes.steps

    @property
    def step_pairs(self) -> int:
        """Return how many mma.syncs one after the other multiply all terms."""
        return -(-self.steps // 2)

    @property
    def mma(self) -> str:
        kind = PTX_TYPES[self.sizes.dtype]
        return f"mma.sync.aligned.m16n8k{K_BYTES // ITEM_BYTES}.row.col.f32.{kind}.{kind}.f32"

    @property
    def by_ldmatrix(self) -> bool:
        """Say whether eight neighbouring terms are channels of one pixel, as ldmatrix reads them; else lanes load pairs."""
        return self.sizes.channels % K_STEP == 0

    def term(self, term: int) -> int:
        """Return how far a term of the reduction is from its window's begin, in words; the last term for those behind it."""
        tap, channel = divmod(min(term, self.sizes.terms - 2), self.sizes.channels)
        row, column = divmod(tap, self.sizes.columns.taps)
        at: int = row * self.sizes.rows.dilation * self.tile.line + place_in_line(self.tile, column * self.sizes.columns.dilation)
        return (at * self.tile.pitch + channel) // WORD

    def lane_term(self, step: int, lane: Any) -> Any:
        """Return how far a lane's pair of terms of a step is from its window's begin, in words."""
        at = [self.term(step * K_STEP + 2 * pair) for pair in range(4)]
        return at[0] + sum((T.Select(lane % 4 >= pair, at[pair] - at[pair - 1], 0) for pair in range(1, 4)), 0)

    def valid_pairs(self, step: int) -> int:
        """Return how many of the four pairs of a step are terms."""
        return max(0, min(4, (self.sizes.terms - step * K_STEP) // 2))

    # ---- which groups a warp's tiles of filters belong to

    def tile_groups(self, tile: int) -> list[int]:
        """Return of which groups, from the warp's first one on, a tile of a warp has filters."""
        first = tile * N_TILE // self.sizes.filters
        return list(range(first, (tile * N_TILE + N_TILE - 1) // self.sizes.filters + 1))

    def group_tiles(self) -> dict[int, list[int]]:
        """Return the tiles of a warp that each of its groups has filters in."""
        found: dict[int, list[int]] = {}
        for tile in range(self.params.warp_tiles):
            for group in self.tile_groups(tile):
                found.setdefault(group, []).append(tile)
        return found

    def warp_group(self, warp_n: Any) -> Any:
        """Return the first group of a warp, counted from the thread block's first."""
        warp_filters = self.params.warp_tiles * N_TILE
        return 0 if self.params.block_n <= self.sizes.filters else warp_n * warp_filters // self.sizes.filters

    def accumulator(self, fragment: int, tile: int, group: int) -> int:
        """Return the first of the four accumulators of a fragment, a tile, and one of the tile's groups."""
        phases = self.params.phases(self.sizes)
        return ((fragment * self.params.warp_tiles + tile) * phases + group - self.tile_groups(tile)[0]) * 4

    # ---- results

    @property
    def out_piece(self) -> int:
        """Return the results that a lane stores at once."""
        return VECTOR_BYTES // dtype_bytes(self.sizes.out_dtype)

    @property
    def staging_pitch(self) -> int:
        return self.params.staging_pitch(self.sizes)
