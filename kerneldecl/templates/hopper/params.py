"""Owns the sizes of a wgmma kernel: its parameters as read, what follows from them, what does not fit.

Knows nothing of TVM, memory layouts or how parameters are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kerneldecl.model import Value

SLAB = 64
WARPGROUP = 128
SMEM_BYTES = 227 * 1024
RESERVED_BYTES = 1024
"""Of shared memory, for barriers and alignment."""
BUFFER_BYTES = 8192
"""Of 64 x 64 results of 16 bits on their way out."""
REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}
"""Of a loading and of a multiplying thread by the number of multiplying warpgroups: 64 K a SM, in units of 8; 0 leaves them as they are."""
GATHERING_REGISTERS = {1: (0, 0), 2: (104, 200), 3: (80, 144)}
"""The same where loading threads hold what they load."""
SUMS_REGISTERS = {1: 192, 2: 192, 3: 104}
"""Most registers of a thread that hold sums, by the number of multiplying warpgroups; the rest hold addresses and epilogue."""
MAX_STAGES = 12
INT8_COLUMNS = (8, 16, 24, *range(32, 225, 16))
"""That one wgmma on int8 multiplies, as TVM 0.27 knows it (PTX has 240 and 256 as well); twice as many take two."""


def sums_a_register(dtype: str) -> int:
    """Return how many sums of a dtype share a register of 32 bits."""
    return 2 if dtype == "float16" else 1


class Tiles(NamedTuple):
    """The parameters of wgmma_matmul, as read."""

    block_m: int
    block_n: int
    consumers: int
    stages: int
    cluster_m: int
    cluster_n: int
    raster_group: int
    split_k: int
    kernel_schedule: str
    swap_ab: int
    pdl: int
    stream_k: int = 0
    """Not of convolutions'."""

    @classmethod
    def of(cls, params: Mapping[str, Value]) -> Tiles:
        return cls(**{name: params[name] for name in cls._fields if name in params or name not in cls._field_defaults})  # type: ignore[arg-type]

    @property
    def is_pingpong(self) -> bool:
        return self.kernel_schedule == "pingpong"

    @property
    def is_staggered(self) -> bool:
        return self.kernel_schedule == "staggered"

    @property
    def lag(self) -> int:
        """Return the steps by which the second of staggered consumers begins a tile later; half of the ring is ahead of it then."""
        return max(1, self.stages // 2 - 1)

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n * self.split_k

    @property
    def row_peers(self) -> int:
        """Return the blocks of a cluster in its first row, as bits; ranks go along the rows first."""
        return sum(1 << self.cluster_m * n for n in range(self.cluster_n))

    @property
    def column_peers(self) -> int:
        """Return the blocks of a cluster in its first column, as bits."""
        return (1 << self.cluster_m) - 1

    @property
    def sharers(self) -> int:
        """Return how many consumers work on one tile."""
        return 1 if self.is_pingpong else self.consumers

    @property
    def mma_tiles(self) -> int:
        """Return how many wgmmas one below the other a consumer's part of a tile takes."""
        return self.block_m // (SLAB * self.sharers)

    @property
    def sums(self) -> int:
        """Return how many sums a thread holds."""
        return self.mma_tiles * self.block_n // 2

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    @property
    def can_stream(self) -> bool:
        """Say whether tiles can be dealt in pieces: consumers take each step together, one block is on an SM, flags were cleared before."""
        return self.kernel_schedule == "cooperative" and self.split_k == 1 and self.consumers > 1 and self.pdl == 1

    def reduction_bytes(self, accum_dtype: str) -> int:
        """Return the shared memory through which the parts of a reduction are summed."""
        return self.block_m * self.block_n * 4 // sums_a_register(accum_dtype) if self.split_k > 1 else 0

    def parts_n(self, dtype: str) -> int:
        """Return into how many wgmmas side by side a tile's columns are cut."""
        return 2 if dtype == "int8" and self.block_n not in INT8_COLUMNS else 1

    def fit(self, dtype: str, accum_dtype: str, steps: int, tile_bytes: int) -> bool:
        """Say whether a kernel with these sizes can be built, of `steps` stages' worth of reduction and tiles of so many bytes."""
        in_range = (
            self.consumers in REGISTERS
            and 2 <= self.stages <= MAX_STAGES
            and self.cluster_m in (1, 2, 4)
            and self.cluster_n in (1, 2, 4)
            and self.cluster_m * self.cluster_n <= 4
            and self.split_k in (1, 2, 4, 8)
            and self.kernel_schedule in ("cooperative", "staggered", "pingpong")
            and self.swap_ab in (0, 1)
            and self.pdl in (0, 1)
            and self.stream_k in (0, 1, 2)
            and self.raster_group >= 1
        )
        registers = self.sums // sums_a_register(accum_dtype)
        return (
            in_range
            and 8 <= self.block_n <= 256
            and self.block_n % 8 == 0
            and (dtype != "int8" or self.block_n // self.parts_n(dtype) in INT8_COLUMNS)
            and self.block_m % (SLAB * self.sharers) == 0
            and self.mma_tiles in (1, 2)
            and registers <= SUMS_REGISTERS[self.consumers]
            and not ((self.is_pingpong or self.is_staggered) and (self.consumers != 2 or self.split_k > 1))
            # Within a tile the first of staggered consumers tells the second when to begin, and is never two tiles ahead.
            and not (self.is_staggered and steps < self.stages)
            and (self.stream_k == 0 or (self.can_stream and sums_a_register(accum_dtype) == 1))
            and (self.split_k == 1 or (self.cluster_m * self.cluster_n == 1 and steps >= self.split_k and registers % self.split_k == 0))
            and self.stages * tile_bytes + self.reduction_bytes(accum_dtype) + RESERVED_BYTES <= SMEM_BYTES
        )

    def buffers(self, chunks: int, tile_bytes: int, accum_dtype: str) -> int:
        """Return how many buffers each consumer has for results on their way out: as many as fit, and chunks take turns in them."""
        a = SMEM_BYTES - RESERVED_BYTES - self.reduction_bytes(accum_dtype) - self.stages * tile_bytes
        return next((count for count in (4, 2, 1) if chunks % count == 0 and count * self.consumers * BUFFER_BYTES <= a), 0)
