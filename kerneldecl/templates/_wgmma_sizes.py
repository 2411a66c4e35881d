"""Owns the sizes of one kernel on wgmma: how many clusters, blocks, threads, registers and bytes, and which instructions fit them.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from kerneldecl.templates._wgmma_gather import Source
from kerneldecl.templates._wgmma_operands import Operand
from kerneldecl.templates._wgmma_results import Results
from kerneldecl.templates._wgmma_tiles import BUFFER_BYTES, RESERVED_BYTES, WARPGROUP, Tiles

SM_BYTES = 228 * 1024
SYSTEM_BYTES = 1024
"""Of shared memory in each block."""
SM_THREADS = 512
"""With 128 registers each."""
PTX_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "s8"}


@dataclass(frozen=True)
class Kernel:
    """One kernel: sizes in rows and columns of wgmma, whatever they are of the product."""

    params: tuple[Any, ...]
    dtype: str
    """Of the operands."""
    rows: Operand
    columns: Operand
    results: Results
    tiles: Tiles
    grid: tuple[int, int, int]
    """Batch, tiles along rows, tiles along columns."""
    steps: int
    """Stages' worth of reduction."""
    sms: int

    @property
    def sums_dtype(self) -> str:
        """Return how TVM holds what wgmma adds to: signed sums as the bits they are."""
        return "uint32" if self.dtype == "int8" else "float32"

    def sum(self, bits: Any) -> Any:
        """Return the value of a sum."""
        return T.cast(bits, "int32") if self.dtype == "int8" else bits

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
        if self.tiles.split > 1:
            return self.total
        at_once = self.resident * self.sms // self.tiles.cluster
        # Clusters of four leave SMs idle, since the SMs that can make one up come in groups of 16 or 18.
        return max(1, min(self.total, at_once - at_once // 11 if self.tiles.cluster > 2 else at_once))

    @property
    def resident(self) -> int:
        """Return how many blocks an SM has at once, as far as shared memory and threads tell; a block more only waits."""
        used = self.tiles.stages * self.stage_bytes + self.buffers * self.tiles.consumers * BUFFER_BYTES + RESERVED_BYTES
        return max(1, min(SM_BYTES // (used + SYSTEM_BYTES), SM_THREADS // self.tiles.threads)) if self.tiles.consumers == 1 else 1

    @property
    def has_more_rows(self) -> bool:
        """Say whether the rows' operand is the larger one."""
        return self.grid[1] * self.tiles.block_m >= self.grid[2] * self.tiles.block_n

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
        return 16 if self.dtype.endswith("16") else 32

    @property
    def mma(self) -> str:
        kind, sums = PTX_DTYPES[self.dtype], "s32" if self.dtype == "int8" else "f32"
        return f"wgmma.mma_async.sync.aligned.m64n{self.mma_n}k{self.mma_k}.{sums}.{kind}.{kind}"

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
        return -(-self.steps // self.tiles.split)

    @property
    def sent_at_once(self) -> int:
        """Return how many sums go to another block in one store: 16 bytes where they make whole ones."""
        return math.gcd(4, self.tiles.sums // self.tiles.split)

    @property
    def send(self) -> str:
        vector = f".v{self.sent_at_once}" if self.sent_at_once > 1 else ""
        return f"st.shared::cluster{vector}.{'u32' if self.dtype == 'int8' else 'f32'}"

    @property
    def buffers(self) -> int:
        """Return how many chunks of results each consumer has in shared memory."""
        if not self.results.is_staged or self.tiles.split > 1:
            return 0
        return self.tiles.buffers(self.results.chunks(self.tiles.sums), self.stage_bytes)
