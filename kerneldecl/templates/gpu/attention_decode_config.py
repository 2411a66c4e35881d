"""Owns the sizes of one kernel of attention against a KV cache: rows, warps, splits, addresses of the cache's rows.

Knows nothing of the kernel's statements, or of how parameters are chosen.

A thread block has some rows of queries that see the same head of keys, and a part of a sequence's keys. The part is cut into blocks of
`block_n` keys; each group of warps takes every so many-th of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kerneldecl.analysis.attention_decode import DecodeParams, DecodeSizes, result_width, steps, width
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.compiler.attention_decode import DecodeSpec
from kerneldecl.compiler.passes.l2_prefetch import PREFETCH_BYTES

VECTOR = VECTOR_BYTES // 2
"""Elements that a lane copies with one cp.async."""
LOG2_E = math.log2(math.e)


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
class DecodeKernel:
    """The attention, the template's parameters, and what follows from them."""

    spec: DecodeSpec
    params: DecodeParams
    sm_count: int
    pdl: bool
    """Whether the kernel overlaps the end of the preceding one."""
    has_lengths: bool = True
    is_causal: bool = True

    @property
    def sizes(self) -> DecodeSizes:
        spec = self.spec
        return DecodeSizes(
            batch=spec.batch,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            queries=spec.queries,
            keys=spec.keys,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            dtype=spec.dtype,
            page_size=spec.page_size,
            is_latent=spec.is_latent,
            has_lengths=self.has_lengths,
        )

    @property
    def group_rows(self) -> int:
        return self.sizes.group_rows

    @property
    def row_blocks(self) -> int:
        """Return how many thread blocks share the rows that see a head of keys."""
        return -(-self.group_rows // self.params.block_rows)

    @property
    def units(self) -> int:
        """Return how many parts of the result there are; `split_k` thread blocks share each."""
        return self.spec.batch * self.spec.kv_heads * self.row_blocks

    @property
    def parts(self) -> int:
        """Return into how many parts of a unit's keys clusters share it; over 1, a second kernel combines their results."""
        return self.params.split_k // self.params.cluster

    @property
    def grid(self) -> int:
        return self.units * self.params.split_k

    def place(self, cluster: Any) -> tuple[Any, Any, tuple[Any, Any, Any]]:
        """Return a cluster's unit, its part of the keys, and its sequence, head of keys, and first row of queries.

        Those that read the same keys are neighbours.
        """
        rows, of_head = cluster % self.row_blocks, cluster // self.row_blocks
        part, head = of_head % self.parts, of_head // self.parts
        batch, head_of_batch = head // self.spec.kv_heads, head % self.spec.kv_heads
        return head * self.row_blocks + rows, part, (batch, head_of_batch, rows * self.params.block_rows)

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
    def scale_log2(self) -> float:
        """Return what scores are multiplied by before powers of two are taken of them."""
        return self.spec.scale * LOG2_E

    @property
    def is_bfloat16(self) -> bool:
        return self.spec.dtype == "bfloat16"

    @property
    def page_per_block(self) -> bool:
        """Say whether all keys of a block are in one page."""
        return self.spec.page_size % self.params.block_n == 0

    @property
    def prefetched_rows(self) -> int:
        """Return the rows of a group's first block that are prefetched to L2: of a contiguous cache whose length is known."""
        if self.spec.page_size or self.has_lengths:
            return 0
        row_bytes = (self.spec.head_dim + (0 if self.spec.is_latent else self.spec.value_dim)) * 2
        return min(self.params.block_n, PREFETCH_BYTES // (self.params.blocks * self.params.groups * row_bytes))

    # ---- addresses

    def row_stride(self, columns: int) -> int:
        """Return the elements from one key's row to the next one's."""
        return columns if self.spec.layout == "bhsd" else self.spec.kv_heads * columns

    def head_stride(self, columns: int) -> int:
        rows = self.spec.page_size or self.spec.keys
        return rows * columns if self.spec.layout == "bhsd" else columns

    def outer_stride(self, columns: int) -> int:
        """Return the elements from one sequence or page to the next one."""
        return (self.spec.page_size or self.spec.keys) * self.spec.kv_heads * columns

    def query_offset(self, batch: Any, kv_head: Any, row: Any, columns: int) -> Any:
        """Return where a row of Q or O begins; rows of a head of keys are ordered by queries, then by heads."""
        spec, group = self.spec, self.spec.group
        head, query = kv_head * group + row % group, row // group
        at = (head * spec.queries + query) if spec.layout == "bhsd" else (query * spec.heads + head)
        return (batch * (spec.heads * spec.queries) + at) * columns

    def limit(self, length: Any, row: Any) -> Any:
        """Return the first key that a row does not see."""
        return length - (self.spec.queries - 1) + row // self.spec.group if self.is_causal and self.spec.queries > 1 else length
