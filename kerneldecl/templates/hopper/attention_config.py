"""Owns the sizes of one attention kernel on wgmma: tensor maps, descriptors, tiles and their order, instructions.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kerneldecl.analysis.attention import CHUNK, ITEM_BYTES, MMA_K, WgmmaAttentionParams, chunks
from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MMA_TILE_ROWS, SWIZZLE_ROWS
from kerneldecl.analysis.tensor_cores import PTX_TYPES
from kerneldecl.templates.hopper.operands import DESCRIPTOR_UNIT, SWIZZLES, TensorMap
from kerneldecl.templates.shared.fused_attention import FusedAttention

ROW_UNITS = K_TILE_BYTES // DESCRIPTOR_UNIT
"""A row of a chunk in the units of wgmma's descriptors."""


@dataclass(frozen=True)
class AttentionKernel(FusedAttention):
    """One kernel: persistent CTAs take tiles of queries, and go through the blocks of keys from the last that these see to the first."""

    params: WgmmaAttentionParams
    sm_count: int

    @property
    def qk_chunks(self) -> int:
        return chunks(self.spec.head_dim)

    @property
    def v_chunks(self) -> int:
        return chunks(self.spec.value_dim)

    @property
    def q_bytes(self) -> int:
        """Return the bytes of a consumer's rows of queries in shared memory."""
        return self.qk_chunks * MMA_TILE_ROWS * CHUNK * ITEM_BYTES

    @property
    def q_elements(self) -> int:
        """Return the elements of the place of a consumer's rows of queries, where its results go as well."""
        return max(self.qk_chunks, self.v_chunks) * MMA_TILE_ROWS * CHUNK

    @property
    def k_elements(self) -> int:
        return self.qk_chunks * self.params.block_n * CHUNK

    @property
    def v_elements(self) -> int:
        return self.v_chunks * self.params.block_n * CHUNK

    @property
    def shares_heads(self) -> bool:
        """Say whether CTAs of a cluster have different heads; else they have different rows."""
        return self.spec.group % self.params.cluster == 0

    @property
    def grid(self) -> tuple[int, int]:
        """Return how many clusters' tiles there are along rows and heads."""
        cluster = self.params.cluster
        if self.shares_heads:
            return self.row_tiles, self.all_heads // cluster
        return -(-self.row_tiles // cluster), self.all_heads

    @property
    def tiles(self) -> int:
        """Return how many clusters' tiles there are."""
        return math.prod(self.grid)

    @property
    def clusters(self) -> int:
        return min(self.tiles, self.sm_count * self.params.ctas_per_sm // self.params.cluster)

    @property
    def waves(self) -> int:
        return -(-self.tiles // self.clusters)

    @property
    def heads_together(self) -> int:
        """Return how many of the grid's heads are computed before others."""
        together = self.params.heads_together // self.params.cluster if self.shares_heads else self.params.heads_together
        return max(1, min(together, self.grid[1]))

    @property
    def box_rows(self) -> int:
        """Return the rows of a block of keys or values that a CTA loads, for all CTAs of its cluster."""
        return self.params.block_n // self.params.cluster

    @property
    def stored_blocks(self) -> int:
        """Return how many blocks of 16 columns a consumer stores: whole chunks where queries do not fill the place of results."""
        return self.v_chunks * (CHUNK // 16) if self.v_chunks > self.qk_chunks else -(-self.spec.value_dim // 16)

    # ---- instructions

    @property
    def score_mma(self) -> str:
        kind = PTX_TYPES[self.spec.dtype]
        return f"wgmma.mma_async.sync.aligned.m64n{self.params.block_n}k{MMA_K}.f32.{kind}.{kind}"

    @property
    def value_mma(self) -> str:
        kind = PTX_TYPES[self.spec.dtype]
        return f"wgmma.mma_async.sync.aligned.m64n{self.spec.value_dim}k{MMA_K}.f32.{kind}.{kind}"

    @property
    def score_steps(self) -> int:
        """Return how many wgmmas multiply rows of queries and keys."""
        return -(-self.spec.head_dim // MMA_K)

    @property
    def value_steps(self) -> int:
        return self.params.block_n // MMA_K

    @property
    def rows_descriptor(self) -> tuple[int, int, int]:
        """Return leading and stride offset and swizzle of Q and K, whose reduction is contiguous."""
        return 1, SWIZZLE_ROWS * ROW_UNITS, SWIZZLES[K_TILE_BYTES]

    @property
    def values_descriptor(self) -> tuple[int, int, int]:
        """Return those of V, whose rows are reduced: chunks of columns follow each other."""
        return self.params.block_n * ROW_UNITS, SWIZZLE_ROWS * ROW_UNITS, SWIZZLES[K_TILE_BYTES]

    def q_offset(self, step: int) -> int:
        """Return where a step of the reduction begins in a consumer's rows of queries, in units of descriptors."""
        return step * MMA_K // CHUNK * MMA_TILE_ROWS * ROW_UNITS + step * MMA_K % CHUNK * ITEM_BYTES // DESCRIPTOR_UNIT

    def k_offset(self, step: int) -> int:
        return step * MMA_K // CHUNK * self.params.block_n * ROW_UNITS + step * MMA_K % CHUNK * ITEM_BYTES // DESCRIPTOR_UNIT

    def v_offset(self, step: int) -> int:
        return step * MMA_K * ROW_UNITS

    # ---- memory

    def map(self, name: str, rows: int, columns: int, box_rows: int) -> TensorMap:
        """Return the tensor map of an argument: boxes of so many rows of one chunk."""
        buffer = self.argument(name)
        heads = int(buffer.shape[1 if self.spec.layout == "bhsd" else 2])
        along_row, along_head = (columns, rows * columns) if self.spec.layout == "bhsd" else (heads * columns, columns)
        strides = tuple(stride * ITEM_BYTES for stride in (along_row, along_head, heads * rows * columns))
        return TensorMap(
            buffer=buffer,
            dtype=self.spec.dtype,
            dims=(columns, rows, heads, self.spec.batch),
            strides_bytes=strides,
            box=(CHUNK, box_rows, 1, 1),
            swizzle=SWIZZLES[K_TILE_BYTES],
        )

    @property
    def maps(self) -> tuple[TensorMap, TensorMap, TensorMap, TensorMap]:
        """Return the tensor maps of Q, K, V and O."""
        spec = self.spec
        q, k, v = ("QKV",) * 3 if spec.layout == "packed" else "QKV"
        return (
            self.map(q, spec.queries, spec.head_dim, MMA_TILE_ROWS),
            self.map(k, spec.keys, spec.head_dim, self.box_rows),
            self.map(v, spec.keys, spec.value_dim, self.box_rows),
            self.map("O", spec.queries, spec.value_dim, MMA_TILE_ROWS),
        )
