"""Owns the mainloop of a consumer: wgmma over the stages of a tile's k-tiles, each given back to producers when the next one is multiplied.

Where the epilogue takes long, the last k-tiles are multiplied for one MMA tile after the other: the first one's epilogue is computed
while tensor cores are busy with the second.

Knows nothing of how operands come to shared memory or what becomes of accumulators.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MMA_TILE_ROWS
from kerneldecl.analysis.packed_weights import LANE_WORDS, TILE_ROWS, TILE_WORDS
from kerneldecl.analysis.tensor_cores import K_BYTES
from kerneldecl.compiler.intrinsics.int4_fragments import dequantise_source
from kerneldecl.templates.hopper.kernel_config import A_FRAGMENT, GemmKernel

FENCE_SOURCE = """
__device__ __forceinline__ void tvm_wgmma_fence_operand(float& x) { asm volatile("" : "+f"(x) :: "memory"); }
__device__ __forceinline__ void tvm_wgmma_fence_operand(uint32_t& x) { asm volatile("" : "+r"(x) :: "memory"); }
"""
"""Keeps nvcc from reading accumulators before wgmma has written them."""


class CtaRank(NamedTuple):
    """A CTA's place in its cluster: along m, along n, and which part of k it has with split-K."""

    m: Any
    n: Any
    split: Any


