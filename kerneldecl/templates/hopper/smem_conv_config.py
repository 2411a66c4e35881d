"""Owns the sizes of an implicit GEMM on wgmma whose A fragments come from an image in shared memory: what is where, which bits count.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import (
    EPILOGUE_BUFFER_BYTES,
    MMA_TILE_ROWS,
    RESERVED_SMEM_BYTES,
    SM_REGISTERS,
    SM_SMEM_BYTES,
    SMEM_BOX_ALIGN_BYTES,
    SYSTEM_SMEM_BYTES,
    WARPGROUP_THREADS,
)
from kerneldecl.analysis.params import WindowParams
from kerneldecl.analysis.tensor_cores import PTX_TYPES
from kerneldecl.templates.hopper.accumulators import AccumulatorLayout
from kerneldecl.templates.hopper.conv_tiles import PixelBoxes
from kerneldecl.templates.hopper.epilogue import Epilogue
from kerneldecl.templates.hopper.kernel_config import EpiloguePlan
from kerneldecl.templates.hopper.operands import DESCRIPTOR_UNIT, SWIZZLES, TensorMap
from kerneldecl.templates.hopper.read_conv import Convolution

ITEM_BYTES = 2
MMA_K = 16
"""Terms of the reduction that one wgmma accumulates: a k-tile here."""
MMA_K_PAIRS = MMA_K // 2
MAX_HELD_K_TILES = 10
"""K-tiles whose A fragments a thread holds at once, in four registers each; fewer where many CTAs share an SM's registers."""
OTHER_REGISTERS = 48
"""Registers of a thread besides accumulators and fragments."""
PIECE = 8
"""Filters that a thread copies at once."""
TMA_ALIGN_ITEMS = 8
"""Elements at multiples of which TMA copies begin: 16 bytes."""
LOW, HIGH = 0x0000FFFF, 0xFFFF0000
ALL = LOW | HIGH


