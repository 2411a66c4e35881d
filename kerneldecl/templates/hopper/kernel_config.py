"""Owns the sizes of one kernel on wgmma: how many clusters, blocks, threads, registers and bytes, and which instructions fit them.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import Results
from kerneldecl.templates.hopper.gather import Source
from kerneldecl.templates.hopper.operands import Operand
from kerneldecl.templates.hopper.pack import Packing
from kerneldecl.templates.hopper.params import BUFFER_BYTES, REGISTERS, RESERVED_BYTES, WARPGROUP, Tiles, sums_a_register

SM_BYTES = 228 * 1024
SYSTEM_BYTES = 1024
"""Of shared memory in each block."""
AHEAD_BYTES = 32 * 1024
"""That the blocks of an SM ask for together before the kernel in front has ended. Of 17 products on an H200 none lost more than 0.5 % by
it, one of 1024 gained 2.5 %; with 128 KB most were slower than with nothing, since loads wait behind what was asked for."""
LATE_STEPS = 3
"""Their products keep the tensor cores busy about as long as gelu takes on half of a tile."""
MAX_REGISTERS, OTHER_REGISTERS = 255, 40
"""Of a thread, and of it those that hold neither sums nor what is added to them, about."""
SM_REGISTERS = 65536
OWN_REGISTERS = 48
"""Of a thread beside its sums, where an SM has several blocks."""
PTX_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "s8", "tfloat32": "tf32"}
PTX_SUMS = {"float16": "f16", "float32": "f32", "int32": "s32"}


@dataclass(frozen=True)
class Kernel:
    """One kernel: sizes in rows and columns of wgmma, whatever they are of the product."""

    params: tuple[Any, ...]
    dtype: str
    """Of the operands."""
    accum_dtype: str
    rows: Operand
    columns: Operand
    results: Results
    tiles: Tiles
    grid: tuple[int, int, int]
    """Batch, tiles along rows, tiles along columns."""
    steps: int
    """Stages' worth of reduction."""
    sms: int
    packings: tuple[Packing, ...] = ()
    """Copies of operands that are made before."""

    @property
    def is_early(self) -> bool:
        """Say whether the kernel may start before the one in front has ended, and so waits for it itself."""
        return bool(self.tiles.pdl or self.packings)

    @property
    def ahead_steps(self) -> int:
        """Return how many steps of its tile a block asks for before the kernel in front has ended.

        Where blocks have one tile each, which begins and ends while DRAM has little to do, and TMA brings both operands as they are.
        """
        if not self.tiles.pdl or self.tiles.stream_k > 0 or self.packings or self.is_gathered or self.clusters < self.total:
            return 0
        share_bytes = self.rows.stage_bytes // self.tiles.cluster_n + self.columns.stage_bytes // self.tiles.cluster_m
        return min(self.part_steps, self.tiles.stages, AHEAD_BYTES // (self.resident * share_bytes))

    @property
    def registers_dtype(self) -> str:
        """Return how TVM holds what wgmma adds to: sums in float32, others as the bits they are."""
        return "float32" if self.accum_dtype == "float32" else "uint32"

    @property
    def packing(self) -> int:
        """Return how many sums share a register."""
        return sums_a_register(self.accum_dtype)

    @property
    def registers(self) -> int:
        """Return how many registers of a thread hold its sums."""
        return self.tiles.sums // self.packing

    @property
    def total_dtype(self) -> str:
        """Return what the parts of a sum are added in: float32 at least."""
        return "float32" if self.accum_dtype == "float16" else self.accum_dtype

    def as_sums(self, registers: Any) -> Any:
        """Return a local buffer of registers as one of sums."""
        if self.accum_dtype == self.registers_dtype:
            return registers
        count = registers.shape[0] * self.packing
        return T.decl_buffer((count,), self.accum_dtype, data=registers.data, scope="local")

    @property
    def stage_bytes(self) -> int:
        return self.rows.stage_bytes + self.columns.stage_bytes

    @property
    def blocks(self) -> tuple[int, int]:
        """Return how many clusters' tiles there are along rows and columns."""
        return -(-self.grid[1] // self.tiles.cluster_m), -(-self.grid[2] // self.tiles.cluster_n)

    @property
    def total(self) -> int:
        return self.grid[0] * self.blocks[0] * self.blocks[1]

    @property
    def clusters(self) -> int:
        """Return how many clusters are launched: one for each tile where the reduction is split, else as many as run at once."""
        if self.tiles.split_k > 1:
            return self.total
        at_once = self.resident * self.sms // self.tiles.cluster
        if self.tiles.stream_k == 0 and self.total <= at_once:
            return self.total
        # Clusters of four leave SMs idle, since the SMs that can make one up come in groups of 16 or 18.
        return max(1, at_once - (at_once // 11 if self.tiles.cluster > 2 else 0))

    @property
    def whole(self) -> int:
        """Return how many tiles each have one cluster: all of them, or the waves before those whose steps are dealt evenly."""
        if self.tiles.stream_k == 0:
            return self.total
        return max(0, self.total // self.clusters - (self.tiles.stream_k - 1)) * self.clusters

    @property
    def is_dealt(self) -> bool:
        """Say whether there are waves to deal: a last one that is not full, and the one before it where two are asked for."""
        return self.total % self.clusters > 0 and self.total // self.clusters >= self.tiles.stream_k - 1

    @property
    def shared_steps(self) -> int:
        """Return the steps of all tiles that are dealt evenly."""
        return (self.total - self.whole) * self.steps

    @property
    def share(self) -> int:
        """Return the steps that each cluster has of those; the last share may be smaller, and shares may be left over."""
        return -(-self.shared_steps // self.clusters)

    @property
    def resident(self) -> int:
        """Return how many blocks an SM has at once, as far as shared memory and registers tell; a block more only waits."""
        if self.tiles.consumers > 1:
            return 1
        used = self.tiles.stages * self.stage_bytes + self.buffers * BUFFER_BYTES + RESERVED_BYTES
        registers = self.tiles.threads * (OWN_REGISTERS + self.registers)
        return max(1, min(SM_BYTES // (used + SYSTEM_BYTES), SM_REGISTERS // registers))

    @property
    def is_gathered(self) -> bool:
        return self.rows.gather is not None or self.columns.gather is not None

    @property
    def copied_bytes(self) -> int:
        """Return what TMA brings of a stage."""
        return sum(operand.stage_bytes for operand in (self.rows, self.columns) if operand.gather is None)

    @property
    def fillers(self) -> int:
        """Return how many threads say that a stage is full."""
        copied = self.rows.gather is None or self.columns.gather is None
        return (WARPGROUP if self.is_gathered else 0) + int(copied)

    @property
    def sources(self) -> list[Any]:
        """Return the operands as one row of elements each, where they are gathered."""
        return [None if operand.gather is None else Source(operand) for operand in (self.rows, self.columns)]

    @property
    def mma_k(self) -> int:
        return 32 // self.rows.item_bytes

    @property
    def mma(self) -> str:
        kind = PTX_DTYPES[self.dtype]
        return f"wgmma.mma_async.sync.aligned.m64n{self.mma_n}k{self.mma_k}.{PTX_SUMS[self.accum_dtype]}.{kind}.{kind}"

    @property
    def mma_n(self) -> int:
        return self.tiles.block_n // self.tiles.parts_n(self.dtype)

    @property
    def mma_flags(self) -> tuple[int, ...]:
        """Return wgmma's immediates: no negation, and for 16 bits whether operands are transposed."""
        if self.dtype == "int8":
            return ()
        return (1, 1, int(not self.rows.is_k_last), int(not self.columns.is_k_last)) if self.dtype.endswith("16") else (1, 1)

    @property
    def part_steps(self) -> int:
        """Return the steps of each part of the reduction; the last part's may lie beyond it, where there are zeros."""
        return -(-self.steps // self.tiles.split_k)

    @property
    def sent_at_once(self) -> int:
        """Return how many registers of sums go to another block in one store: 16 bytes where they make whole ones."""
        return math.gcd(4, self.registers // self.tiles.split_k)

    @property
    def send(self) -> str:
        vector = f".v{self.sent_at_once}" if self.sent_at_once > 1 else ""
        return f"st.shared::cluster{vector}.{self.word}"

    @property
    def word(self) -> str:
        """Return how PTX calls a sum's bits."""
        return "f32" if self.registers_dtype == "float32" else "u32"

    @property
    def buffers(self) -> int:
        """Return how many chunks of results each consumer has in shared memory."""
        if not self.results.is_staged or self.tiles.split_k > 1:
            return 0
        return self.tiles.buffers(self.results.chunks(self.tiles.sums), self.stage_bytes, self.accum_dtype)

    @property
    def chunk_sums(self) -> int:
        """Return how many sums of a thread leave at once, where results go through shared memory."""
        return self.results.chunk_elements // WARPGROUP

    @property
    def addend_sets(self) -> int:
        """Return for how many chunks threads hold what the epilogue adds: two where registers allow, so that nobody waits for it."""
        held = self.results.addend_registers(self.chunk_sums)
        fits = self.registers + 2 * held + OTHER_REGISTERS <= (REGISTERS[self.tiles.consumers][1] or MAX_REGISTERS)
        return 2 if held and fits and self.buffers > 0 else 1

    @property
    def late_steps(self) -> int:
        """Return how many last steps of a tile are multiplied slab by slab, so that results are computed meanwhile: where they take long.

        Halves of a slab's columns do not do: nvcc keeps sums apart for each shape of wgmma, which takes twice the registers.
        """
        tiles = self.tiles
        is_apart = tiles.is_pingpong or tiles.split_k > 1 or tiles.stream_k > 0
        if tiles.mma_tiles < 2 or is_apart or not self.buffers or self.steps < 2 * tiles.stages or not self.results.takes_long:
            return 0
        return min(LATE_STEPS, tiles.stages - 1)