class Consumer(NamedTuple):
    """What a consumer warpgroup multiplies with, while a kernel's script is read."""

    kernel: GemmKernel
    acc: Any
    descriptors: tuple[Any, Any]
    """wgmma's descriptors of the first stage of A and of B."""
    state: Any
    """Which stage comes next, and its phase."""
    barriers: Any
    """`full` and `empty`, one of each for every stage, and `order` between consumers."""
    index: Any
    """Index of the warpgroup among the consumers."""
    lane: Any
    rank: CtaRank
    fragments: Any
    """Registers for a k-tile of A; None where wgmma reads it in shared memory."""
    warp: Any
    """Warp of the warpgroup."""
    part: int = 0
    """Part of the k-tile to multiply."""
    first_fragment: int = 0
    """The first of the registers that hold that part of A."""

    @property
    def first_mma_tile(self) -> Any:
        """Return the first of its MMA tiles among the CTA's."""
        return 0 if self.kernel.params.is_pingpong else self.index * self.kernel.params.mma_tiles

    @property
    def first_row(self) -> Any:
        """Return the first of its rows among the CTA's."""
        return 0 if self.kernel.params.is_pingpong else self.index * (self.kernel.params.mma_tiles * MMA_TILE_ROWS)

    def a_operand(self, stage: Any, mma_tile: Any, k: Any) -> list[Any]:
        """Return wgmma's operand A: a descriptor of its place in a stage, or registers."""
        if self.fragments is not None:
            first = self.first_fragment + (mma_tile * (K_TILE_BYTES // K_BYTES) + k) * A_FRAGMENT
            return [self.fragments[first + q] for q in range(A_FRAGMENT)]
        a = self.kernel.a
        place = stage * (a.stage_bytes // 16) + (self.first_mma_tile + mma_tile) * a.mma_tile_offset + k * a.k_offset
        return [self.descriptors[0] + T.cast(place, "uint64")]

    def a_element(self, mma_tile: Any, k: Any, q: int) -> Any:
        """Return where in a stage a register of operand A comes from: k first, in boxes of 32 rows, in the 128-byte swizzle."""
        box = (self.first_mma_tile + mma_tile) * 2 + self.warp // 2
        row, line = self.warp % 2 * 16 + q % 2 * 8 + self.lane // 4, self.lane % 4 + q // 2 * 4
        chunk = T.bitwise_xor(row // 4, line)
        return (box * 32 + k * 8 + line) * 32 + chunk * 4 + row % 4

    def stage_before(self, k_tiles: int) -> Any:
        """Return the stage so many k-tiles before the next one."""
        stage = self.state.stage
        return T.Select(stage >= k_tiles, stage - k_tiles, stage + (self.kernel.params.stages - k_tiles))


@T.inline
def _release(consumer, stage):
    """Have a warp signal all CTAs that write to this one's stages that it has read one."""
    params = T.meta_var(consumer.kernel.params)
    lane, empty = T.meta_var((consumer.lane, consumer.barriers.empty))
    count = T.meta_var(params.cluster_m * params.cluster_n)
    if count == 1:
        if lane == 0:
            empty.arrive(stage)
    elif count == 2:
        if lane < 2:
            empty.arrive(stage, remote=lane)
    elif (lane < count) & ((lane % params.cluster_m == consumer.rank.m) | (lane // params.cluster_m == consumer.rank.n)):
        empty.arrive(stage, remote=lane)


@T.inline
def _issue_mma(consumer, stage, mma_tiles, is_first):
    """Start the MMAs of a stage for some of a consumer's MMA tiles, given as a range."""
    kernel, acc = T.meta_var((consumer.kernel, consumer.acc))
    b = T.meta_var(consumer.descriptors[1])
    instructions = T.meta_var(kernel.params.n_instructions(kernel.dtype))
    count = T.meta_var(kernel.params.block_n // instructions // 2 // kernel.accum.per_register)
    for k in T.unroll(K_TILE_BYTES // K_BYTES):
        for number in T.unroll(len(mma_tiles)):
            s = T.meta_var(mma_tiles[0] + number)
            for part in T.unroll(instructions):
                T.ptx[kernel.mma](
                    *[acc[(s * instructions + part) * count + i] for i in range(count)],
                    *consumer.a_operand(stage, s, k),
                    b
                    + T.cast(
                        stage * (kernel.b.stage_bytes // 16)
                        + kernel.b.row_offset(kernel.mma_n) * part
                        + k * kernel.b.k_offset
                        + kernel.b.row_offset(consumer.part * kernel.params.block_n),
                        "uint64",
                    ),
                    T.Or(T.Not(is_first), k > 0),
                    *kernel.mma_flags,
                )


@T.inline
def _fence(acc, begin, end):
    """Keep accumulators from being read earlier than here."""
    for i in T.unroll(end - begin):
        T.cuda.func_call("tvm_wgmma_fence_operand", acc[begin + i], source_code=FENCE_SOURCE)


@T.inline
def _tail(consumer):
    """Multiply the last k-tiles for the first MMA tile, then for the second."""
    kernel, state, full = T.meta_var((consumer.kernel, consumer.state, consumer.barriers.full))
    mma_tiles, tail = T.meta_var((range(kernel.params.mma_tiles), kernel.tail_k_tiles))
    for _ in T.unroll(tail):
        full.wait(state.stage, state.phase)
        T.ptx.wgmma.fence.sync.aligned()
        _issue_mma(consumer, state.stage, mma_tiles[:1], tirx.const(False, "bool"))
        state.advance()
    T.ptx.wgmma.commit_group.sync.aligned()
    T.ptx.wgmma.wait_group.sync.aligned(1)
    _release(consumer, consumer.stage_before(tail + 1))
    for s in T.unroll(tail):
        _issue_mma(consumer, consumer.stage_before(tail - s), mma_tiles[1:], tirx.const(False, "bool"))
    T.ptx.wgmma.commit_group.sync.aligned()


@T.inline
def _load_a(consumer):
    """Load a stage's rows of A to registers."""
    kernel = T.meta_var(consumer.kernel)
    for s in T.unroll(kernel.params.mma_tiles):
        for k in T.unroll(K_TILE_BYTES // K_BYTES):
            for q in T.unroll(A_FRAGMENT):
                consumer.fragments[(s * (K_TILE_BYTES // K_BYTES) + k) * A_FRAGMENT + q] = T.reinterpret(
                    "uint32", consumer.barriers.a[consumer.state.stage, consumer.a_element(s, k, q)]
                )


@T.inline
def _run_from_registers(consumer, k_tiles):
    """Multiply k-tiles whose A comes from registers, one after the other: another consumer multiplies while this one loads."""
    kernel, state, barriers = T.meta_var((consumer.kernel, consumer.state, consumer.barriers))
    mma_tiles = T.meta_var(range(kernel.params.mma_tiles))
    for i in T.serial(k_tiles):
        barriers.full.wait(state.stage, state.phase)
        _load_a(consumer)
        T.ptx.wgmma.fence.sync.aligned()
        _issue_mma(consumer, state.stage, mma_tiles, i == 0)
        T.ptx.wgmma.commit_group.sync.aligned()
        if kernel.params.is_staggered:
            if (consumer.index == 0) & (i == kernel.params.stagger_k_tiles) & (consumer.lane == 0):
                barriers.order.arrive(1)
        T.ptx.wgmma.wait_group.sync.aligned(0)
        _release(consumer, state.stage)
        state.advance()


@T.inline
def _dequantise(consumer):
    """Dequantise a part of a stage's rows of A to registers."""
    kernel, stage, barriers = T.meta_var((consumer.kernel, consumer.state.stage, consumer.barriers))
    block_m = T.meta_var(kernel.params.block_m)
    # Rows have a scale for all parts, one for each, or several.
    scales = T.meta_var(kernel.scales.stage_rows // block_m)
    first_scale = T.meta_var(consumer.part * scales // kernel.k_parts * block_m)
    name, source = T.meta_var(
        dequantise_source(kernel.dtype, max(1, scales // kernel.k_parts), block_m, has_zeros=kernel.zeros is not None),
    )
    for s in T.unroll(kernel.params.mma_tiles):
        row = T.meta_var((consumer.first_mma_tile + s) * MMA_TILE_ROWS + consumer.warp * TILE_ROWS)
        tile = T.meta_var(consumer.part * (block_m // TILE_ROWS) + row // TILE_ROWS)
        registers = T.meta_var(consumer.fragments.ptr_to([consumer.first_fragment + s * (K_TILE_BYTES // K_BYTES) * A_FRAGMENT]))
        values = T.meta_var(barriers.a.ptr_to([stage, tile * TILE_WORDS + consumer.lane * LANE_WORDS]))
        scale = T.meta_var(barriers.scales.ptr_to([stage, first_scale + row + consumer.lane // 4]))
        if kernel.zeros is None:
            T.cuda.func_call(name, registers, values, scale, source_code=source)
        else:
            zero = T.meta_var(barriers.zeros.ptr_to([stage, first_scale + row + consumer.lane // 4]))
            T.cuda.func_call(name, registers, values, scale, zero, source_code=source)


@T.inline
def _multiply_dequantised(consumer, is_first):
    """Dequantise a part of a k-tile while the one before is multiplied, start its MMAs, and wait for those of the one before."""
    _dequantise(consumer)
    T.ptx.wgmma.fence.sync.aligned()
    _issue_mma(consumer, consumer.state.stage, range(consumer.kernel.params.mma_tiles), is_first)
    T.ptx.wgmma.commit_group.sync.aligned()
    T.ptx.wgmma.wait_group.sync.aligned(1)


@T.inline
def _start_k_tile(consumer, is_first):
    """Wait for a k-tile, multiply its first part, and give the stage before back."""
    state = T.meta_var(consumer.state)
    consumer.barriers.full.wait(state.stage, state.phase)
    _multiply_dequantised(consumer, is_first)
    if T.Not(is_first):
        _release(consumer, consumer.stage_before(1))


@T.inline
def _run_dequantised(consumer, k_tiles):
    """Multiply k-tiles whose A is dequantised, in turns from two sets of registers: MMAs read one while the other is written."""
    no = T.meta_var(tirx.const(False, "bool"))
    second = T.meta_var(consumer._replace(first_fragment=consumer.kernel.a_fragments // 2))
    if consumer.kernel.k_parts == 2:
        for i in T.serial(k_tiles):
            _start_k_tile(consumer, i == 0)
            _multiply_dequantised(second._replace(part=1), no)
            consumer.state.advance()
    else:
        for pair in T.serial(k_tiles // 2):
            _start_k_tile(consumer, pair == 0)
            consumer.state.advance()
            _start_k_tile(second, no)
            consumer.state.advance()
        if k_tiles % 2 == 1:
            _start_k_tile(consumer, tirx.const(k_tiles == 1, "bool"))
            consumer.state.advance()


@T.inline
def _run_from_smem(consumer, k_tiles):
    kernel, state, barriers = T.meta_var((consumer.kernel, consumer.state, consumer.barriers))
    mma_tiles, tail = T.meta_var((range(kernel.params.mma_tiles), kernel.tail_k_tiles))
    for i in T.serial(k_tiles - tail):
        barriers.full.wait(state.stage, state.phase)
        T.ptx.wgmma.fence.sync.aligned()
        _issue_mma(consumer, state.stage, mma_tiles, i == 0)
        T.ptx.wgmma.commit_group.sync.aligned()
        if kernel.params.is_staggered:
            if (consumer.index == 0) & (i == kernel.params.stagger_k_tiles) & (consumer.lane == 0):
                barriers.order.arrive(1)
        if i > 0:
            T.ptx.wgmma.wait_group.sync.aligned(1)
            _release(consumer, consumer.stage_before(1))
        state.advance()
    if tail > 0:
        _tail(consumer)


@T.inline
def run_mainloop(consumer, k_tiles):
    """Multiply so many k-tiles of a tile; the last MMAs may still be under way then, and the last stages not given back."""
    kernel, barriers = T.meta_var((consumer.kernel, consumer.barriers))
    if kernel.is_quantised:
        _run_dequantised(consumer, k_tiles)
    elif kernel.a.in_registers:
        _run_from_registers(consumer, k_tiles)
    else:
        _run_from_smem(consumer, k_tiles)
    if kernel.params.is_pingpong:
        if consumer.lane == 0:
            barriers.order.arrive(1 - consumer.index)


@T.inline
def finish_first_mma_tile(consumer):
    """Wait for the accumulators of the first of two MMA tiles."""
    T.ptx.wgmma.wait_group.sync.aligned(1)
    _fence(consumer.acc, 0, consumer.kernel.accum.registers // 2)


@T.inline
def finish_mainloop(consumer):
    """Wait for a tile's accumulators, or for those of its second MMA tile, and give the last stages back."""
    kernel = T.meta_var(consumer.kernel)
    k_tiles = T.meta_var(max(1, kernel.tail_k_tiles))
    if kernel.is_quantised or not kernel.a.in_registers:
        T.ptx.wgmma.wait_group.sync.aligned(0)
        for s in T.unroll(k_tiles):
            _release(consumer, consumer.stage_before(k_tiles - s))
    _fence(consumer.acc, kernel.accum.registers // 2 if kernel.tail_k_tiles > 0 else 0, kernel.accum.registers)
