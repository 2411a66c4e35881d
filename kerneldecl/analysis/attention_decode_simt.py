"""Owns the parameters of the kernel of attention against a KV cache on CUDA cores: what follows from them, and which of them fit a GPU.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.attention_decode import MOST_QUERIES, DecodeSizes
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Candidate, Gpu, dtype_bytes

DTYPES = ("float16", "bfloat16", "float32")
"""Of Q, K, V and O, all of which are computed in float32."""
COMBINED = 4
"""Elements of a row of results that a thread stores, or the second kernel combines: `value_dim` is a multiple."""
MAX_ROWS = 16
LANES = (4, 8, 16, 32)
UNROLL = (1, 2, 4, 8)
OTHER_REGISTERS, ROW_REGISTERS = 40, 3
"""Registers of a thread besides elements and scores: addresses and temporaries; and for each row its maximum, sum and last key."""


class DecodeSimtParams(NamedTuple):
    """The parameters of `gpu_attention_decode_simt`."""

    rows: int
    """Rows of queries of a thread block, all of which each thread has: 1 to 16."""
    lanes: int
    """Lanes that share a row of keys or values: 4, 8, 16 or 32."""
    unroll: int
    """Keys that a thread loads and multiplies together: 1, 2, 4 or 8."""
    warps: int
    """Warps of a thread block; each takes keys of its own."""
    split_k: int
    """Thread blocks that share a sequence's keys."""
    blocks: int
    """Thread blocks that share an SM."""

    @property
    def block_rows(self) -> int:
        return self.rows

    @property
    def parts(self) -> int:
        """Return into how many parts a sequence's keys are cut; over 1, a second kernel combines their results."""
        return self.split_k

    @property
    def threads(self) -> int:
        return self.warps * WARP_LANES

    @property
    def block_n(self) -> int:
        """Return the keys that a warp multiplies together."""
        return WARP_LANES // self.lanes * self.unroll

    def vectors(self, sizes: DecodeSizes) -> tuple[int, int]:
        """Return of how many vectors of a row of keys, and of values, a lane has its part."""
        per_vector = width(sizes) * self.lanes
        return -(-sizes.head_dim // per_vector), -(-sizes.value_dim // per_vector)

    def held_vectors(self, sizes: DecodeSizes) -> int:
        """Return the vectors of keys and values that a thread loads together."""
        keys, values = self.vectors(sizes)
        return self.unroll * (keys + (0 if sizes.is_latent else values))

    def registers(self, sizes: DecodeSizes) -> int:
        """Return the registers of a thread: queries, results, what it loads, scores."""
        elements = sum(self.vectors(sizes)) * width(sizes)
        held = self.held_vectors(sizes) * -(-width(sizes) * dtype_bytes(sizes.dtype) // 4)
        return self.rows * (elements + self.unroll + ROW_REGISTERS) + held + OTHER_REGISTERS

    def smem_floats(self, value_dim: int) -> int:
        """Return the floats of shared memory: what each warp has found of each row, its maximum and its sum."""
        return self.warps * self.rows * (value_dim + 2)

    def fits(self, sizes: DecodeSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built for a GPU, without registers that spill."""
        registers, smem = self.registers(sizes), 4 * self.smem_floats(sizes.value_dim)
        return (
            1 <= self.rows <= MAX_ROWS
            and self.lanes in LANES
            and self.unroll in UNROLL
            and min(self.warps, self.split_k, self.blocks) >= 1
            and self.threads <= gpu.max_threads_per_block
            and self.threads * self.blocks <= gpu.max_threads_per_sm
            and registers <= gpu.max_registers_per_thread
            and registers * self.threads * self.blocks <= gpu.registers_per_sm
            and smem <= gpu.smem_per_block_optin_bytes
            and self.blocks * (smem + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
        )

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_attention_decode_simt", self._asdict())


def width(sizes: DecodeSizes) -> int:
    """Return the elements of a row that a lane loads at once: 16 bytes, or less where rows are no multiple of these."""
    return math.gcd(sizes.head_dim, sizes.value_dim, VECTOR_BYTES // dtype_bytes(sizes.dtype))


def takes(sizes: DecodeSizes) -> bool:
    """Say whether the kernel on CUDA cores computes such an attention."""
    return sizes.dtype in DTYPES and sizes.queries <= MOST_QUERIES and sizes.value_dim % COMBINED == 0
