"""Owns the sizes of a kernel on wgmma that reads windows out of shared memory: what is where, and which bits of it are a window's.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm.script import tirx as T

from kerneldecl.model import Value
from kerneldecl.templates.hopper.conv_tiles import Boxes
from kerneldecl.templates.hopper.epilogue import Results
from kerneldecl.templates.hopper.kernel_config import PTX_DTYPES, SM_BYTES, SYSTEM_BYTES
from kerneldecl.templates.hopper.operands import SWIZZLES, TensorMap
from kerneldecl.templates.hopper.params import BUFFER_BYTES, RESERVED_BYTES, SLAB, WARPGROUP
from kerneldecl.templates.hopper.read_conv import Convolution

ITEM_BYTES = 2
STEP = 16
"""Terms of the reduction that one wgmma adds up."""
STEP_PAIRS = STEP // 2
MOST_HELD = 10
"""Steps whose fragments a thread holds at once, in four registers each; fewer where many blocks share an SM's registers."""
SM_REGISTERS = 64 * 1024
OTHER_REGISTERS = 48
"""Of a thread, beside sums and fragments."""
PIECE = 8
"""Filters that a thread copies at once."""
TMA_ALIGN_BYTES = 128
ALIGNED = 8
"""Elements that TMA copies from and to multiples of."""
LOW, HIGH = 0x0000FFFF, 0xFFFF0000
ALL = LOW | HIGH


class Tiles(NamedTuple):
    """The template's parameters, as read; names as `_wgmma_tiles.Tiles` has them."""

    tile_w: int
    mma_tiles: int
    block_n: int
    stages: int
    blocks: int

    @classmethod
    def of(cls, params: Mapping[str, Value]) -> Tiles:
        return cls(**{name: params[name] for name in cls._fields})  # type: ignore[arg-type]

    @property
    def tile_h(self) -> int:
        return self.mma_tiles * SLAB // self.tile_w


class OneSlab(NamedTuple):
    """What is stored at once, as `store` wants to know it."""

    block_n: int
    mma_tiles: int = 1

    @property
    def sums(self) -> int:
        return self.block_n // 2


