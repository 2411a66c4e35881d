"""Owns the sizes of one kernel of attention against a KV cache: rows, warps, splits, addresses of the cache's rows.

Knows nothing of the kernel's statements, or of how parameters are chosen.

A thread block has some rows of queries that see the same head of keys, and a part of a sequence's keys. The part is cut into blocks of
`block_n` keys; each group of warps takes every so many-th of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kerneldecl.analysis.attention_decode import DecodeParams, result_width, steps, width
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.compiler.passes.l2_prefetch import PREFETCH_BYTES
from kerneldecl.templates.shared.cache_attention import CacheAttention

VECTOR = VECTOR_BYTES // 2
"""Elements that a lane copies with one cp.async."""


MOST_PAGES = 8
"""Pages of a block whose numbers a lane holds in registers."""


@dataclass(frozen=True)
class Copy:
    """How a warp copies the rows of a block of keys or values: lanes by rows and by vectors of a row."""

    columns: int
    """Elements of a row in global memory."""
    padded: int
    """Elements of a row that are copied: a whole number of the steps of mma.sync, zeros beyond the row's end."""

    @property
    def lanes_per_row(self) -> int:
        return math.gcd(self.padded // VECTOR, WARP_LANES)

    @property
    def rows(self) -> int:
        """Return the rows that one instruction copies parts of."""
        return WARP_LANES // self.lanes_per_row

    @property
    def parts(self) -> int:
        """Return how many instructions copy a row."""
        return self.padded // VECTOR // self.lanes_per_row

    @property
    def is_whole(self) -> bool:
        return self.padded == self.columns


@dataclass(frozen=True)
class DecodeKernel(CacheAttention):
    """The attention, the template's parameters, and what follows from them."""

    params: DecodeParams

    @property
    def grid(self) -> int:
        return self.units * self.params.split_k

    @property
    def keys_copy(self) -> Copy:
        return Copy(self.spec.head_dim, steps(self.spec.head_dim) * 16)

    @property
    def values_copy(self) -> Copy:
        return Copy(self.spec.value_dim, steps(self.spec.value_dim) * 16)

    @property
    def score_steps(self) -> int:
        return steps(self.spec.head_dim)

    @property
    def value_steps(self) -> int:
        return steps(self.spec.value_dim)

    @property
    def sub_blocks(self) -> int:
        """Return how many mma.sync cover a block's keys."""
        return self.params.block_n // 16

    @property
    def ring(self) -> int:
        """Return how many blocks of keys all groups have in shared memory."""
        return self.params.groups * self.params.stages

    @property
    def key_width(self) -> int:
        return width(self.spec.head_dim)

    @property
    def value_width(self) -> int:
        return width(self.spec.value_dim)

    @property
    def result_width(self) -> int:
        return result_width(self.spec.value_dim)

    @property
    def is_bfloat16(self) -> bool:
        return self.spec.dtype == "bfloat16"

    @property
    def pages_per_block(self) -> int:
        """Return how many pages a block of keys is in, whose numbers lanes hold; 0 where each row's is looked up, or there are none."""
        page, block = self.spec.page_size, self.params.block_n
        if page == 0 or (page % block and block % page):
            return 0
        pages = max(1, block // page)
        return pages if pages <= MOST_PAGES else 0

    @property
    def prefetched_rows(self) -> int:
        """Return the rows of a group's first block that are prefetched to L2: of a contiguous cache whose length is known."""
        if self.spec.page_size or self.has_lengths:
            return 0
        row_bytes = (self.spec.head_dim + (0 if self.spec.is_latent else self.spec.value_dim)) * 2
        return min(self.params.block_n, PREFETCH_BYTES // (self.params.blocks * self.params.groups * row_bytes))
