"""Owns the sizes of one attention kernel on wgmma: tensor maps, descriptors, tiles and their order, instructions.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kerneldecl.analysis.attention import CHUNK, FLOAT8, ITEM_BYTES, MMA_K, WgmmaAttentionParams, chunks
from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MMA_TILE_ROWS, SWIZZLE_ROWS
from kerneldecl.analysis.tensor_cores import PTX_TYPES
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.hopper.operands import DESCRIPTOR_UNIT, SWIZZLES, TensorMap, io_dtype
from kerneldecl.templates.shared.fused_attention import FusedAttention, narrow

ROW_UNITS = K_TILE_BYTES // DESCRIPTOR_UNIT
"""A row of a chunk in the units of wgmma's descriptors."""


@dataclass(frozen=True)
class AttentionKernel(FusedAttention):
    """One kernel: persistent CTAs take tiles of queries, and go through the blocks of keys from the last that these see to the first."""

    params: WgmmaAttentionParams
    sm_count: int

    @property
    def is_float8(self) -> bool:
        return self.spec.dtype == FLOAT8

    @property
    def item_bytes(self) -> int:
        return dtype_bytes(self.spec.dtype)

    @property
    def chunk_columns(self) -> int:
        """Return how many elements of a row of Q or K a chunk has."""
        return K_TILE_BYTES // self.item_bytes

    @property
    def qk_chunks(self) -> int:
        return chunks(self.spec.head_dim, self.item_bytes)

    @property
    def v_chunks(self) -> int:
        """Return the chunks of a block of values: of columns, or of keys where values are transposed."""
        return chunks(self.params.block_n, self.item_bytes) if self.is_float8 else self.o_chunks

    @property
    def v_rows(self) -> int:
        """Return the rows of a chunk of values: keys, or columns where values are transposed."""
        return self.spec.value_dim if self.is_float8 else self.params.block_n

    @property
    def o_chunks(self) -> int:
        return chunks(self.spec.value_dim)

    @property
    def q_bytes(self) -> int:
        """Return the bytes of a consumer's rows of queries in shared memory."""
        return self.qk_chunks * MMA_TILE_ROWS * CHUNK * ITEM_BYTES

    @property
    def q_elements(self) -> int:
        """Return the elements of 16 bits of the place of a consumer's rows of queries, where its results go as well."""
        return max(self.qk_chunks, self.o_chunks) * MMA_TILE_ROWS * CHUNK

    @property
    def k_elements(self) -> int:
        return self.qk_chunks * self.params.block_n * CHUNK

    @property
    def v_elements(self) -> int:
        return self.v_chunks * self.v_rows * CHUNK

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
        return self.o_chunks * (CHUNK // 16) if self.o_chunks > self.qk_chunks else -(-self.spec.value_dim // 16)

    # ---- instructions

    @property
    def mma_k(self) -> int:
        """Return how many elements of the reduction one wgmma multiplies: 32 bytes of them."""
        return MMA_K * ITEM_BYTES // self.item_bytes

    @property
    def score_mma(self) -> str:
        kind = PTX_TYPES[self.spec.dtype]
        return f"wgmma.mma_async.sync.aligned.m64n{self.params.block_n}k{self.mma_k}.f32.{kind}.{kind}"

    @property
    def value_mma(self) -> str:
        kind = PTX_TYPES[self.spec.dtype]
        return f"wgmma.mma_async.sync.aligned.m64n{self.spec.value_dim}k{self.mma_k}.f32.{kind}.{kind}"

    @property
    def score_orders(self) -> tuple[int, ...]:
        """Return wgmma's operands for 16-bit Q and K alone: whether their reduction is not contiguous."""
        return () if self.is_float8 else (0, 0)

    @property
    def value_orders(self) -> tuple[int, ...]:
        return () if self.is_float8 else (1,)

    @property
    def narrow(self) -> str:
        """Return the conversion of two float32 to a register of results, and of powers that are not float8."""
        return narrow(self.spec.result_dtype)

    @property
    def operands(self) -> int:
        """Return the registers of a block's powers, rounded."""
        return self.scores * self.item_bytes // 4

    @property
    def score_steps(self) -> int:
        """Return how many wgmmas multiply rows of queries and keys."""
        return -(-self.spec.head_dim // self.mma_k)

    @property
    def value_steps(self) -> int:
        return self.params.block_n // self.mma_k

    @property
    def rows_descriptor(self) -> tuple[int, int, int]:
        """Return leading and stride offset and swizzle of Q and K, whose reduction is contiguous."""
        return 1, SWIZZLE_ROWS * ROW_UNITS, SWIZZLES[K_TILE_BYTES]

    @property
    def values_descriptor(self) -> tuple[int, int, int]:
        """Return those of V, whose rows are reduced, unless it is transposed: chunks of columns follow each other."""
        if self.is_float8:
            return self.rows_descriptor
        return self.params.block_n * ROW_UNITS, SWIZZLE_ROWS * ROW_UNITS, SWIZZLES[K_TILE_BYTES]

    def q_offset(self, step: int) -> int:
        """Return where a step of the reduction begins in a consumer's rows of queries, in units of descriptors."""
        return self._offset(step, MMA_TILE_ROWS)

    def k_offset(self, step: int) -> int:
        return self._offset(step, self.params.block_n)

    def v_offset(self, step: int) -> int:
        return self._offset(step, self.v_rows) if self.is_float8 else step * MMA_K * ROW_UNITS

    def _offset(self, step: int, rows: int) -> int:
        """Return where a step begins where the reduction is contiguous, in chunks of so many rows."""
        first, columns = step * self.mma_k, self.chunk_columns
        return first // columns * rows * ROW_UNITS + first % columns * self.item_bytes // DESCRIPTOR_UNIT

    # ---- memory

    @property
    def first_heads(self) -> tuple[int, int]:
        """Return the first heads of K and of V in what their tensor maps are of."""
        k, v = super().first_heads
        return k, 0 if self.is_float8 else v

    def map(self, name: str, rows: int, columns: int, box_rows: int) -> TensorMap:
        """Return the tensor map of an argument: boxes of so many rows of one chunk."""
        buffer = self.argument(name)
        heads = int(buffer.shape[1 if self.spec.layout == "bhsd" else 2])
        along_row, along_head = (columns, rows * columns) if self.spec.layout == "bhsd" else (heads * columns, columns)
        item_bytes = dtype_bytes(str(buffer.dtype))
        return TensorMap(
            buffer=buffer,
            dtype=io_dtype(str(buffer.dtype)),
            dims=(columns, rows, heads, self.spec.batch),
            strides_bytes=tuple(stride * item_bytes for stride in (along_row, along_head, heads * rows * columns)),
            box=(K_TILE_BYTES // item_bytes, box_rows, 1, 1),
            swizzle=SWIZZLES[K_TILE_BYTES],
        )

    def values_map(self, transposed: Any) -> TensorMap:
        """Return the tensor map of values transposed, [batch, head, column, key]: boxes of all columns of 128 keys."""
        batch, heads, columns, keys = (int(extent) for extent in transposed.shape)
        return TensorMap(
            buffer=transposed,
            dtype="uint8",
            dims=(keys, columns, heads, batch),
            strides_bytes=(keys, keys * columns, keys * columns * heads),
            box=(K_TILE_BYTES, columns, 1, 1),
            swizzle=SWIZZLES[K_TILE_BYTES],
        )

    def maps(self, transposed: Any) -> tuple[TensorMap, TensorMap, TensorMap, TensorMap]:
        """Return the tensor maps of Q, K, V (or V transposed, where that is given) and O."""
        spec = self.spec
        q, k, v = ("QKV",) * 3 if spec.layout == "packed" else "QKV"
        return (
            self.map(q, spec.queries, spec.head_dim, MMA_TILE_ROWS),
            self.map(k, spec.keys, spec.head_dim, self.box_rows),
            self.map(v, spec.keys, spec.value_dim, self.box_rows) if transposed is None else self.values_map(transposed),
            self.map("O", spec.queries, spec.value_dim, MMA_TILE_ROWS),
        )