@dataclass(frozen=True)
class Kernel:
    """One kernel: the reduction goes over rows of windows, in pairs of neighbours in memory; rows of odd length end with half a pair."""

    convolution: Convolution
    boxes: Boxes
    results: Results
    parameters: Tiles
    sms: int

    @property
    def dtype(self) -> str:
        return str(self.convolution.image.dtype)

    @property
    def tiles(self) -> OneSlab:
        return OneSlab(self.parameters.block_n)

    @property
    def packing(self) -> int:
        return 1

    def as_sums(self, registers: Any) -> Any:
        return registers

    @property
    def step(self) -> int:
        """Return how many elements lie between a window and the one right of it."""
        return self.convolution.columns.stride * self.convolution.channels

    @property
    def shift(self) -> int:
        """Return how many elements into a stage the first window begins: TMA copies from multiples of 16 bytes on."""
        return -self.convolution.columns.padding * self.convolution.channels % ALIGNED

    @property
    def lead(self) -> int:
        """Return 1 where every window begins amid a pair, and so takes the element before it, too."""
        return self.shift % 2 if self.step % 2 == 0 else 0

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
    def steps(self) -> int:
        return -(-self.pairs // STEP_PAIRS)

    @property
    def pitch(self) -> int:
        """Return the elements of a row of a stage. Where every other window begins amid a pair, lanes load one pair more."""
        last = self.shift - self.lead + (self.parameters.tile_w - 1) * self.step
        return -(-(last + 2 * (self.line_pairs + self.step % 2)) // ALIGNED) * ALIGNED

    @property
    def lines(self) -> int:
        """Return the rows of a stage."""
        rows = self.convolution.rows
        return (self.parameters.tile_h - 1) * rows.stride + (rows.taps - 1) * rows.dilation + 1

    @property
    def copied_bytes(self) -> int:
        return self.lines * self.pitch * ITEM_BYTES

    @property
    def stage_words(self) -> int:
        """Return the distance of stages, in units of 4 bytes."""
        return -(-self.copied_bytes // TMA_ALIGN_BYTES) * TMA_ALIGN_BYTES // 4

    @property
    def columns(self) -> int:
        """Return into how many tiles the filters are cut."""
        return -(-self.convolution.filters // self.parameters.block_n)

    @property
    def rows(self) -> int:
        """Return how many blocks share the boxes of pixels of one tile of filters."""
        return min(self.boxes.count, max(1, self.parameters.blocks * self.sms // self.columns))

    @property
    def weight_slabs(self) -> int:
        return -(-self.parameters.block_n // SLAB)

    @property
    def pieces(self) -> int:
        return self.weight_slabs * self.steps * STEP * SLAB // PIECE

    def weights_in_a_row(self) -> Any:
        """Return the weights' memory as one row of elements; within the kernel alone."""
        weights = self.convolution.weights
        return T.decl_buffer((math.prod(int(extent) for extent in weights.shape),), self.dtype, data=weights.data)

    @property
    def chunk_sums(self) -> int:
        """Return how many sums of a thread leave at once, where results go through shared memory."""
        return self.results.chunk_elements // WARPGROUP

    @property
    def addend_sets(self) -> int:
        """Return for how many chunks threads hold what the epilogue adds."""
        return 1

    @property
    def held(self) -> int:
        """Return of how many steps a thread holds fragments at once."""
        registers = SM_REGISTERS // (self.parameters.blocks * WARPGROUP) // 8 * 8
        return max(1, min(MOST_HELD, self.steps, (registers - self.parameters.block_n // 2 - OTHER_REGISTERS) // 4))

    @property
    def buffers(self) -> int:
        """Return how many chunks of results are in shared memory on their way out: two where they have room."""
        if not self.results.is_staged:
            return 0
        free = SM_BYTES // self.parameters.blocks - SYSTEM_BYTES - self._kept_bytes
        return 2 if self.results.chunks(self.parameters.block_n // 2) % 2 == 0 and free >= 2 * BUFFER_BYTES else 1

    @property
    def _kept_bytes(self) -> int:
        weights = self.weight_slabs * self.steps * STEP * SLAB * ITEM_BYTES
        return weights + self.parameters.stages * self.stage_words * 4 + RESERVED_BYTES

    @property
    def smem_bytes(self) -> int:
        return self._kept_bytes + self.buffers * BUFFER_BYTES

    @property
    def map(self) -> TensorMap:
        image = self.convolution.image
        images, height, width, channels = (int(extent) for extent in image.shape)
        pitch = width * channels * ITEM_BYTES
        dims = (width * channels, height, images)
        return TensorMap(image, self.dtype, dims, (pitch, height * pitch), (self.pitch, self.lines, 1), 0)

    def corner(self, tile: Any) -> tuple[Any, ...]:
        """Return where the part of the image that a tile looks at begins."""
        image, y, x = self.boxes.pixel(tile * self.boxes.pixels)
        rows, columns = self.convolution.rows, self.convolution.columns
        first = -columns.padding * self.convolution.channels - self.shift
        return (x * self.step + first, y * rows.stride - rows.padding, image)

    def pair_word(self, pair: int) -> int:
        """Return where a pair of a window's elements lies behind the window's first, in units of 4 bytes."""
        line, at = divmod(min(pair, self.pairs - 1), self.line_pairs)
        return line * self.convolution.rows.dilation * self.pitch // 2 + at

    def pair_mask(self, pair: int) -> int:
        """Return which bits of a pair are the window's: what lies beside it may be no number, which no weight of zero would undo."""
        if pair >= self.pairs:
            return 0
        at = pair % self.line_pairs
        low = LOW if at or not self.lead else 0
        return low | (HIGH if 2 * at + 1 < self.lead + self.line else 0)

    def word(self, slab: Any, half: int, first: int, lanes: tuple[Any, Any]) -> Any:
        """Return where in a stage a lane finds its pair of a window's four that `first` begins, or the one that its pair begins in."""
        warp, lane = lanes
        g, t = lane // 4, lane % 4
        unit = (slab * 4 + warp) * 16
        y, x = unit // self.parameters.tile_w, unit % self.parameters.tile_w + half * 8
        word = y * (self.convolution.rows.stride * self.pitch // 2) + x // 2 * self.step + t + self.pair_word(first)
        word += (self.shift + g * self.step) // 2
        for at in range(1, 4):
            jump = self.pair_word(first + at) - self.pair_word(first + at - 1) - 1
            word += T.Select(t >= at, jump, 0) if jump else 0
        return word

    def pair(self, image: Any, stage: Any, slab: Any, half: int, first: int, lanes: tuple[Any, Any]) -> Any:
        """Return a lane's pair of a window's four that `first` begins."""
        word, lane = self.word(slab, half, first, lanes), lanes[1]
        value = image[stage, word]
        if self.step % 2:
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
        kind = PTX_DTYPES[self.dtype]
        return f"wgmma.mma_async.sync.aligned.m64n{self.parameters.block_n}k16.f32.{kind}.{kind}"

    @property
    def descriptor(self) -> tuple[int, int, int]:
        """Return how wgmma finds weights whose filters lie side by side: slabs of 64 follow each other, rows come in groups of eight."""
        return self.steps * STEP * SLAB * ITEM_BYTES // 16, 64, SWIZZLES[128]
