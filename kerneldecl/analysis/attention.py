"""Owns attention as policies see it: its sizes read from an iteration space, and the parameters of its kernel on wgmma.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kerneldecl.analysis.band import Band
from kerneldecl.analysis.hopper_limits import (
    MAX_CTA_SMEM_BYTES,
    MAX_TMA_BOX,
    MMA_TILE_ROWS,
    RESERVED_SMEM_BYTES,
    SM_REGISTERS,
    SM_SMEM_BYTES,
    SYSTEM_SMEM_BYTES,
    WARPGROUP_THREADS,
)
from kerneldecl.model import Access, Block, Candidate, IterSpace, dtype_bytes

ITEM_BYTES = 2
"""Bytes of an element of 16 bits, in which places in shared memory are counted, whatever is there."""
CHUNK = 64
"""Elements of 16 bits that lie together in shared memory: 128 bytes, which TMA's swizzle permutes together."""
MMA_K = 16
"""Elements of 16 bits that one wgmma multiplies along the reduction."""
FLOAT8 = "float8_e4m3fn"
MAX_HEAD_DIM = 256
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""
SETMAXNREG = {(1, 1): (0, 0), (2, 1): (24, 240), (3, 1): (32, 160), (4, 1): (24, 112), (1, 2): (24, 232), (1, 3): (24, 136)}
"""Registers of a producer thread and of a consumer thread, by the consumer warpgroups of a CTA and the CTAs of an SM; 0 leaves them as they
are. No other numbers are built."""
MULTICAST_MAXNREG = (40, 232)
"""The same for two consumers in clusters, whose producers need more."""
MAX_REGISTERS = 255
"""Registers of a thread where nothing changes them."""
OTHER_REGISTERS = 32
"""Registers of a consumer thread besides scores, powers and results: addresses, barriers, rows' maxima and sums, temporaries."""


INSTRUCTION_REGISTERS = 26
"""Registers that ptxas needs to compile one wgmma besides its accumulators: 138 for m64n224 (CUDA 13.0)."""
BIAS_REGISTERS = 24
"""Those that softcap and slopes take besides: with fewer, heads of 128 with blocks of 192 keys spill."""
MASK_REGISTERS = 48
"""Those that a mask takes, whose loads are under way together: with half as many, heads of 256 with blocks of 64 keys spill."""


