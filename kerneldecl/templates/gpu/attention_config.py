"""Owns the sizes of one attention kernel on mma.sync: tiles and their order, shared memory, instructions.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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

    arguments: Mapping[str, Any]
    """Buffers by the names that `AttentionSpec.arguments` gives them."""
    spec: AttentionSpec
    params: AttentionTcParams
    has_pdl: bool

    def argument(self, name: str) -> Any:
        """Return the buffer of an argument."""
        return self.arguments[name]

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
    def has_unseen_keys(self) -> bool:
        """Say whether some blocks have keys that not all rows see, besides those that a mask hides."""
        return not self.spec.band.is_full or self.spec.keys % self.params.block_n != 0

    @property
    def scale_log2(self) -> float:
        """Return what scores are multiplied by before powers of two are taken; those with a bias are scaled before."""
        return (1.0 if self.spec.sizes.has_bias else self.spec.scale) * LOG2_E

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
        kind = PTX_TYPES[self.spec.dtype]
        return f"mma.sync.aligned.m16n8k{K_BYTES // self.rows.item_bytes}.row.col.f32.{kind}.{kind}.f32"

    @property
    def narrow(self) -> str:
        """Return the conversion of two float32 to a register of powers."""
        return narrow(self.spec.dtype)

    @property
    def score_steps(self) -> int:
        """Return how many mma.syncs one after the other multiply rows of queries and keys."""
        return self.rows.qk_bytes // K_BYTES

    # ---- shared memory

    @property
    def rows(self) -> Rows:
        return Rows.of(self.spec.sizes)

    @property
    def piece(self) -> int:
        """Return the elements that one cp.async copies."""
        return VECTOR_BYTES // self.rows.item_bytes

    @property
    def qk_pieces(self) -> int:
        return self.rows.qk_bytes // VECTOR_BYTES

    @property
    def v_pieces(self) -> int:
        return self.spec.value_dim // self.piece

    @property
    def out_pieces(self) -> int:
        return self.rows.out_bytes // VECTOR_BYTES


def narrow(dtype: str) -> str:
    """Return the conversion of two float32 to a register."""
    return f"cvt.rn.{PTX_TYPES[dtype]}x2.f32"
