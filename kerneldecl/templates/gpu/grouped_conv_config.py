"""Owns the sizes of one kernel of convolutions in groups: tiles, where elements are in shared memory, which terms a lane holds.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.analysis.grouped_conv import ITEM_BYTES, K_STEP, N_TILE, PIECE, GroupedConvParams, GroupedConvSizes, Side, odd_pieces
from kerneldecl.analysis.tensor_cores import K_BYTES, PTX_TYPES
from kerneldecl.model import dtype_bytes
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

    # ---- tiles

    @property
    def row_tiles(self) -> int:
        return -(-self.sizes.rows.results // self.params.rows)

    @property
    def column_tiles(self) -> int:
        return -(-self.sizes.columns.results // self.params.columns)

    @property
    def channel_tiles(self) -> int:
        return self.convolution.filters // self.params.block_n

    @property
    def blocks(self) -> int:
        return self.sizes.images * self.row_tiles * self.column_tiles * self.channel_tiles

    @property
    def turns(self) -> int:
        """Return how often a warp multiplies fragments of pixels."""
        return -(-self.params.pixel_fragments() // (self.params.warps_m * self.params.fragments))

    # ---- the image in shared memory

    @property
    def slab(self) -> int:
        """Return the input channels of a thread block."""
        return self.params.block_groups(self.sizes) * self.sizes.channels

    @property
    def first_channel(self) -> Callable[[Any], Any]:
        """Return the function from a tile of filters to its first input channel."""
        filters, block_n = self.sizes.filters, self.params.block_n
        return lambda tile: tile * block_n // filters * self.sizes.channels if block_n < filters else tile * self.slab

    @property
    def pitch(self) -> int:
        return self.params.pitch(self.sizes)

    @property
    def line(self) -> int:
        return self.params.line(self.sizes)

    @property
    def lines(self) -> int:
        return self.sizes.rows.span(self.params.rows)

    @property
    def line_pixels(self) -> int:
        """Return the pixels of a row that are copied."""
        return self.sizes.columns.span(self.params.columns)

    @property
    def image_piece(self) -> int:
        """Return the elements of a pixel that one cp.async copies."""
        return math.gcd(PIECE, self.slab, self.convolution.channels)

    def place(self, column: Any) -> Any:
        """Return where in a row a pixel lies: those of equal remainder by the stride lie together, as a window's neighbours need them."""
        stride = self.sizes.columns.stride
        return column if stride == 1 else column % stride * (self.line // stride) + column // stride

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
        return (row * (self.sizes.rows.stride * self.line) + column) * (self.pitch // WORD)

    # ---- the reduction

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
        at: int = row * self.sizes.rows.dilation * self.line + self.place(column * self.sizes.columns.dilation)
        return (at * self.pitch + channel) // WORD

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

    # ---- weights

    @property
    def steps(self) -> int:
        return self.sizes.steps

    @property
    def step_pairs(self) -> int:
        """Return how many mma.syncs one after the other multiply all terms."""
        return -(-self.steps // 2)

    @property
    def weight_pitch(self) -> int:
        return odd_pieces(self.params.block_n)

    def weight_source(self, term: Any, filters: Any) -> Any:
        """Return where the weights of a term begin at a filter."""
        _, channel, column, row = self.convolution.weight_strides
        channels, taps = self.sizes.channels, self.sizes.columns.taps
        return term // (channels * taps) * row + term // channels % taps * column + term % channels * channel + filters

    # ---- results

    @property
    def out_piece(self) -> int:
        """Return the results that a lane stores at once."""
        return VECTOR_BYTES // dtype_bytes(self.sizes.out_dtype)

    @property
    def staging_pitch(self) -> int:
        return self.params.staging_pitch(self.sizes)

    def result(self, pixel: tuple[Any, Any, Any], filters: Any) -> Sequence[Any]:
        """Return the index of a result whose pixel may lie beyond the image: that of the last one."""
        image, row, column = pixel
        rows, columns = self.sizes.rows.results, self.sizes.columns.results
        at_row = row if rows % self.params.rows == 0 else T.min(row, rows - 1)
        return (image, at_row, column if columns % self.params.columns == 0 else T.min(column, columns - 1), filters)