class AttentionSizes(NamedTuple):
    """Sizes and kind of an attention: each head's rows of queries see rows of keys."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: str
    """Of Q, K and V."""
    band: Band = Band()
    """Keys that each query sees."""
    mask: tuple[int, ...] = ()
    """Shape of the mask, which is broadcast to [batch, heads, queries, keys]; empty for none."""
    mask_dtype: str = ""
    """Dtype of the mask: bool, or one of floating point that is added; empty for none."""
    has_alibi: bool = False
    has_softcap: bool = False
    has_logsumexp: bool = False
    is_packed: bool = False
    """Whether Q, K and V are one argument."""
    out_dtype: str = ""

    @property
    def is_causal(self) -> bool:
        """Say whether there is a last key that each query sees, which moves along with it."""
        return self.band.upper is not None

    @property
    def has_mask(self) -> bool:
        return bool(self.mask)

    @property
    def has_bias(self) -> bool:
        """Say whether something is done to scores before their softmax, but for a scale and a band."""
        return self.has_softcap or self.has_alibi or self.has_mask

    @property
    def bias_registers(self) -> int:
        """Return how many registers of a thread biases take besides its scores."""
        return MASK_REGISTERS if self.has_mask else BIAS_REGISTERS if self.has_bias else 0

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def arguments_bytes(self) -> int:
        """Return the bytes of all arguments but masks, slopes and sums."""
        rows, kv_rows = self.batch * self.heads * self.queries, self.batch * self.kv_heads * self.keys
        read = rows * self.head_dim + kv_rows * (self.head_dim + self.value_dim)
        return read * dtype_bytes(self.dtype) + rows * self.value_dim * dtype_bytes(self.out_dtype or self.dtype)


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

    @property
    def launch_registers(self) -> int:
        """Return the registers of each thread as a kernel is launched, before setmaxnreg: each instruction must do with them."""
        return min(MAX_REGISTERS, SM_REGISTERS // (self.ctas_per_sm * self.threads) // 8 * 8)

    def registers(self, value_dim: int, item_bytes: int = ITEM_BYTES) -> int:
        """Return the registers of a consumer thread that hold scores, powers and results."""
        return self.block_n // 2 * (2 if self.overlap == 2 else 1) + self.block_n * item_bytes // 8 + value_dim // 2

    def smem_bytes(self, head_dim: int, value_dim: int, item_bytes: int = ITEM_BYTES) -> int:
        """Return the shared memory of a CTA. Results of 16 bits go to the place of queries."""
        qk = chunks(head_dim, item_bytes)
        values = self.block_n * chunks(value_dim) if item_bytes == ITEM_BYTES else value_dim * chunks(self.block_n, item_bytes)
        rows = self.q_stages * self.block_m * max(qk, chunks(value_dim)) + self.stages * (self.block_n * qk + values)
        return rows * CHUNK * ITEM_BYTES + RESERVED_SMEM_BYTES

    def fits(self, head_dim: int, value_dim: int, bias_registers: int = 0, item_bytes: int = ITEM_BYTES) -> bool:
        """Say whether a kernel with these parameters can be built."""
        return (
            (self.consumers, self.ctas_per_sm) in SETMAXNREG
            and self.block_n % (MMA_K * ITEM_BYTES // item_bytes) == 0
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
            and (self.cluster == 1 or item_bytes == ITEM_BYTES)
            and (self.cluster == 1 or self.ctas_per_sm == 1)
            and 0 <= self.fma_powers <= 8
            and self.registers(value_dim, item_bytes) + OTHER_REGISTERS + bias_registers <= (self.maxnreg[1] or MAX_REGISTERS)
            and max(self.block_n, value_dim) // 2 + INSTRUCTION_REGISTERS <= self.launch_registers
            and self.smem_bytes(head_dim, value_dim, item_bytes) <= MAX_CTA_SMEM_BYTES
            and self.ctas_per_sm * (self.smem_bytes(head_dim, value_dim, item_bytes) + SYSTEM_SMEM_BYTES) <= SM_SMEM_BYTES
        )

    def candidate(self) -> Candidate:
        return Candidate.of("wgmma_attention", self._asdict())


def chunks(columns: int, item_bytes: int = ITEM_BYTES) -> int:
    """Return in how many chunks rows of so many elements lie in shared memory."""
    return -(-columns * item_bytes // (CHUNK * ITEM_BYTES))


def takes(sizes: AttentionSizes) -> bool:
    """Say whether the kernel on wgmma computes such an attention. TMA takes rows of whole 16 bytes."""
    is_float8 = sizes.dtype == FLOAT8
    aligned = 16 // dtype_bytes(sizes.dtype)
    return (
        sizes.dtype in ("float16", "bfloat16", FLOAT8)
        and sizes.out_dtype in (("float16", "bfloat16") if is_float8 else (sizes.dtype,))
        and math.prod(sizes.mask) < MAX_OFFSET
        and all(columns % aligned == 0 and columns <= MAX_HEAD_DIM for columns in (sizes.head_dim, sizes.value_dim))
    )


def library_takes(sizes: AttentionSizes) -> bool:
    """Say whether cuDNN computes such an attention: heads of whole 16 bytes, of which each query sees its first keys or all.

    A query that sees no key is left out: its results are zero here, and not numbers there.
    """
    upper = sizes.band.upper
    return (
        sizes.dtype in ("float16", "bfloat16")
        and sizes.out_dtype == sizes.dtype
        and not (sizes.is_packed or sizes.has_bias)
        and sizes.band.lower is None
        and (upper is None or (upper >= 0 and upper in (0, sizes.keys - sizes.queries)))
        and all(columns % 8 == 0 and columns <= MAX_HEAD_DIM for columns in (sizes.head_dim, sizes.value_dim))
    )


def attention_of(space: IterSpace) -> AttentionSizes | None:
    """Return the sizes of the attention that an iteration space is, None where it is none.

    Its blocks are those of `compiler.attention`: scores, biased ones, their maximum, powers, their sum, weighted values, results, and
    the logarithms of sums if they are a result.
    """
    kinds = tuple(map(_kind, space.blocks))
    if kinds not in {_KINDS, (*_KINDS, _LOGSUMEXP)} or any(len(block.reads) != 2 for block in (space.blocks[0], space.blocks[5])):
        return None
    scores, biased, _, _, _, weighted, results, *logsumexp = space.blocks
    (q, k), (_, v) = scores.reads, weighted.reads
    batch, heads, queries, keys, head_dim = (axis.extent for axis in scores.axes)
    value_dim = weighted.axes[3].extent
    is_packed = k.operand == q.operand
    kv_elements = math.prod(k.shape) // (batch * keys * head_dim)
    others = sorted((read for read in biased.reads if read.operand in space.inputs), key=lambda read: space.inputs.index(read.operand))
    biases = _biases(biased, others, has_scales=q.dtype.startswith("float8"))
    if biases is None or (v.operand != k.operand and math.prod(v.shape) * head_dim != math.prod(k.shape) * value_dim):
        return None
    return AttentionSizes(
        batch=batch,
        heads=heads,
        kv_heads=(kv_elements - heads) // 2 if is_packed else kv_elements,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=q.dtype,
        band=_band(biased),
        mask=biases.mask,
        mask_dtype=biases.mask_dtype,
        has_alibi=biases.has_alibi,
        has_softcap=biases.has_softcap,
        has_logsumexp=bool(logsumexp),
        is_packed=is_packed,
        out_dtype=results.writes[0].dtype,
    )


_Kind = tuple[int, int, bool]
_KINDS: tuple[_Kind, ...] = ((5, 1, True), (4, 0, True), (4, 1, False), (4, 0, True), (4, 1, False), (5, 1, True), (4, 0, True))
_LOGSUMEXP: _Kind = (3, 0, True)


def _kind(block: Block) -> _Kind:
    """Return a block's axes, how many of them it reduces, and whether it multiplies and adds."""
    return len(block.axes), sum(axis.kind == "reduce" for axis in block.axes), block.is_multiply_accumulate


