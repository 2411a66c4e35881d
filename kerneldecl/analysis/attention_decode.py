"""Owns attention against a KV cache as policies see it: its sizes read from an iteration space, and the parameters of its GPU kernel.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.attention import AttentionSizes, attention_of
from kerneldecl.analysis.band import Band
from kerneldecl.analysis.gpu_limits import FIRST_CLUSTER_CAPABILITY, MAX_CLUSTER, WARP_LANES
from kerneldecl.model import Block, Candidate, Gpu, IterSpace, dtype_bytes

ITEM_BYTES = 2
"""Bytes of an element that the kernel takes."""
MMA_ROWS = 8
"""Rows of queries that one mma.sync m16n8k16 multiplies: its n."""
MMA_STEP = 16
"""Keys, and elements of a row, that it multiplies with them: its m and k."""
PAD = 8
"""Elements between rows in shared memory, so that ldmatrix reads eight of them from different banks."""
MOST_QUERIES = 16
MAX_NAMED_BARRIERS = 15
"""Barriers of a thread block besides the one of all of its threads (PTX ISA, bar)."""
MAX_REGISTERS = 255
OTHER_REGISTERS = 48
"""Registers of a thread besides queries, scores and results: addresses, operands, rows' references and sums."""


class DecodeSizes(NamedTuple):
    """Sizes of an attention of a few queries of each sequence against its keys."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    """The most keys of a sequence."""
    head_dim: int
    value_dim: int
    dtype: str
    page_size: int = 0
    """Keys of a page; 0 for a contiguous cache."""
    is_latent: bool = False
    """Whether values are the first elements of the keys' rows."""
    has_lengths: bool = True
    """Whether sequences have lengths at run time."""

    @property
    def group_rows(self) -> int:
        """Return the rows of queries that see the same head of keys."""
        return self.heads // self.kv_heads * self.queries

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of all keys and values of sequences of full length."""
        columns = self.head_dim + (0 if self.is_latent else self.value_dim)
        return self.batch * self.kv_heads * self.keys * columns * dtype_bytes(self.dtype)


class DecodeParams(NamedTuple):
    """The parameters of `gpu_attention_decode`."""

    rows: int
    """Rows of queries of a warp: 8, 16, 32 or 64."""
    block_n: int
    """Keys that a warp multiplies together: a multiple of 16."""
    warps_m: int
    """Warps that share blocks of keys, each with rows of its own: a group."""
    warps: int
    """Warps of a thread block; each group takes keys of its own."""
    stages: int
    """Blocks of keys and values that a group has in shared memory, or on their way to it."""
    split_k: int
    """Thread blocks that share a sequence's keys."""
    blocks: int
    """Thread blocks that share an SM."""
    cluster: int
    """Of those that share a sequence's keys, how many combine their results in shared memory: 1 to 8."""

    @property
    def row_tiles(self) -> int:
        return self.rows // MMA_ROWS

    @property
    def groups(self) -> int:
        return self.warps // self.warps_m

    @property
    def block_rows(self) -> int:
        """Return the rows of queries of a thread block."""
        return self.rows * self.warps_m

    @property
    def parts(self) -> int:
        """Return into how many parts of a sequence's keys clusters share it; over 1, a second kernel combines their results."""
        return self.split_k // self.cluster

    @property
    def threads(self) -> int:
        return self.warps * WARP_LANES

    def registers(self, head_dim: int, value_dim: int) -> int:
        """Return the registers of a thread."""
        queries, results = 2 * steps(head_dim), 4 * steps(value_dim)
        return self.row_tiles * (queries + results + 6 * self.block_n // MMA_STEP) + OTHER_REGISTERS

    def stage_bytes(self, head_dim: int, value_dim: int, *, is_latent: bool) -> int:
        """Return the bytes of a block of keys and values."""
        values = 0 if is_latent else width(value_dim)
        return self.block_n * (width(head_dim) + values) * ITEM_BYTES

    def smem_bytes(self, head_dim: int, value_dim: int, *, is_latent: bool) -> int:
        """Return the shared memory of a thread block: all groups' blocks, in whose place their results come, and rows' maxima and sums."""
        ring = self.groups * self.stages * self.stage_bytes(head_dim, value_dim, is_latent=is_latent)
        results = self.warps * self.rows * result_width(value_dim) * 4
        return max(ring, results) + 2 * 4 * self.warps * self.rows

    def fits(self, sizes: DecodeSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        registers, smem = self.registers(sizes.head_dim, sizes.value_dim), self.smem_of(sizes)
        return (
            self.rows in (8, 16, 32, 64)
            and self.block_n % MMA_STEP == 0
            and self.block_n > 0
            and self.stages >= 2
            and min(self.warps, self.split_k, self.blocks) >= 1
            and 1 <= self.cluster <= (MAX_CLUSTER if gpu.compute_capability >= FIRST_CLUSTER_CAPABILITY else 1)
            and self.split_k % self.cluster == 0
            and self.warps_m >= 1
            and self.warps % self.warps_m == 0
            and (self.warps_m == 1 or self.groups <= MAX_NAMED_BARRIERS)
            and self.threads <= gpu.max_threads_per_block
            and registers <= MAX_REGISTERS
            and registers * self.threads * self.blocks <= gpu.registers_per_sm
            and smem <= gpu.smem_per_block_optin_bytes
            and self.blocks * (smem + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
            and sizes.keys * sizes.kv_heads * max(sizes.head_dim, sizes.value_dim) < 2**31
        )

    def smem_of(self, sizes: DecodeSizes) -> int:
        return self.smem_bytes(sizes.head_dim, sizes.value_dim, is_latent=sizes.is_latent)

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_attention_decode", self._asdict())


def steps(columns: int) -> int:
    """Return in how many steps mma.sync multiplies rows of so many elements."""
    return -(-columns // MMA_STEP)


def width(columns: int) -> int:
    """Return the elements from one row to the next in shared memory."""
    return steps(columns) * MMA_STEP + PAD


def result_width(columns: int) -> int:
    """Return the float32 from one row of results to the next in shared memory: threads of a warp write to different banks."""
    return steps(columns) * MMA_STEP + 4


def takes(sizes: DecodeSizes) -> bool:
    """Say whether the kernel computes such an attention."""
    return sizes.dtype in ("float16", "bfloat16") and sizes.queries <= MOST_QUERIES and sizes.head_dim % 8 == 0 and sizes.value_dim % 8 == 0


def takes_plain(sizes: AttentionSizes) -> bool:
    """Say whether the kernel computes such an attention without lengths: causal at most, aligned to the last key, and O alone."""
    return (
        sizes.queries <= MOST_QUERIES
        and sizes.band in (Band(), Band(upper=sizes.keys - sizes.queries))
        and sizes.out_dtype == sizes.dtype
        and not (sizes.mask or sizes.has_alibi or sizes.has_softcap or sizes.has_logsumexp or sizes.is_packed)
    )


def decode_of(space: IterSpace) -> DecodeSizes | None:
    """Return the sizes of the attention of few queries that an iteration space is, None where it is none.

    It may be one of `compiler.attention_decode` or, of a contiguous cache without lengths, one of `compiler.attention`.
    """
    if len(space.blocks) != len(_KINDS) or tuple(map(_kind, space.blocks)) != _KINDS:
        return _plain(space)
    scores, _, _, _, _, weighted, _ = space.blocks
    if [len(access.shape) for access in scores.reads] not in ([4, 1, 4], [4, 1, 4, 2]):
        return _plain(space)
    q, _, k, *table = scores.reads
    v = weighted.reads[2]
    batch, heads, queries, keys, head_dim = (axis.extent for axis in scores.axes)
    page_size = keys // table[0].shape[1] if table else 0
    return DecodeSizes(
        batch=batch,
        heads=heads,
        kv_heads=math.prod(k.shape[1:]) // ((page_size or keys) * head_dim),
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        value_dim=weighted.axes[3].extent,
        dtype=q.dtype,
        page_size=page_size,
        is_latent=v.operand == k.operand,
    )


def _plain(space: IterSpace) -> DecodeSizes | None:
    """Return the sizes of an attention without lengths that the kernel takes as one of few queries; None of others."""
    sizes = attention_of(space)
    if sizes is None or not takes_plain(sizes):
        return None
    names = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "dtype")
    return DecodeSizes(**{name: getattr(sizes, name) for name in names}, has_lengths=False)


_Kind = tuple[int, int]
_KINDS: tuple[_Kind, ...] = ((5, 1), (4, 0), (4, 1), (4, 0), (4, 1), (5, 1), (4, 0))


def _kind(block: Block) -> _Kind:
    """Return a block's axes, and how many of them it reduces."""
    return len(block.axes), sum(axis.kind == "reduce" for axis in block.axes)
