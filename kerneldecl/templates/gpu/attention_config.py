"""Owns the sizes of one attention kernel on mma.sync: tiles and their order, shared memory, instructions.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

from dataclasses import dataclass

from kerneldecl.analysis.attention_tc import AttentionTcParams, Rows
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.analysis.tensor_cores import K_BYTES, PTX_TYPES
from kerneldecl.templates.hopper.attention_softmax import FLOAT8_POWER_LOG2
from kerneldecl.templates.shared.fused_attention import FusedAttention, narrow


@dataclass(frozen=True)
class AttentionTcKernel(FusedAttention):
    """One kernel: each CTA computes one tile of queries, and goes through the blocks of keys from the last that it sees to the first."""

    params: AttentionTcParams
    has_pdl: bool
    converts_float8: bool
    """Whether the GPU has an instruction that converts float8."""

    @property
    def is_float8(self) -> bool:
        return self.rows.is_float8

    # ---- tiles

    @property
    def tiles(self) -> int:
        return self.row_tiles * self.all_heads

    @property
    def ctas(self) -> int:
        return self.tiles * self.params.split_k

    @property
    def heads_together(self) -> int:
        return min(self.params.heads_together, self.all_heads)

    # ---- registers of a thread, for each of its fragments of rows

    @property
    def scores(self) -> int:
        return self.params.warp_keys // 2

    @property
    def results(self) -> int:
        return self.rows.warp_columns // 2

    # ---- instructions

    @property
    def mma(self) -> str:
        kind = PTX_TYPES[self.rows.dtype]
        return f"mma.sync.aligned.m16n8k{K_BYTES // self.rows.item_bytes}.row.col.f32.{kind}.{kind}.f32"

    @property
    def power_log2(self) -> int:
        """Return the logarithm of the largest power of a row that has one block of keys."""
        return FLOAT8_POWER_LOG2 if self.is_float8 else 0

    @property
    def narrow(self) -> str:
        return narrow(self.rows.dtype)

    @property
    def score_steps(self) -> int:
        """Return how many mma.syncs one after the other multiply rows of queries and keys."""
        return self.rows.qk_bytes // K_BYTES

    # ---- shared memory

    @property
    def rows(self) -> Rows:
        return Rows.of(self.spec.sizes, self.params.column_warps)

    @property
    def piece(self) -> int:
        """Return the elements that lie in one vector of shared memory, and are copied together."""
        return VECTOR_BYTES // self.rows.item_bytes

    @property
    def qk_pieces(self) -> int:
        return self.rows.qk_bytes // VECTOR_BYTES

    @property
    def v_pieces(self) -> int:
        """Return the pieces of a row of values in shared memory."""
        return self.rows.value_columns // self.piece

    @property
    def warp_pieces(self) -> int:
        """Return the pieces of a row of values that a warp multiplies."""
        return self.rows.warp_columns // self.piece

    @property
    def out_pieces(self) -> int:
        return self.rows.out_bytes // VECTOR_BYTES
