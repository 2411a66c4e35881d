"""Owns the parameters of the kernels of convolutions in groups: tiles, the shared memory and the registers that they take, what fits.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import MIN_ASYNC_COPY_BYTES, VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.grouped_conv import ITEM_BYTES, N_TILE, GroupedConvSizes
from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.model import Candidate, Gpu, dtype_bytes

PIECE = VECTOR_BYTES // ITEM_BYTES
"""Elements of 16 bytes, for mma.sync."""
HELD_WEIGHTS = 80
"""Registers of weights that a thread holds at most; beyond that, it loads them from shared memory for each pixel."""
MAX_ACCUMULATORS = 128
"""Accumulators of a thread at most."""
MAX_SIMT_REGISTERS = 160
"""Registers of a thread for sums, pixels and weights at most, on CUDA cores."""


@dataclass(frozen=True)
class ConvTile:
    """What a thread block computes, and the shared memory that it takes of image and weights."""

    sizes: GroupedConvSizes
    rows: int
    """Rows and columns of a rectangle of output pixels."""
    columns: int
    block_n: int
    """Output channels: those of whole groups, or a part of one group's."""

    @functools.cached_property
    def blocks(self) -> int:
        """Return how many thread blocks there are."""
        return self.sizes.images * self.row_tiles * self.column_tiles * self.channel_tiles

    @functools.cached_property
    def row_tiles(self) -> int:
        return -(-self.sizes.rows.results // self.rows)

    @functools.cached_property
    def column_tiles(self) -> int:
        return -(-self.sizes.columns.results // self.columns)

    @functools.cached_property
    def channel_tiles(self) -> int:
        return self.sizes.groups * self.sizes.filters // self.block_n

    @functools.cached_property
    def groups(self) -> int:
        """Return of how many groups a thread block reads channels."""
        return max(1, self.block_n // self.sizes.filters)

    @functools.cached_property
    def slab(self) -> int:
        """Return the input channels of a thread block."""
        return self.groups * self.sizes.channels

    @functools.cached_property
    def pitch(self) -> int:
        """Return the elements from a pixel to the next: an odd number of 16 bytes, so that neighbours are in different banks."""
        return odd_pieces(self.slab, self.sizes.item_bytes)

    @functools.cached_property
    def line(self) -> int:
        """Return the pixels of a row in shared memory, where those of equal remainder by the stride lie together."""
        stride = self.sizes.columns.stride
        return -(-self.line_pixels // stride) * stride

    @functools.cached_property
    def line_pixels(self) -> int:
        """Return the pixels of a row that are copied."""
        return self.sizes.columns.span(self.columns)

    @functools.cached_property
    def lines(self) -> int:
        return self.sizes.rows.span(self.rows)

    @functools.cached_property
    def image_piece(self) -> int:
        """Return the elements of a pixel that one copy takes."""
        return math.gcd(VECTOR_BYTES // self.sizes.item_bytes, self.slab, self.sizes.groups * self.sizes.channels)

    @functools.cached_property
    def weight_piece(self) -> int:
        """Return the filters of a term that one copy takes."""
        return math.gcd(VECTOR_BYTES // self.sizes.item_bytes, self.block_n, self.sizes.groups * self.sizes.filters)

    @functools.cached_property
    def weight_pitch(self) -> int:
        return odd_pieces(self.block_n, self.sizes.item_bytes)

    @functools.cached_property
    def image_elements(self) -> int:
        return self.lines * self.line * self.pitch

    @functools.cached_property
    def smem_bytes(self) -> int:
        """Return the shared memory of the image's part and of the weights."""
        return (self.image_elements + self.sizes.terms * self.weight_pitch) * self.sizes.item_bytes

    @functools.cached_property
    def copied_bytes(self) -> int:
        """Return the bytes that a thread block copies."""
        return (self.lines * self.line_pixels * self.slab + self.sizes.terms * self.block_n) * self.sizes.item_bytes

    @functools.cached_property
    def fits(self) -> bool:
        """Say whether thread blocks have whole groups or equal parts of one, and copies are of 4 bytes at least."""
        return (
            min(self.rows, self.columns, self.block_n) > 0
            and (self.block_n % self.sizes.filters == 0 or self.sizes.filters % self.block_n == 0)
            and self.sizes.groups * self.sizes.filters % self.block_n == 0
            and self.rows <= self.sizes.rows.results
            and self.columns <= self.sizes.columns.results
            and min(self.image_piece, self.weight_piece) * self.sizes.item_bytes >= MIN_ASYNC_COPY_BYTES
        )


@functools.lru_cache(4096)
def _tile(sizes: GroupedConvSizes, rows: int, columns: int, block_n: int) -> ConvTile:
    return ConvTile(sizes, rows, columns, block_n)


class GroupedConvParams(NamedTuple):
    """The parameters of `gpu_grouped_conv2d`."""

    rows: int
    """Rows and columns of a thread block's rectangle of output pixels."""
    columns: int
    block_n: int
    """Output channels of a thread block: those of whole groups, or a part of one group's."""
    warps_m: int
    """Warps along the pixels, and along the channels, of the block."""
    warps_n: int
    fragments: int
    """Fragments of 16 pixels that a warp multiplies at once."""

    @property
    def threads(self) -> int:
        return self.warps_m * self.warps_n * WARP_LANES

    @property
    def warp_tiles(self) -> int:
        """Return the tiles of 8 output channels of a warp."""
        return self.block_n // (N_TILE * self.warps_n)

    def tile(self, sizes: GroupedConvSizes) -> ConvTile:
        return _tile(sizes, self.rows, self.columns, self.block_n)

    def pixel_fragments(self) -> int:
        """Return the fragments of 16 pixels of a thread block."""
        return -(-self.rows * self.columns // FRAGMENT)

    def phases(self, sizes: GroupedConvSizes) -> int:
        """Return of how many groups a tile of 8 output channels has some at most: each is multiplied by itself."""
        return max(-(-N_TILE // sizes.filters), 1 if sizes.filters % N_TILE == 0 or N_TILE % sizes.filters == 0 else 2)

    def holds_weights(self, sizes: GroupedConvSizes) -> bool:
        """Say whether a thread keeps all its weights in registers."""
        return self.warp_tiles * (sizes.steps + sizes.steps % 2) <= HELD_WEIGHTS

    def accumulators(self, sizes: GroupedConvSizes) -> int:
        return self.fragments * self.warp_tiles * self.phases(sizes) * 4

    def staging_pitch(self, sizes: GroupedConvSizes) -> int:
        """Return the elements from a row of a warp's results to the next."""
        return self.warp_tiles * N_TILE + VECTOR_BYTES // dtype_bytes(sizes.out_dtype)

    def smem_bytes(self, sizes: GroupedConvSizes) -> int:
        """Return a thread block's shared memory: its part of the image, its weights, and a fragment of results for each warp."""
        staging = self.warps_m * self.warps_n * FRAGMENT * self.staging_pitch(sizes) * dtype_bytes(sizes.out_dtype)
        return self.tile(sizes).smem_bytes + staging

    def fits(self, sizes: GroupedConvSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        if min(self) < 1 or self.threads > gpu.max_threads_per_block or self.block_n % (N_TILE * self.warps_n):
            return False
        filters, warp_n = sizes.filters, self.warp_tiles * N_TILE
        # Warps have the same tiles of different groups, or tiles of one group.
        is_alike = warp_n % math.lcm(filters, N_TILE) == 0 or filters % warp_n == 0
        return (
            is_alike
            and self.tile(sizes).fits
            and self.accumulators(sizes) <= MAX_ACCUMULATORS
            and self.smem_bytes(sizes) <= gpu.smem_per_block_optin_bytes
        )

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_grouped_conv2d", self._asdict())


class GroupedConvSimtParams(NamedTuple):
    """The parameters of `gpu_grouped_conv2d_simt`."""

    rows: int
    """Rows and columns of a thread block's rectangle of output pixels."""
    columns: int
    block_n: int
    """Output channels of a thread block: those of whole groups, or a part of one group's."""
    strip: int
    """Neighbouring output pixels of a row that a thread computes together."""
    width: int
    """Neighbouring output channels of a thread: of one group, or of as many depthwise ones."""
    threads: int

    def tile(self, sizes: GroupedConvSizes) -> ConvTile:
        return _tile(sizes, self.rows, self.columns, self.block_n)

    @property
    def vectors(self) -> int:
        """Return how many threads the output channels of a pixel take."""
        return self.block_n // self.width

    @property
    def strips(self) -> int:
        return self.rows * -(-self.columns // self.strip)

    @property
    def turns(self) -> int:
        """Return how many strips a thread computes, one after the other."""
        return -(-self.strips * self.vectors // self.threads)

    def depth(self, sizes: GroupedConvSizes) -> int:
        """Return the input channels of a pixel that a thread loads at once."""
        return self.width if sizes.is_depthwise else math.gcd(sizes.channels, VECTOR_BYTES // sizes.item_bytes)

    def registers(self, sizes: GroupedConvSizes) -> int:
        """Return the registers of a thread's sums, its pixels of one row and one term's weights."""
        pixels = sizes.columns.span(self.strip) if sizes.columns.stride <= sizes.columns.taps else self.strip * sizes.columns.taps
        return self.strip * self.width + (pixels + 1) * self.depth(sizes) + self.width

    def fits(self, sizes: GroupedConvSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        if min(self) < 1 or self.threads > gpu.max_threads_per_block or self.block_n % self.width:
            return False
        widest = VECTOR_BYTES // max(sizes.item_bytes, dtype_bytes(sizes.out_dtype))
        return (
            (sizes.is_depthwise or sizes.filters % self.width == 0)
            and widest % self.width == 0
            and self.threads % WARP_LANES == 0
            and self.strip <= self.columns
            and self.tile(sizes).fits
            and self.registers(sizes) <= MAX_SIMT_REGISTERS
            and self.tile(sizes).smem_bytes <= gpu.smem_per_block_optin_bytes
        )

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_grouped_conv2d_simt", self._asdict())


def odd_pieces(elements: int, item_bytes: int) -> int:
    """Return so many elements, or a few more: an odd number of 16 bytes."""
    piece = VECTOR_BYTES // item_bytes
    return (-(-elements // piece) | 1) * piece