@dataclass(frozen=True)
class SmemConvKernel:
    """One kernel: the reduction goes over rows of windows, in pairs of contiguous elements; rows of odd length end with half a pair."""

    convolution: Convolution
    boxes: PixelBoxes
    epilogue: Epilogue
    params: WindowParams
    sm_count: int

    @property
    def dtype(self) -> str:
        return str(self.convolution.image.dtype)

    @property
    def window_stride(self) -> int:
        """Return the distance from a window to the one right of it, in elements."""
        return self.convolution.columns.stride * self.convolution.channels

    @property
    def shift(self) -> int:
        """Return how many elements into a stage the first window begins: TMA copies from multiples of 16 bytes on."""
        return -self.convolution.columns.padding * self.convolution.channels % TMA_ALIGN_ITEMS

    @property
    def lead(self) -> int:
        """Return 1 where every window begins amid a pair, and so takes the element before it, too."""
        return self.shift % 2 if self.window_stride % 2 == 0 else 0

    @property
    def line(self) -> int:
        """Return the elements of a window's row."""
        return self.convolution.columns.taps * self.convolution.channels

    @property
    def line_pairs(self) -> int:
        return -(-(self.lead + self.line) // 2)

    @property
    def pairs(self) -> int:
        return self.convolution.rows.taps * self.line_pairs

    @property
    def k_tiles(self) -> int:
        return -(-self.pairs // MMA_K_PAIRS)

    @property
    def pitch(self) -> int:
        """Return the elements of a row of a stage. Where every other window begins amid a pair, lanes load one pair more."""
        last = self.shift - self.lead + (self.params.tile_w - 1) * self.window_stride
        return -(-(last + 2 * (self.line_pairs + self.window_stride % 2)) // TMA_ALIGN_ITEMS) * TMA_ALIGN_ITEMS

    @property
    def lines(self) -> int:
        """Return the rows of a stage."""
        rows = self.convolution.rows
        return (self.params.tile_h - 1) * rows.stride + (rows.taps - 1) * rows.dilation + 1

    @property
    def copied_bytes(self) -> int:
        return self.lines * self.pitch * ITEM_BYTES

    @property
    def stage_words(self) -> int:
        """Return the distance of stages, in units of 4 bytes."""
        return -(-self.copied_bytes // SMEM_BOX_ALIGN_BYTES) * SMEM_BOX_ALIGN_BYTES // 4

    @property
    def columns(self) -> int:
        """Return into how many tiles the filters are cut."""
        return -(-self.convolution.filters // self.params.block_n)

    @property
    def rows(self) -> int:
        """Return how many CTAs share the boxes of pixels of one tile of filters."""
        return min(self.boxes.count, max(1, self.params.blocks * self.sm_count // self.columns))

    @property
    def weight_tiles(self) -> int:
        return -(-self.params.block_n // MMA_TILE_ROWS)

    @property
    def pieces(self) -> int:
        return self.weight_tiles * self.k_tiles * MMA_K * MMA_TILE_ROWS // PIECE

    def flat_weights(self) -> Any:
        """Return the weights' memory as one row of elements; within the kernel alone."""
        weights = self.convolution.weights
        return T.decl_buffer((math.prod(int(extent) for extent in weights.shape),), self.dtype, data=weights.data)

    @property
    def accum(self) -> AccumulatorLayout:
        """Return the accumulators of one MMA tile, whose results are stored before the next one is multiplied."""
        return AccumulatorLayout(self.convolution.accum_dtype, self.params.block_n)

    @property
    def epilogue_plan(self) -> EpiloguePlan:
        return EpiloguePlan(self.epilogue, self.accum, self.epilogue_buffers, aux_buffers=1)

    @property
    def held_k_tiles(self) -> int:
        """Return of how many k-tiles a thread holds fragments at once."""
        registers = SM_REGISTERS // (self.params.blocks * WARPGROUP_THREADS) // 8 * 8
        return max(1, min(MAX_HELD_K_TILES, self.k_tiles, (registers - self.accum.count - OTHER_REGISTERS) // 4))

    @property
    def epilogue_buffers(self) -> int:
        """Return how many chunks of results are in shared memory before they are stored: two where they have room."""
        if not self.epilogue.via_smem:
            return 0
        free = SM_SMEM_BYTES // self.params.blocks - SYSTEM_SMEM_BYTES - self._kept_bytes
        return 2 if self.epilogue.chunks(self.accum.count) % 2 == 0 and free >= 2 * EPILOGUE_BUFFER_BYTES else 1

    @property
    def _kept_bytes(self) -> int:
        weights = self.weight_tiles * self.k_tiles * MMA_K * MMA_TILE_ROWS * ITEM_BYTES
        return weights + self.params.stages * self.stage_words * 4 + RESERVED_SMEM_BYTES

    @property
    def smem_bytes(self) -> int:
        return self._kept_bytes + self.epilogue_buffers * EPILOGUE_BUFFER_BYTES

    @property
    def map(self) -> TensorMap:
        image = self.convolution.image
        images, height, width, channels = (int(extent) for extent in image.shape)
        pitch = width * channels * ITEM_BYTES
        dims = (width * channels, height, images)
        return TensorMap(
            buffer=image,
            dtype=self.dtype,
            dims=dims,
            strides_bytes=(pitch, height * pitch),
            box=(self.pitch, self.lines, 1),
            swizzle=0,
        )

    def corner(self, tile: Any) -> tuple[Any, ...]:
        """Return where the part of the image under a tile's windows begins."""
        image, y, x = self.boxes.pixel(tile * self.boxes.pixels)
        rows, columns = self.convolution.rows, self.convolution.columns
        first = -columns.padding * self.convolution.channels - self.shift
        return (x * self.window_stride + first, y * rows.stride - rows.padding, image)

    def pair_word(self, pair: int) -> int:
        """Return the offset of a pair of a window's elements from the window's first, in units of 4 bytes."""
        line, at = divmod(min(pair, self.pairs - 1), self.line_pairs)
        return line * self.convolution.rows.dilation * self.pitch // 2 + at

    def pair_mask(self, pair: int) -> int:
        """Return which bits of a pair are the window's: what is beside it may be NaN, which a weight of zero would not cancel."""
        if pair >= self.pairs:
            return 0
        at = pair % self.line_pairs
        low = LOW if at or not self.lead else 0
        return low | (HIGH if 2 * at + 1 < self.lead + self.line else 0)

    def word(self, mma_tile: Any, half: int, first: int, lanes: tuple[Any, Any]) -> Any:
        """Return where in a stage a lane finds its pair of a window's four that `first` begins, or the one that its pair begins in."""
        warp, lane = lanes
        g, t = lane // 4, lane % 4
        unit = (mma_tile * 4 + warp) * 16
        y, x = unit // self.params.tile_w, unit % self.params.tile_w + half * 8
        word = y * (self.convolution.rows.stride * self.pitch // 2) + x // 2 * self.window_stride + t + self.pair_word(first)
        word += (self.shift + g * self.window_stride) // 2
        for at in range(1, 4):
            jump = self.pair_word(first + at) - self.pair_word(first + at - 1) - 1
            word += T.Select(t >= at, jump, 0) if jump else 0
        return word

    def pair(self, image: Any, tile: tuple[Any, Any], half: int, first: int, lanes: tuple[Any, Any]) -> Any:
        """Return a lane's pair of a window's four that `first` begins; `tile` is the stage and the MMA tile."""
        stage, mma_tile = tile
        word, lane = self.word(mma_tile, half, first, lanes), lanes[1]
        value = image[stage, word]
        if self.window_stride % 2:
            both = T.bitwise_or(T.shift_right(value, T.uint32(16)), T.shift_left(image[stage, word + 1], T.uint32(16)))
            value = T.Select((self.shift + lane // 4) % 2 == 1, both, value)
        masks = [self.pair_mask(first + at) for at in range(4)]
        if set(masks) == {ALL}:
            return value
        mask = T.uint32(masks[0])
        for at in range(1, 4):
            mask = T.Select(lane % 4 >= at, T.uint32(masks[at]), mask) if masks[at] != masks[at - 1] else mask
        return T.bitwise_and(value, mask)

    @property
    def mma(self) -> str:
        kind = PTX_TYPES[self.dtype]
        return f"wgmma.mma_async.sync.aligned.m64n{self.params.block_n}k16.f32.{kind}.{kind}"

    @property
    def descriptor(self) -> tuple[int, int, int]:
        """Return wgmma's descriptor of weights, whose filters are contiguous: blocks of 64 follow each other, rows come in eights."""
        return self.k_tiles * MMA_K * MMA_TILE_ROWS * ITEM_BYTES // DESCRIPTOR_UNIT, 64, SWIZZLES[128]
