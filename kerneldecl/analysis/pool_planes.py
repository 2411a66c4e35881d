"""Owns the parameters of the kernel that pools with channels first: planes [images * channels, rows, columns].

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.pool import MAX_OFFSET, MAX_UNROLLED, PoolSizes, computes
from kerneldecl.model import Gpu, dtype_bytes

LINE_BYTES = 128
"""Bytes of a line of L2: the threads of a block compute places in the input up to so many bytes apart, some beyond its end."""
MAX_STAGED_BYTES = 48 * 1024
"""Shared memory of a block at most: that of several blocks must fit an SM, or nothing is computed while a block waits for its copies."""


class PlanesParams(NamedTuple):
    """The parameters of `gpu_pool_planes`."""

    threads: int
    strip: int
    """Neighbouring results of a row of a thread."""
    column: int
    """Results of a column of a thread."""
    ahead: int
    """Rows of its input that a thread loads before it uses the first."""
    staged: bool
    """Whether a block copies its input to shared memory first."""

    def rows(self, sizes: PoolSizes) -> int:
        """Return the rows of the input that a thread reads."""
        return (self.column - 1) * sizes.stride_rows + (sizes.window_rows - 1) * sizes.step_rows + 1

    def columns(self, sizes: PoolSizes) -> int:
        """Return the columns of the input that a thread reads."""
        return (self.strip - 1) * sizes.stride_columns + (sizes.window_columns - 1) * sizes.step_columns + 1

    def strips(self, sizes: PoolSizes) -> int:
        """Return the strips of a row of results."""
        return -(-sizes.out_columns // self.strip)

    def bands(self, sizes: PoolSizes) -> int:
        """Return the columns of results below one another in a plane."""
        return -(-sizes.out_rows // self.column)

    def turns(self, sizes: PoolSizes) -> int:
        """Return how many threads have something to do."""
        return sizes.images * sizes.channels * self.bands(sizes) * self.strips(sizes)

    def blocks(self, sizes: PoolSizes) -> int:
        return -(-self.turns(sizes) // self.threads)

    def vector(self, sizes: PoolSizes) -> int:
        """Return the elements of the widest load: every strip begins as far from a multiple of it as the first one does."""
        return math.gcd(sizes.image_columns, self.strip * sizes.stride_columns, VECTOR_BYTES // dtype_bytes(sizes.dtype))

    def out_vector(self, sizes: PoolSizes) -> int:
        """Return the elements of the widest store."""
        return math.gcd(sizes.out_columns, self.strip, VECTOR_BYTES // dtype_bytes(sizes.out_dtype))

    def staged_elements(self, sizes: PoolSizes) -> int:
        """Return the elements of the input between the first and the last one that a block reads, and those of whole vectors around."""
        bands = self.bands(sizes)
        touched = min((self.threads - 2) // self.strips(sizes) + 2, self.turns(sizes) // self.strips(sizes))
        # From the first row of any band to the last one of the band that is so many later. None begins higher than its padding.
        down = self.column * sizes.stride_rows
        rows = max(
            (first + touched - 1) // bands * sizes.image_rows
            + min(sizes.image_rows, (first + touched - 1) % bands * down + self.rows(sizes))
            - max(0, first * down - (sizes.window_rows - 1) * sizes.step_rows)
            for first in range(bands)
        )
        vector = VECTOR_BYTES // dtype_bytes(sizes.dtype)
        return -(-rows * sizes.image_columns // vector) * vector + vector

    def fits(self, sizes: PoolSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        return (
            sizes.channels_first
            and computes(sizes)
            and (gpu.async_copy or not self.staged)
            and min(self[:4]) >= 1
            and self.threads % WARP_LANES == 0
            and self.threads <= gpu.max_threads_per_block
            and self.column <= sizes.out_rows
            and self.strip <= sizes.out_columns
            and self.rows(sizes) * self.columns(sizes) <= MAX_UNROLLED
            and sizes.elements + self.threads * LINE_BYTES < MAX_OFFSET
            and (not self.staged or self.staged_elements(sizes) * dtype_bytes(sizes.dtype) <= MAX_STAGED_BYTES)
        )


def pieces(columns: int, before: int, vector: int) -> list[tuple[int, int]]:
    """Return the loads of a row of so many elements, which begins `before` elements left of a multiple of `vector`: (place, elements).

    Each element is in one load, which is aligned to its own size. So where rows are multiples of `vector` a load is inside an image as a
    whole or outside.
    """
    found, at = [], 0
    while at < columns:
        size = next(each for each in (vector >> shift for shift in range(vector.bit_length())) if _is_aligned(at, each, columns, before))
        found.append((at, size))
        at += size
    return found


def _is_aligned(at: int, size: int, columns: int, before: int) -> bool:
    return (at - before) % size == 0 and at + size <= columns
