"""Owns the parameters of attention's kernel on CUDA cores: what follows from them, and which of them fit a GPU.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.analysis.attention import BIAS_REGISTERS, FLOAT8, AttentionSizes
from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.model import Candidate, Gpu

OUT_DTYPES = ("float16", "bfloat16", "float32")
"""Of O, which is computed in float32."""
DTYPES = (*OUT_DTYPES, FLOAT8)
"""Of Q, K and V."""
MAX_HEAD_DIM = 512
LANE_ROWS, LANE_COLUMNS = 4, 8
"""A warp's lanes along rows of queries, and along keys and columns of results."""
QUAD = 4
"""Elements of float32 that one access to shared memory takes."""
WARPS_M = (1, 2, 4, 8)
WARPS_N = (1, 2, 4, 8)
THREAD_M = (1, 2, 4, 8)
THREAD_N = (2, 4, 8)
OTHER_REGISTERS, ROW_REGISTERS = 27, 5
"""Registers of a thread besides scores, results and operands: addresses and temporaries; and for each row its maximum, sum and the like.
With them, just what spilled is over 255: of heads of 64, 128 and 256, compiled by nvcc 13.0 for sm_90."""


class AttentionSimtParams(NamedTuple):
    """The parameters of `gpu_attention_simt`."""

    warps_m: int
    """Warps along rows of queries."""
    warps_n: int
    """Warps that share rows: each takes keys of its own, and their results are merged at the end."""
    thread_m: int
    """Rows of a thread: a warp has four times as many."""
    thread_n: int
    """Keys of a thread: a warp has eight times as many in a block."""
    heads_together: int
    """Heads of queries whose tiles are computed before those of other heads, so that their keys stay in L2."""

    @property
    def warp_rows(self) -> int:
        return LANE_ROWS * self.thread_m

    @property
    def block_m(self) -> int:
        return self.warps_m * self.warp_rows

    @property
    def warp_keys(self) -> int:
        return LANE_COLUMNS * self.thread_n

    @property
    def block_n(self) -> int:
        """Return the keys of a block, of all warps that share rows."""
        return self.warps_n * self.warp_keys

    @property
    def threads(self) -> int:
        return self.warps_m * self.warps_n * WARP_LANES

    def registers(self, value_dim: int) -> int:
        """Return the registers of a thread: results, scores with keys that they are multiplied by, or powers with values."""
        results = self.thread_m * value_columns(value_dim) // LANE_COLUMNS
        scores = self.thread_m * self.thread_n + QUAD * (self.thread_n + 1)
        powers = QUAD * self.thread_m + 2 * value_columns(value_dim) // LANE_COLUMNS
        return results + max(scores, powers) + ROW_REGISTERS * self.thread_m + OTHER_REGISTERS

    def smem_floats(self, head_dim: int, value_dim: int) -> int:
        """Return the floats of shared memory: queries, keys, values and powers, or in their place what warps merge."""
        tiles = (self.block_m + self.block_n) * key_pitch(head_dim) + self.block_n * value_columns(value_dim)
        powers = self.warps_m * self.warps_n * self.warp_rows * self.power_pitch
        merged = (self.warps_n - 1) * self.warps_m * WARP_LANES * self.thread_m * (value_columns(value_dim) // LANE_COLUMNS + 2)
        return max(tiles + powers, merged)

    @property
    def power_pitch(self) -> int:
        """Return the floats between rows of powers: four rows by eight keys, which a warp stores at once, are in different banks."""
        return self.warp_keys + LANE_COLUMNS

    def fits(self, sizes: AttentionSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built for a GPU, without registers that spill."""
        registers = self.registers(sizes.value_dim) + (BIAS_REGISTERS if sizes.has_bias else 0)
        return (
            self.warps_m in WARPS_M
            and self.warps_n in WARPS_N
            and self.thread_m in THREAD_M
            and self.thread_n in THREAD_N
            and self.heads_together >= 1
            and self.threads <= gpu.max_threads_per_block
            and registers <= min(gpu.max_registers_per_thread, gpu.registers_per_block // self.threads)
            and 4 * self.smem_floats(sizes.head_dim, sizes.value_dim) <= gpu.smem_per_block_optin_bytes
        )

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_attention_simt", self._asdict())


def key_pitch(head_dim: int) -> int:
    """Return the floats between rows of queries and of keys: an odd number of quads, so that eight rows are read from different banks."""
    return (-(-head_dim // QUAD) | 1) * QUAD


def value_columns(value_dim: int) -> int:
    """Return the columns of values in shared memory: a quad for each lane along them, or several."""
    return -(-value_dim // (LANE_COLUMNS * QUAD)) * LANE_COLUMNS * QUAD


def takes(sizes: AttentionSizes) -> bool:
    """Say whether the kernel on CUDA cores computes such an attention."""
    return sizes.dtype in DTYPES and sizes.out_dtype in OUT_DTYPES and max(sizes.head_dim, sizes.value_dim) <= MAX_HEAD_DIM
