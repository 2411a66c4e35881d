"""Owns the parameters of attention's kernel on mma.sync: what follows from them, and which of them fit a GPU.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.attention import BIAS_REGISTERS, FLOAT8, MAX_OFFSET, AttentionSizes
from kerneldecl.analysis.gpu_limits import SM_PARTITIONS, VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.tensor_cores import FRAGMENT, K_BYTES
from kerneldecl.model import Candidate, Gpu, dtype_bytes

OPERANDS = {"float16": "float16", "bfloat16": "bfloat16", FLOAT8: "float16"}
"""What Q, K and V are multiplied in. Not float32: 3xTF32 gives NaN where one operand is infinite, since the two TF32 parts of the other may
differ in sign."""
OUT_DTYPES = ("float16", "bfloat16", "float32")
MAX_HEAD_DIM = 512
POWER_BYTES = 2
"""Bytes of a power that warps exchange."""
FLOAT8_PIECE_WORDS = 2
"""Words of float8 that become one vector in shared memory."""
HEAD_MULTIPLE = 8
"""Elements of which head dimensions are multiples: those of the columns of one mma.sync."""
OTHER_REGISTERS = 32
"""Registers of a thread besides scores, results and queries: fragments, addresses, maxima and sums of rows, temporaries."""


class Rows(NamedTuple):
    """Rows of an attention's arguments, and how they lie in shared memory."""

    head_dim: int
    value_dim: int
    dtype: str
    """What Q, K and V are multiplied in."""
    out_dtype: str
    column_warps: int = 1
    """Warps that share columns of values and results."""
    is_float8: bool = False
    """Whether Q, K and V are of float8, which goes through registers to shared memory."""

    @classmethod
    def of(cls, sizes: AttentionSizes, column_warps: int = 1) -> Rows:
        dtype = OPERANDS[sizes.dtype]
        return cls(sizes.head_dim, sizes.value_dim, dtype, sizes.out_dtype, column_warps, sizes.dtype == FLOAT8)

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
    def most_pieces(self) -> int:
        """Return the vectors of a row of keys or values in shared memory, of which a thread copies one at a time."""
        return max(self.qk_bytes, self.value_columns * self.item_bytes) // VECTOR_BYTES

    @property
    def warp_columns(self) -> int:
        """Return the columns of values and results that a warp multiplies, with those of zeros that make all warps' as many."""
        return -(-self.value_dim // (HEAD_MULTIPLE * self.column_warps)) * HEAD_MULTIPLE

    @property
    def value_columns(self) -> int:
        """Return the columns of values in shared memory."""
        return self.warp_columns * self.column_warps

    @property
    def v_pitch(self) -> int:
        return pitch(self.value_columns * self.item_bytes)

    @property
    def out_bytes(self) -> int:
        """Return the bytes of a row of results."""
        return self.value_dim * dtype_bytes(self.out_dtype)

    @property
    def q_pitch(self) -> int:
        """Return the bytes between rows of queries, where results go as well."""
        return max(self.qk_pitch, pitch(self.value_columns * dtype_bytes(self.out_dtype)))


def pitch(row_bytes: int) -> int:
    """Return the bytes between rows in shared memory: an odd number of pieces, so that eight rows are read from different banks."""
    return (row_bytes // VECTOR_BYTES | 1) * VECTOR_BYTES


class AttentionTcParams(NamedTuple):
    """The parameters of `gpu_attention_tc`."""

    warps: int
    """Warps of a CTA, each with rows of queries of its own; with `column_warps`, groups of warps."""
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
    column_warps: int = 1
    """Warps that share rows of queries: each has scores of its own keys of a block, and results of its own columns."""
    split_k: int = 1
    """Parts of the keys, each of another CTA; a second kernel combines their results."""

    @property
    def block_m(self) -> int:
        return self.warps * self.warp_rows

    @property
    def warp_rows(self) -> int:
        return self.fragments * FRAGMENT

    @property
    def threads(self) -> int:
        return self.warps * self.column_warps * WARP_LANES

    @property
    def warp_keys(self) -> int:
        """Return the keys of a block whose scores a warp has."""
        return self.block_n // self.column_warps

    def registers(self, rows: Rows) -> int:
        """Return the registers of a thread that hold scores, results and queries, and powers of one fragment beside the scores of all."""
        queries = rows.qk_bytes // 8 if self.q_in_registers else 0
        staged = self.staged_words(self.block_n, rows.most_pieces) if rows.is_float8 else 0
        return self.fragments * (self.warp_keys // 2 + rows.warp_columns // 2 + queries) + self.warp_keys // 4 + staged

    def staged_words(self, count: int, pieces: int) -> int:
        """Return the registers in which a thread holds its part of so many rows of float8, each of so many pieces."""
        return -(-count // max(1, self.threads // pieces)) * FLOAT8_PIECE_WORDS

    @property
    def power_pitch(self) -> int:
        """Return the bytes between rows of powers that warps exchange."""
        return pitch(self.block_n * POWER_BYTES)

    @property
    def exchanged_bytes(self) -> int:
        """Return the shared memory in which warps exchange powers, and maxima or sums of rows."""
        return self.block_m * (self.power_pitch + self.column_warps * 4) if self.column_warps > 1 else 0

    def smem_bytes(self, rows: Rows) -> int:
        """Return the shared memory of a CTA: queries, which make room for results, the stages of keys and values, and exchanges."""
        return self.block_m * rows.q_pitch + self.stages * self.block_n * (rows.qk_pitch + rows.v_pitch) + self.exchanged_bytes

    def fits(self, rows: Rows, gpu: Gpu, *, has_bias: bool = False) -> bool:
        """Say whether a kernel with these parameters can be built for a GPU, without registers that spill."""
        smem_bytes = self.smem_bytes(rows)
        warps = -(-self.warps * self.column_warps * self.ctas_per_sm // SM_PARTITIONS)
        shared = gpu.registers_per_sm // (SM_PARTITIONS * warps) // gpu.register_allocation_unit * gpu.register_allocation_unit
        registers = min(gpu.max_registers_per_thread, shared // WARP_LANES)
        return (
            self.warps >= 1
            and self.column_warps >= 1
            and self.split_k >= 1
            and rows.column_warps == self.column_warps
            and (self.column_warps == 1 or self.block_n % (self.column_warps * HEAD_MULTIPLE) == 0)
            and self.threads <= gpu.max_threads_per_block
            and self.fragments in (1, 2)
            and self.block_n >= FRAGMENT
            and self.block_n % FRAGMENT == 0
            and self.stages >= 1
            and (self.stages == 1 or not rows.is_float8)
            and rows.most_pieces <= self.threads
            and self.q_in_registers in (0, 1)
            and self.heads_together >= 1
            and self.ctas_per_sm >= 1
            and 0 <= self.fma_powers <= 8
            and self.registers(rows) + OTHER_REGISTERS + (BIAS_REGISTERS if has_bias else 0) <= registers
            and smem_bytes <= gpu.smem_per_block_optin_bytes
            and self.ctas_per_sm * (smem_bytes + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
        )

    def workspace_elements(self, sizes: AttentionSizes) -> int:
        """Return the elements of what parts of the keys leave, which 32-bit offsets address."""
        if self.split_k == 1:
            return 0
        rows = -(-sizes.queries // self.block_m) * self.block_m
        return self.split_k * sizes.batch * sizes.heads * rows * Rows.of(sizes, self.column_warps).value_columns

    def candidate(self) -> Candidate:
        """Return the candidate; it does not name parameters that divide nothing."""
        left_out = {name for name in ("column_warps", "split_k") if getattr(self, name) == 1}
        return Candidate.of("gpu_attention_tc", {name: value for name, value in self._asdict().items() if name not in left_out})


def takes(sizes: AttentionSizes, gpu: Gpu) -> bool:
    """Say whether the kernel on mma.sync computes such an attention on a GPU."""
    return (
        sizes.dtype in OPERANDS
        and sizes.out_dtype in OUT_DTYPES
        and gpu.tensor_rate(OPERANDS[sizes.dtype]) > 0
        and max(_elements(sizes)) < MAX_OFFSET
        and all(columns % HEAD_MULTIPLE == 0 and columns <= MAX_HEAD_DIM for columns in (sizes.head_dim, sizes.value_dim))
    )


def _elements(sizes: AttentionSizes) -> tuple[int, ...]:
    """Return the elements of the largest arguments."""
    queries, keys = sizes.batch * sizes.heads * sizes.queries, sizes.batch * sizes.kv_heads * sizes.keys
    largest = max(sizes.head_dim, sizes.value_dim)
    packed = (queries + 2 * keys) * largest if sizes.is_packed else 0
    return queries * largest, keys * largest, packed, math.prod(sizes.mask)
