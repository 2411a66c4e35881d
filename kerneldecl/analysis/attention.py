"""Owns attention as policies see it: its sizes read from an iteration space, and the parameters of its kernel on wgmma.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.hopper_limits import (
    MAX_CTA_SMEM_BYTES,
    MAX_TMA_BOX,
    MMA_TILE_ROWS,
    RESERVED_SMEM_BYTES,
    SM_SMEM_BYTES,
    SYSTEM_SMEM_BYTES,
    WARPGROUP_THREADS,
)
from kerneldecl.model import Block, Candidate, IterSpace, dtype_bytes

ITEM_BYTES = 2
"""Bytes of an element that the kernel takes."""
CHUNK = 64
"""Elements of a row that lie together in shared memory: 128 bytes, which TMA's swizzle permutes together."""
MMA_K = 16
"""Elements of the reduction that one wgmma multiplies."""
MAX_HEAD_DIM = 256
SETMAXNREG = {(1, 1): (0, 0), (2, 1): (24, 240), (3, 1): (32, 160), (4, 1): (24, 112), (1, 2): (24, 232), (1, 3): (24, 136)}
"""Registers of a producer thread and of a consumer thread, by the consumer warpgroups of a CTA and the CTAs of an SM; 0 leaves them as they
are. No other numbers are built."""
MULTICAST_MAXNREG = (40, 232)
"""The same for two consumers in clusters, whose producers need more."""
MAX_REGISTERS = 255
"""Registers of a thread where nothing changes them."""
OTHER_REGISTERS = 32
"""Registers of a consumer thread besides scores, powers and results: addresses, barriers, rows' maxima and sums, temporaries."""


class AttentionSizes(NamedTuple):
    """Sizes of an attention: each head's rows of queries see rows of keys."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: str
    is_causal: bool
    has_mask: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def arguments_bytes(self) -> int:
        """Return the bytes of all arguments but a mask."""
        queries = self.batch * self.heads * self.queries * (self.head_dim + self.value_dim)
        keys = self.batch * self.kv_heads * self.keys * (self.head_dim + self.value_dim)
        return (queries + keys) * dtype_bytes(self.dtype)


class WgmmaAttentionParams(NamedTuple):
    """The parameters of `wgmma_attention`."""

    consumers: int
    """Consumer warpgroups, each with 64 rows of queries."""
    block_n: int
    """Keys of a block: those whose scores are in registers at once."""
    stages: int
    """Blocks of keys, and of values, in shared memory."""
    q_stages: int
    """Tiles of queries in shared memory: 2 loads the next tile's while one is computed."""
    overlap: int
    """What is multiplied during a block's softmax: 0 nothing, 1 the results of the block before, 2 the next block's scores as well, which
    takes registers for two blocks' scores."""
    pingpong: int
    """Whether consumers start their products in turns: 1 lets the next one start when one has started its products, 2 when its scores are
    there; 0 leaves it to them."""
    heads_together: int
    """Heads of queries whose tiles are computed before those of other heads, so that their keys stay in L2."""
    ctas_per_sm: int
    cluster: int
    """CTAs that share keys and values by TMA multicast: those of neighbouring heads of one group, else of neighbouring rows."""
    fma_powers: int
    """Powers of two, of each eight, that CUDA cores compute instead of the special-function units."""
    pdl: int

    @property
    def block_m(self) -> int:
        return self.consumers * MMA_TILE_ROWS

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def maxnreg(self) -> tuple[int, int]:
        """Return the registers of a producer thread and of a consumer thread; 0 leaves them as they are."""
        return MULTICAST_MAXNREG if (self.consumers, self.cluster) == (2, 2) else SETMAXNREG[self.consumers, self.ctas_per_sm]

    def registers(self, value_dim: int) -> int:
        """Return the registers of a consumer thread that hold scores, powers and results."""
        return self.block_n // 2 * (2 if self.overlap == 2 else 1) + self.block_n // 4 + value_dim // 2

    def smem_bytes(self, head_dim: int, value_dim: int) -> int:
        """Return the shared memory of a CTA."""
        qk, v = chunks(head_dim), chunks(value_dim)
        rows = self.q_stages * self.block_m * qk + self.stages * self.block_n * (qk + v)
        return rows * CHUNK * ITEM_BYTES + RESERVED_SMEM_BYTES

    def fits(self, head_dim: int, value_dim: int) -> bool:
        """Say whether a kernel with these parameters can be built."""
        return (
            (self.consumers, self.ctas_per_sm) in SETMAXNREG
            and self.block_n % MMA_K == 0
            and MMA_K <= self.block_n <= MAX_TMA_BOX
            and self.stages >= 2
            and self.q_stages in (1, 2)
            and self.pdl in (0, 1)
            and self.overlap in (0, 1, 2)
            and self.pingpong in (0, 1, 2)
            and (self.overlap < 2 or self.pingpong == 0)
            and (not self.pingpong or self.consumers > 1)
            and self.heads_together >= 1
            and self.cluster in (1, 2)
            and (self.cluster == 1 or self.ctas_per_sm == 1)
            and 0 <= self.fma_powers <= 8
            and self.registers(value_dim) + OTHER_REGISTERS <= (self.maxnreg[1] or MAX_REGISTERS)
            and self.smem_bytes(head_dim, value_dim) <= MAX_CTA_SMEM_BYTES
            and self.ctas_per_sm * (self.smem_bytes(head_dim, value_dim) + SYSTEM_SMEM_BYTES) <= SM_SMEM_BYTES
        )

    def candidate(self) -> Candidate:
        return Candidate.of("wgmma_attention", self._asdict())


