"""Owns attention against a KV cache on wgmma as policies see it: the parameters of its kernel, and which computations it takes.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.attention import CHUNK, ITEM_BYTES, MAX_OFFSET, chunks
from kerneldecl.analysis.attention_decode import MOST_QUERIES, DecodeSizes
from kerneldecl.analysis.hopper_limits import MAX_CTA_SMEM_BYTES, MAX_STAGES, MMA_TILE_ROWS, RESERVED_SMEM_BYTES, SWIZZLE_ROWS
from kerneldecl.model import Candidate

BLOCK_KEYS = 64
"""Keys of a block: powers of one fill a chunk of a row."""
CONSUMERS = 2
"""Consumer warpgroups: each takes every other block of keys, and has half of the columns of results."""
CHUNK_BYTES = BLOCK_KEYS * CHUNK * ITEM_BYTES
MAX_VALUE_DIM = 512
"""Columns of results that two warpgroups have in registers."""
MAXNREG = (72, 216)
"""Registers of a producer thread, which holds the numbers of pages, and of a consumer thread."""
MAX_CLUSTER = 2
"""CTAs that share keys by multicast."""


class WgmmaDecodeParams(NamedTuple):
    """The parameters of `wgmma_attention_decode`."""

    stages: int
    """Blocks of 64 keys and values in shared memory: an even number."""
    split_k: int
    """CTAs that share a sequence's keys, whose results a second kernel combines."""
    cluster: int
    """CTAs with different rows of queries that load the same keys together: 1 or 2."""
    turns: int
    """Whether consumer 1 starts its scores when consumer 0 has started its own, so that one's softmax overlaps with the other's scores."""

    @property
    def block_rows(self) -> int:
        """Return the rows of queries of a CTA."""
        return MMA_TILE_ROWS

    @property
    def parts(self) -> int:
        return self.split_k

    def smem_bytes(self, sizes: DecodeSizes) -> int:
        """Return the shared memory of a CTA: queries, in whose place results come, blocks of keys and values, rows' maxima and sums."""
        queries = max(chunks(sizes.head_dim), chunks(sizes.value_dim))
        return (queries + self.stages * stage_chunks(sizes)) * CHUNK_BYTES + 2 * RESERVED_SMEM_BYTES

    def fits(self, sizes: DecodeSizes) -> bool:
        """Say whether a kernel with these parameters can be built."""
        return (
            self.stages % CONSUMERS == 0
            and CONSUMERS <= self.stages <= MAX_STAGES
            and self.split_k >= 1
            and self.turns in (0, 1)
            and 1 <= self.cluster <= MAX_CLUSTER
            and row_blocks(sizes) % self.cluster == 0
            and self.box_rows(sizes) % SWIZZLE_ROWS == 0
            and self.smem_bytes(sizes) <= MAX_CTA_SMEM_BYTES
        )

    def box_rows(self, sizes: DecodeSizes) -> int:
        """Return the keys of a TMA box: all of a CTA's share of a block, or as many as a page and a share have in common."""
        return math.gcd(BLOCK_KEYS // self.cluster, sizes.page_size)

    def candidate(self) -> Candidate:
        return Candidate.of("wgmma_attention_decode", self._asdict())


def row_blocks(sizes: DecodeSizes) -> int:
    """Return how many CTAs share the rows that see a head of keys."""
    return -(-sizes.group_rows // MMA_TILE_ROWS)


def stage_chunks(sizes: DecodeSizes) -> int:
    """Return how many chunks of 64 columns a block of keys and values has."""
    return chunks(sizes.head_dim) + (0 if sizes.is_latent else chunks(sizes.value_dim))


def takes(sizes: DecodeSizes) -> bool:
    """Say whether the kernel computes such an attention.

    Each warpgroup has whole chunks of values. A block's powers take the place of the last chunk of its keys, which is therefore none of
    its values. TMA takes rows of whole 16 bytes, and swizzles eight of them together.
    """
    return (
        sizes.dtype in ("float16", "bfloat16")
        and sizes.queries <= MOST_QUERIES
        and sizes.head_dim % 8 == 0
        and sizes.value_dim % (CONSUMERS * CHUNK) == 0
        and sizes.value_dim <= MAX_VALUE_DIM
        and (not sizes.is_latent or chunks(sizes.head_dim) > chunks(sizes.value_dim))
        and sizes.page_size % SWIZZLE_ROWS == 0
        and sizes.batch * sizes.heads * sizes.queries * max(sizes.head_dim, sizes.value_dim) < MAX_OFFSET
    )
