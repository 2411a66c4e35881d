"""Owns what a consumer warpgroup multiplies with: its registers, wgmma's operands in a stage, the stage's return to producers.

Knows nothing of the order in which k-tiles are multiplied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MMA_TILE_ROWS
from kerneldecl.analysis.tensor_cores import K_BYTES
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
    partials: Any = None
    """Registers for products of k-tiles that are to be scaled, one set or two."""
    first_partial: int = 0
    """The first register of the set that wgmma writes."""
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
def release(consumer, stage):
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
def issue_mma(consumer, stage, mma_tiles, is_first):
    """Start the MMAs of a stage for some of a consumer's MMA tiles, given as a range."""
    kernel, acc = T.meta_var((consumer.kernel, consumer.acc if consumer.partials is None else consumer.partials))
    b = T.meta_var(consumer.descriptors[1])
    instructions = T.meta_var(kernel.params.n_instructions(kernel.dtype))
    count = T.meta_var(kernel.params.block_n // instructions // 2 // kernel.accum.per_register)
    for k in T.unroll(K_TILE_BYTES // K_BYTES):
        for number in T.unroll(len(mma_tiles)):
            s = T.meta_var(mma_tiles[0] + number)
            for part in T.unroll(instructions):
                T.ptx[kernel.mma](
                    *[acc[consumer.first_partial + (s * instructions + part) * count + i] for i in range(count)],
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
def fence(acc, begin, end):
    """Keep accumulators from being read earlier than here."""
    for i in T.unroll(end - begin):
        T.cuda.func_call("tvm_wgmma_fence_operand", acc[begin + i], source_code=FENCE_SOURCE)