def chunks(columns: int) -> int:
    """Return in how many chunks rows of so many elements lie in shared memory."""
    return -(-columns // CHUNK)


def takes(head_dim: int, value_dim: int, dtype: str, *, has_mask: bool) -> bool:
    """Say whether the kernel on wgmma computes such an attention."""
    return (
        dtype in ("float16", "bfloat16")
        and not has_mask
        and all(columns % 8 == 0 and columns <= MAX_HEAD_DIM for columns in (head_dim, value_dim))
        and chunks(value_dim) <= chunks(head_dim)
    )


def attention_of(space: IterSpace) -> AttentionSizes | None:
    """Return the sizes of the attention that an iteration space is, None where it is none.

    Its blocks are those of `compiler.attention`: scores, scaled and masked ones, their maximum, powers, their sum, weighted values,
    results. A causal mask adds an operation to each score and has no operand.
    """
    if len(space.blocks) != len(_KINDS) or tuple(map(_kind, space.blocks)) != _KINDS:
        return None
    scores, biased, _, _, _, weighted, _ = space.blocks
    (q, k), (_, v) = scores.reads, weighted.reads
    batch, heads, queries, keys, head_dim = (axis.extent for axis in scores.axes)
    has_mask = len(biased.reads) == 2
    return AttentionSizes(
        batch=batch,
        heads=heads,
        kv_heads=math.prod(k.shape) // (batch * keys * head_dim),
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        value_dim=math.prod(v.shape) * head_dim // math.prod(k.shape),
        dtype=q.dtype,
        is_causal=biased.flops_per_point - has_mask == 2,
        has_mask=has_mask,
    )


_Kind = tuple[int, int, bool]
_KINDS: tuple[_Kind, ...] = ((5, 1, True), (4, 0, True), (4, 1, False), (4, 0, True), (4, 1, False), (5, 1, True), (4, 0, True))


def _kind(block: Block) -> _Kind:
    """Return a block's axes, how many of them it reduces, and whether it multiplies and adds."""
    return len(block.axes), sum(axis.kind == "reduce" for axis in block.axes), block.is_multiply_accumulate
