"""Owns the sizes of one kernel of attention against a KV cache on wgmma: chunks, stages, tensor maps, descriptors, instructions.

Knows nothing of the kernel's statements.

A stage holds a block of 64 keys in chunks of 64 columns, 8 KiB each: those of K, then those of V, which for a latent cache are the first
ones of K. Consumer 0 has the first half of V's columns and takes the scores of blocks with an even number, consumer 1 the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kerneldecl.analysis.attention import CHUNK, MMA_K, chunks
from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MMA_TILE_ROWS, SWIZZLE_ROWS
from kerneldecl.analysis.tensor_cores import PTX_TYPES
from kerneldecl.analysis.wgmma_decode import BLOCK_KEYS, CHUNK_BYTES, CONSUMERS, WgmmaDecodeParams, stage_chunks
from kerneldecl.templates.hopper.operands import DESCRIPTOR_UNIT, SWIZZLES, TensorMap
from kerneldecl.templates.shared.cache_attention import CacheAttention
from kerneldecl.templates.shared.fused_attention import narrow

CHUNK_ELEMENTS = BLOCK_KEYS * CHUNK
CHUNK_UNITS = CHUNK_BYTES // DESCRIPTOR_UNIT
STEP_UNITS = MMA_K * 2 // DESCRIPTOR_UNIT
"""From one wgmma's k to the next one's along a row, in units of descriptors."""
KEY_STEP_UNITS = MMA_K * K_TILE_BYTES // DESCRIPTOR_UNIT
"""The same along keys, which are rows of V."""


@dataclass(frozen=True)
class WgmmaDecodeKernel(CacheAttention):
    """One kernel: each CTA has 64 rows of queries, and goes through pairs of blocks of keys, one block for each consumer."""

    params: WgmmaDecodeParams

    @property
    def grid(self) -> int:
        return self.units * self.params.split_k

    @property
    def ring(self) -> int:
        """Return how many pairs of blocks are in shared memory."""
        return self.params.stages // CONSUMERS

    # ---- chunks

    @property
    def qk_chunks(self) -> int:
        return chunks(self.spec.head_dim)

    @property
    def v_chunks(self) -> int:
        return chunks(self.spec.value_dim)

    @property
    def half_chunks(self) -> int:
        """Return the chunks of V whose results one consumer has."""
        return self.v_chunks // CONSUMERS

    @property
    def first_v_chunk(self) -> int:
        """Return the chunk of a stage with which V begins."""
        return 0 if self.spec.is_latent else self.qk_chunks

    @property
    def stage_chunks(self) -> int:
        return stage_chunks(self.sizes)

    @property
    def powers_chunk(self) -> int:
        """Return the chunk of a stage, of K alone, in whose place the block's powers come."""
        return self.qk_chunks - 1

    @property
    def q_elements(self) -> int:
        """Return the elements of the place of queries, where results go as well."""
        return max(self.qk_chunks, self.v_chunks) * MMA_TILE_ROWS * CHUNK

    # ---- registers of a thread, as `attention_softmax` knows them

    @property
    def fma_powers(self) -> int:
        return 0

    @property
    def scores(self) -> int:
        return BLOCK_KEYS // 2

    @property
    def results(self) -> int:
        return self.spec.value_dim // CONSUMERS // 2

    @property
    def narrow(self) -> str:
        """Return the conversion of two float32 to a register."""
        return narrow(self.spec.dtype)

    # ---- instructions

    @property
    def score_mma(self) -> str:
        return self._mma(BLOCK_KEYS)

    @property
    def value_mma(self) -> str:
        return self._mma(self.spec.value_dim // CONSUMERS)

    def _mma(self, columns: int) -> str:
        kind = PTX_TYPES[self.spec.dtype]
        return f"wgmma.mma_async.sync.aligned.m64n{columns}k{MMA_K}.f32.{kind}.{kind}"

    @property
    def score_steps(self) -> int:
        """Return how many wgmmas multiply queries and a block's keys."""
        return -(-self.spec.head_dim // MMA_K)

    @property
    def value_steps(self) -> int:
        return BLOCK_KEYS // MMA_K

    @property
    def stage_units(self) -> int:
        return self.stage_chunks * CHUNK_UNITS

    @property
    def rows_descriptor(self) -> tuple[int, int, int]:
        """Return leading and stride offset and swizzle of Q, K and powers, whose reduction is contiguous."""
        return 1, SWIZZLE_ROWS * K_TILE_BYTES // DESCRIPTOR_UNIT, SWIZZLES[K_TILE_BYTES]

    @property
    def values_descriptor(self) -> tuple[int, int, int]:
        """Return those of V, whose rows are reduced: chunks of columns follow each other."""
        return CHUNK_UNITS, SWIZZLE_ROWS * K_TILE_BYTES // DESCRIPTOR_UNIT, SWIZZLES[K_TILE_BYTES]

    # ---- memory

    @property
    def rows_per_cta(self) -> int:
        """Return the keys of a block that a CTA loads, for all CTAs of its cluster."""
        return BLOCK_KEYS // self.params.cluster

    @property
    def box_rows(self) -> int:
        return self.params.box_rows(self.sizes)

    @property
    def boxes(self) -> int:
        """Return how many boxes of a chunk a CTA loads: one, or one for each page."""
        return self.rows_per_cta // self.box_rows

    def cache_map(self, buffer: Any, columns: int) -> TensorMap:
        """Return the tensor map of K or V, [sequence or page, head, key, column] or with keys before heads: boxes of one chunk."""
        spec = self.spec
        outer, rows = (spec.pages, spec.page_size) if spec.page_size else (spec.batch, spec.keys)
        return TensorMap(
            buffer=buffer,
            dtype=spec.dtype,
            dims=(columns, rows, spec.kv_heads, outer),
            strides_bytes=tuple(2 * stride for stride in (self.row_stride(columns), self.head_stride(columns), self.outer_stride(columns))),
            box=(CHUNK, self.box_rows, 1, 1),
            swizzle=SWIZZLES[K_TILE_BYTES],
        )
