"""Owns the parameters of attention's kernel on mma.sync: what follows from them, and which of them fit a GPU.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.attention import BIAS_REGISTERS, MAX_OFFSET, AttentionSizes
from kerneldecl.analysis.gpu_limits import SM_PARTITIONS, VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.tensor_cores import FRAGMENT, K_BYTES
from kerneldecl.model import Candidate, Gpu, dtype_bytes

DTYPES = ("float16", "bfloat16")
"""Of Q, K and V. Not float32: 3xTF32 gives NaN where one operand is infinite, since the two TF32 parts of the other may differ in sign."""
OUT_DTYPES = (*DTYPES, "float32")
MAX_HEAD_DIM = 256
HEAD_MULTIPLE = 8
"""Elements of which head dimensions are multiples: those of the columns of one mma.sync."""
OTHER_REGISTERS = 32
"""Registers of a thread besides scores, results and queries: fragments, addresses, maxima and sums of rows, temporaries."""


class Rows(NamedTuple):
    """Rows of an attention's arguments, and how they lie in shared memory."""

    head_dim: int
    value_dim: int
    dtype: str
    out_dtype: str

    @classmethod
    def of(cls, sizes: AttentionSizes) -> Rows:
        return cls(sizes.head_dim, sizes.value_dim, sizes.dtype, sizes.out_dtype)

    @property
    def item_bytes(self) -> int:
        return dtype_bytes(self.dtype)

    @property
    def qk_bytes(self) -> int:
        """Return the bytes of a row of queries or keys, with the zeros that fill what one mma.sync multiplies."""
        return -(-self.head_dim * self.item_bytes // K_BYTES) * K_BYTES

    @property
    def qk_pitch(self) -> int:
        return pitch(self.qk_bytes)

    @property
    def v_pitch(self) -> int:
        return pitch(self.value_dim * self.item_bytes)

    @property
    def out_bytes(self) -> int:
        """Return the bytes of a row of results."""
        return self.value_dim * dtype_bytes(self.out_dtype)

    @property
    def q_pitch(self) -> int:
        """Return the bytes between rows of queries, where results go as well."""
        return max(self.qk_pitch, pitch(self.out_bytes))


def pitch(row_bytes: int) -> int:
    """Return the bytes between rows in shared memory: an odd number of pieces, so that eight rows are read from different banks."""
    return (row_bytes // VECTOR_BYTES | 1) * VECTOR_BYTES


class AttentionTcParams(NamedTuple):
    """The parameters of `gpu_attention_tc`."""

    warps: int
    """Warps of a CTA, each with rows of queries of its own."""
    fragments: int
    """Fragments of 16 rows of queries that a warp has: what it reads of keys and values serves all of them."""
    block_n: int
    """Keys of a block: those whose scores are in registers at once."""
    stages: int
    """Blocks of keys, and of values, in shared memory."""
    q_in_registers: int
    """Whether threads hold their rows of queries in registers; else they read them for each block."""
    heads_together: int
    """Heads of queries whose tiles are computed before those of other heads, so that their keys stay in L2."""
    ctas_per_sm: int
    fma_powers: int
    """Powers of two, of each eight, that CUDA cores compute instead of the special-function units."""

    @property
    def block_m(self) -> int:
        return self.warps * self.warp_rows

    @property
    def warp_rows(self) -> int:
        return self.fragments * FRAGMENT

    @property
    def threads(self) -> int:
        return self.warps * WARP_LANES

    def registers(self, rows: Rows) -> int:
        """Return the registers of a thread that hold scores, results and queries, and powers of one fragment beside the scores of all."""
        queries = rows.qk_bytes // 8 if self.q_in_registers else 0
        return self.fragments * (self.block_n // 2 + rows.value_dim // 2 + queries) + self.block_n // 4

    def smem_bytes(self, rows: Rows) -> int:
        """Return the shared memory of a CTA: queries, which make room for results, and the stages of keys and values."""
        return self.block_m * rows.q_pitch + self.stages * self.block_n * (rows.qk_pitch + rows.v_pitch)

    def fits(self, rows: Rows, gpu: Gpu, *, has_bias: bool = False) -> bool:
        """Say whether a kernel with these parameters can be built for a GPU, without registers that spill."""
        smem_bytes = self.smem_bytes(rows)
        warps = -(-self.warps * self.ctas_per_sm // SM_PARTITIONS)
        shared = gpu.registers_per_sm // (SM_PARTITIONS * warps) // gpu.register_allocation_unit * gpu.register_allocation_unit
        registers = min(gpu.max_registers_per_thread, shared // WARP_LANES)
        return (
            self.warps >= 1
            and self.threads <= gpu.max_threads_per_block
            and self.fragments in (1, 2)
            and self.block_n >= FRAGMENT
            and self.block_n % FRAGMENT == 0
            and self.stages >= 1
            and self.q_in_registers in (0, 1)
            and self.heads_together >= 1
            and self.ctas_per_sm >= 1
            and 0 <= self.fma_powers <= 8
            and self.registers(rows) + OTHER_REGISTERS + (BIAS_REGISTERS if has_bias else 0) <= registers
            and smem_bytes <= gpu.smem_per_block_optin_bytes
            and self.ctas_per_sm * (smem_bytes + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
        )

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_attention_tc", self._asdict())


def takes(sizes: AttentionSizes, gpu: Gpu) -> bool:
    """Say whether the kernel on mma.sync computes such an attention on a GPU."""
    return (
        sizes.dtype in DTYPES
        and sizes.out_dtype in OUT_DTYPES
        and gpu.tensor_rate(sizes.dtype) > 0
        and max(_elements(sizes)) < MAX_OFFSET
        and all(columns % HEAD_MULTIPLE == 0 and columns <= MAX_HEAD_DIM for columns in (sizes.head_dim, sizes.value_dim))
    )


def _elements(sizes: AttentionSizes) -> tuple[int, ...]:
    """Return the elements of the largest arguments."""
    queries, keys = sizes.batch * sizes.heads * sizes.queries, sizes.batch * sizes.kv_heads * sizes.keys
    largest = max(sizes.head_dim, sizes.value_dim)
    packed = (queries + 2 * keys) * largest if sizes.is_packed else 0
    return queries * largest, keys * largest, packed, math.prod(sizes.mask)
