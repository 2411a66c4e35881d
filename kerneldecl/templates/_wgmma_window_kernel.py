"""Owns the TIRx kernel of convolutions whose windows are read out of shared memory: fragments by lanes, weights by wgmma itself.

Knows nothing of how its parameters are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import PipelineState, TMABar
from tvm.script import tirx as T

from kerneldecl.model import Value
from kerneldecl.templates._wgmma_boxes import Boxes
from kerneldecl.templates._wgmma_copies import ENCODE, LOAD
from kerneldecl.templates._wgmma_image import Convolution
from kerneldecl.templates._wgmma_kernel import FENCE_SOURCE, store
from kerneldecl.templates._wgmma_operands import SWIZZLES, TensorMap
from kerneldecl.templates._wgmma_results import Results, each
from kerneldecl.templates._wgmma_sizes import PTX_DTYPES, SM_BYTES, SYSTEM_BYTES
from kerneldecl.templates._wgmma_tiles import BUFFER_BYTES, RESERVED_BYTES, SLAB, WARPGROUP

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
    slabs: int
    block_n: int
    stages: int
    blocks: int

    @classmethod
    def of(cls, params: Mapping[str, Value]) -> Tiles:
        return cls(**{name: params[name] for name in cls._fields})  # type: ignore[arg-type]

    @property
    def tile_h(self) -> int:
        return self.slabs * SLAB // self.tile_w


class OneSlab(NamedTuple):
    """What is stored at once, as `store` wants to know it."""

    block_n: int
    slabs: int = 1


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


def take(kernel: Kernel, image: Any, fragments: Any, stage: Any, slab: Any, steps: range, lanes: tuple[Any, Any]) -> None:
    """Have a lane load its elements of a slab's windows, for some steps of the reduction."""
    for at, step in enumerate(steps):
        for q in range(4):
            T.buffer_store(fragments, kernel.pair(image, stage, slab, q % 2, step * STEP_PAIRS + q // 2 * 4, lanes), [at * 4 + q])


@T.inline
def _fetch(kernel, image_map, image, full, stage, tile):
    """Have one thread start the copies of a tile's part of the image."""
    full.arrive(stage, kernel.copied_bytes)
    T.ptx[LOAD.format(3, "")](image.ptr_to([stage, 0]), T.address_of(image_map), *kernel.corner(tile), full.ptr_to([stage]))


@T.inline
def _keep_weights(kernel, weights, source, column, thread):
    """Have a block copy the weights of its filters, as wgmma wants them; zeros where there are none."""
    convolution = T.meta_var(kernel.convolution)
    _, channel_stride, column_stride, row_stride = each(convolution.weight_strides)
    rows = T.meta_var(kernel.steps * STEP)
    line = T.meta_var(2 * kernel.line_pairs)
    for turn in T.unroll(-(-kernel.pieces // WARPGROUP)):
        piece = T.meta_var(turn * WARPGROUP + thread)
        slab = T.meta_var(piece // (rows * (SLAB // PIECE)))
        row = T.meta_var(piece // (SLAB // PIECE) % rows)
        part = T.meta_var(piece % (SLAB // PIECE))
        at = T.meta_var(row % line)
        tap = T.meta_var((at - kernel.lead) // convolution.channels)
        channel = T.meta_var((at - kernel.lead) % convolution.channels)
        first = T.meta_var(column * kernel.parameters.block_n + slab * SLAB + part * PIECE)
        place = T.meta_var(T.bitwise_xor(part, row % 8) * PIECE)
        if kernel.pieces % WARPGROUP == 0 or piece < kernel.pieces:
            is_term = T.meta_var(T.And(row < convolution.rows.taps * line, T.And(at >= kernel.lead, at < kernel.lead + kernel.line)))
            if T.And(is_term, first < convolution.filters):
                start = T.meta_var(row // line * row_stride + tap * column_stride + channel * channel_stride + first)
                for v in T.vectorized(PIECE):
                    weights[slab, row, place + v] = source[start + v]
            else:
                for v in T.vectorized(PIECE):
                    weights[slab, row, place + v] = T.cast(0, kernel.dtype)


@T.meta_class
class Slab:
    """A slab of results: its sums, and where its windows are."""

    def __init__(self, kernel: Kernel, acc: Any, fragments: Any, image: Any, lanes: tuple[Any, Any]) -> None:
        self.kernel, self.acc, self.fragments, self.image, self.lanes = kernel, acc, fragments, image, lanes

    @T.inline
    def multiply(self, descriptor, stage, slab, first):
        """Add up the products from a step of the reduction on; as many steps at once as a thread has registers for."""
        steps = T.meta_var(range(first, min(first + self.kernel.held, self.kernel.steps)))
        take(self.kernel, self.image, self.fragments, stage, slab, steps, self.lanes)
        for i in T.unroll(len(steps) * 4):
            T.cuda.func_call("tvm_wgmma_fence_operand", self.fragments[i], source_code=FENCE_SOURCE)
        T.ptx.wgmma.fence.sync.aligned()
        for at in T.unroll(len(steps)):
            T.ptx[self.kernel.mma](
                *[self.acc[i] for i in range(self.kernel.parameters.block_n // 2)],
                *[self.fragments[at * 4 + q] for q in range(4)],
                descriptor + T.cast((first + at) * (STEP * SLAB * ITEM_BYTES // 16), "uint64"),
                T.Not(first + at == 0),
                1,
                1,
                1,
            )
        T.ptx.wgmma.commit_group.sync.aligned()
        T.ptx.wgmma.wait_group.sync.aligned(0)
        if first + self.kernel.held < self.kernel.steps:
            self.multiply(descriptor, stage, slab, first + self.kernel.held)
        else:
            for i in T.unroll(self.kernel.parameters.block_n // 2):
                T.cuda.func_call("tvm_wgmma_fence_operand", self.acc[i], source_code=FENCE_SOURCE)


def build(kernel: Kernel) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, on the convolution's parameters."""
    convolution, tiles, results = kernel.convolution, kernel.parameters, kernel.results
    maps_store = results.map is not None and kernel.buffers > 0

    @T.prim_func(check_well_formed=False)
    def main():
        image_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, image_map, kernel.dtype, *kernel.map.args)
        store_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        if maps_store:
            T.call_packed(ENCODE, store_map, results.dtype, *results.map.args)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": tiles.blocks})
        T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([kernel.rows * kernel.columns])
        warp = T.warp_id([4])
        lane = T.lane_id([32])
        pool = T.SMEMPool()
        weights = pool.alloc((kernel.weight_slabs, kernel.steps * STEP, SLAB), kernel.dtype, align=1024)
        image = pool.alloc((tiles.stages, kernel.stage_words), "uint32", align=TMA_ALIGN_BYTES)
        staging_shape = T.meta_var((1, kernel.buffers, results.chunk_elements))
        staging = T.meta_var(pool.alloc(staging_shape, results.dtype, align=1024) if kernel.buffers > 0 else None)
        full = TMABar(pool, tiles.stages)
        pool.commit()
        full.init(1)
        T.ptx.fence.mbarrier_init.release.cluster()
        T.cuda.cta_sync()
        # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()

        thread = T.meta_var(warp * 32 + lane)
        column = T.meta_var(block % kernel.columns)
        tile: T.int32 = block // kernel.columns
        if thread == 0:
            for s in T.unroll(tiles.stages - 1):
                if tile + s * kernel.rows < kernel.boxes.count:
                    _fetch(kernel, image_map, image, full, s, tile + s * kernel.rows)
        source = T.meta_var(kernel.weights_in_a_row())
        _keep_weights(kernel, weights, source, column, thread)
        T.ptx.fence.proxy.async_.shared__cta()
        acc = T.alloc_local((tiles.block_n // 2,), "float32")
        fragments = T.alloc_local((kernel.held * 4,), "uint32")
        packed = T.alloc_local((4,), "uint32")
        descriptor = T.uint64(0)
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(descriptor), weights.ptr_to([0, 0, 0]), *kernel.descriptor)
        state = PipelineState(tiles.stages, 0)
        results_of = T.meta_var(Slab(kernel, acc, fragments, image, (warp, lane)))
        while tile < kernel.boxes.count:
            # All have left the stage that the one before this took.
            T.cuda.cta_sync()
            if thread == 0:
                ahead = T.meta_var(tile + (tiles.stages - 1) * kernel.rows)
                if ahead < kernel.boxes.count:
                    _fetch(kernel, image_map, image, full, (state.stage + (tiles.stages - 1)) % tiles.stages, ahead)
            full.wait(state.stage, state.phase)
            for slab in T.unroll(tiles.slabs):
                results_of.multiply(descriptor, state.stage, slab, 0)
                row = T.meta_var(tile * kernel.boxes.pixels + slab * SLAB)
                store(kernel, acc, packed, staging, store_map, (0, row, column * tiles.block_n, 0), (warp, lane))
            state.advance()
            tile = tile + kernel.rows
        if maps_store:
            if thread == 0:
                T.ptx.cp.async_.bulk.wait_group(0)

    func = tirx.PrimFunc(list(convolution.params), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
