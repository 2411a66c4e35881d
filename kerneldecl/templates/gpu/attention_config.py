"""Owns the sizes of one attention kernel on mma.sync: tiles and their order, shared memory, instructions.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kerneldecl.analysis.attention_tc import AttentionTcParams, Rows
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.analysis.tensor_cores import K_BYTES, PTX_TYPES
from kerneldecl.compiler.attention import AttentionSpec

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionTcKernel:
    """One kernel: each CTA computes one tile of queries, and goes through the blocks of keys from the last that it sees to the first."""

    func_params: tuple[Any, ...]
    """Q, K, V, the mask if there is one, O."""
    spec: AttentionSpec
    params: AttentionTcParams
    has_pdl: bool

    # ---- tiles

    @property
    def row_tiles(self) -> int:
        return -(-self.spec.queries // self.params.block_m)

    @property
    def all_heads(self) -> int:
        return self.spec.batch * self.spec.heads

    @property
    def tiles(self) -> int:
        return self.row_tiles * self.all_heads

    @property
    def key_blocks(self) -> int:
        return -(-self.spec.keys // self.params.block_n)

    @property
    def heads_together(self) -> int:
        return min(self.params.heads_together, self.all_heads)

    @property
    def masks_last_block(self) -> bool:
        """Say whether the last block that a tile goes through has keys that not all rows see."""
        return self.spec.is_causal or self.spec.keys % self.params.block_n != 0

    @property
    def scale_log2(self) -> float:
        """Return what scores are multiplied by before powers of two are taken; with a mask, they are before it is added."""
        return 1.0 if self.spec.has_mask else self.spec.scale * LOG2_E

    # ---- registers of a thread, for each fragment of rows

    @property
    def scores(self) -> int:
        return self.params.block_n // 2

    @property
    def results(self) -> int:
        return self.spec.value_dim // 2

    # ---- instructions

    @property
    def mma(self) -> str:
        kind = PTX_TYPES[self.rows.mma_dtype]
        return f"mma.sync.aligned.m16n8k{K_BYTES // self.rows.item_bytes}.row.col.f32.{kind}.{kind}.f32"

    @property
    def narrow(self) -> str:
        """Return the conversion of two float32 to a register."""
        return f"cvt.rn.{PTX_TYPES[self.spec.dtype]}x2.f32"

    @property
    def score_steps(self) -> int:
        """Return how many mma.syncs one after the other multiply rows of queries and keys."""
        return self.rows.qk_bytes // K_BYTES

    # ---- shared memory

    @property
    def rows(self) -> Rows:
        return Rows(self.spec.head_dim, self.spec.value_dim, self.spec.dtype)

    @property
    def piece(self) -> int:
        """Return the elements that one cp.async copies."""
        return VECTOR_BYTES // self.rows.item_bytes

    @property
    def q_pitch(self) -> int:
        """Return the bytes between rows of queries, where results go as well."""
        return max(self.rows.qk_pitch, self.rows.v_pitch)

    @property
    def qk_pieces(self) -> int:
        return self.rows.qk_bytes // VECTOR_BYTES

    @property
    def v_pieces(self) -> int:
        return self.spec.value_dim // self.piece
