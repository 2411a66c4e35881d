"""Owns the parameters of attention's kernel on mma.sync: what follows from them, and which of them fit a GPU.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.model import Candidate, Gpu

ITEM_BYTES = 2
"""Bytes of an element that the kernel takes."""
PIECE = 8
"""Elements that one cp.async copies: 16 bytes."""
MAX_HEAD_DIM = 256
OTHER_REGISTERS = 34
"""Registers of a thread besides scores, results and queries: fragments, addresses, maxima and sums of rows, temporaries."""


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

    def registers(self, head_dim: int, value_dim: int) -> int:
        """Return the registers of a thread that hold scores, results and queries; powers replace scores."""
        queries = padded(head_dim) // 4 if self.q_in_registers else 0
        return self.fragments * (self.block_n // 2 + value_dim // 2 + queries)

    def smem_bytes(self, head_dim: int, value_dim: int) -> int:
        """Return the shared memory of a CTA: queries, which make room for results, and the stages of keys and values."""
        qk, v = row_elements(padded(head_dim)), row_elements(value_dim)
        return (self.block_m * max(qk, v) + self.stages * self.block_n * (qk + v)) * ITEM_BYTES

    def fits(self, head_dim: int, value_dim: int, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built for a GPU, without registers that spill."""
        smem_bytes = self.smem_bytes(head_dim, value_dim)
        registers = min(gpu.max_registers_per_thread, gpu.registers_per_sm // (self.threads * self.ctas_per_sm) // 8 * 8)
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
            and self.registers(head_dim, value_dim) + OTHER_REGISTERS <= registers
            and smem_bytes <= gpu.smem_per_block_optin_bytes
            and self.ctas_per_sm * (smem_bytes + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
        )

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_attention_tc", self._asdict())


def padded(columns: int) -> int:
    """Return the elements of a row with the zeros that fill the last fragment."""
    return -(-columns // FRAGMENT) * FRAGMENT


def row_elements(columns: int) -> int:
    """Return the elements between rows in shared memory: an odd number of pieces, so that ldmatrix reads eight from different banks."""
    return (columns // PIECE | 1) * PIECE


def takes(head_dim: int, value_dim: int, dtype: str) -> bool:
    """Say whether the kernel on mma.sync computes such an attention."""
    return dtype in ("float16", "bfloat16") and all(columns % PIECE == 0 and columns <= MAX_HEAD_DIM for columns in (head_dim, value_dim))