class _Biases(NamedTuple):
    """What is done to scores before their softmax, besides a band."""

    mask: tuple[int, ...]
    mask_dtype: str
    has_alibi: bool
    has_softcap: bool


def _biases(biased: Block, arguments: Sequence[Access], *, has_scales: bool) -> _Biases | None:
    """Read what a block does to scores from the arguments that it reads, in order, and from its operations; None where it reads others.

    A scale takes one operation (none if it is 1), scales of Q and K two, a cap three, slopes two, and a mask that is added one.
    """
    others = list(arguments[2 if has_scales else 0 :])
    slopes = others.pop(0) if others and len(others[0].shape) == 1 else None
    mask = others.pop(0) if others else None
    if others or (mask is not None and len(mask.shape) not in {2, 4}):
        return None
    is_added = mask is not None and mask.dtype != "bool"
    operations = biased.flops_per_point - 2 * has_scales - 2 * (slopes is not None) - is_added
    return _Biases(
        mask=mask.shape if mask else (), mask_dtype=mask.dtype if mask else "", has_alibi=slopes is not None, has_softcap=operations >= 3
    )


def _band(biased: Block) -> Band:
    """Return the band outside of which scores are constant: its conditions are i - j + upper >= 0 and j - i - lower >= 0."""
    lower = upper = None
    for pairs, constant in biased.conditions:
        terms = dict(pairs)
        # An axis of one element is no term.
        if terms.get(2, 0) - terms.get(3, 0) > 0:
            upper = constant
        else:
            lower = -constant
    return Band(lower, upper)
