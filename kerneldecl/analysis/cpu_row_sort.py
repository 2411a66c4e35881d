"""Owns the parameters of kernels that sort rows on CPUs.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.analysis.row_sort import GPU_DTYPES, MAX_OFFSET, TopSizes
from kerneldecl.model import dtype_bytes

MOST_INSERTED = 64
"""Results that are kept in order while a row is read; more are found sooner by sorting all of it."""
MOST_COUNTED = 1 << 9
"""Elements of a row that are compared with one another."""
DIGIT_BITS = 8
FORMS = ("insert", "select", "count", "radix", "merge")
LEAST_GROUPS = 64
"""Groups of elements of which a bound is found: whole vectors, whatever their width."""


class CpuTopParams(NamedTuple):
    """The parameters of `cpu_topk`."""

    form: str
    """How rows are sorted, one of `FORMS`."""
    parallel: bool
    """Whether rows run on all cores."""

    def fits(self, sizes: TopSizes) -> bool:
        """Say whether a kernel with these parameters can be built. Merges take dtypes that words of 32 bits do not order."""
        is_narrow = sizes.dtype in GPU_DTYPES
        fitting = {
            "insert": sizes.results <= min(MOST_INSERTED, sizes.extent // 2),
            "select": is_narrow and sizes.extent < MAX_OFFSET and 2 * group_count(sizes) <= sizes.extent,
            "count": is_narrow and sizes.extent <= MOST_COUNTED,
            "radix": is_narrow and sizes.extent < MAX_OFFSET,
            "merge": not is_narrow,
        }
        return fitting.get(self.form, False)


def group_count(sizes: TopSizes) -> int:
    """Return in how many groups a row's elements are seen to find a bound of its results: a power of two, twice the results at least."""
    return max(LEAST_GROUPS, 1 << (2 * sizes.results - 1).bit_length())


def digit_shifts(dtype: str) -> tuple[int, ...]:
    """Return where the digits begin that order a key of 32 bits, lowest first: bits that are the same in all keys have none."""
    if "float" in dtype:  # of a narrow one's key as float32, the lowest bits of the mantissa are zero
        begin = {"bfloat16": 16, "float16": 13}.get(dtype, 0)
        return tuple(range(begin, 32, DIGIT_BITS))
    lower = tuple(range(0, 8 * dtype_bytes(dtype), DIGIT_BITS))
    return lower if lower[-1] + DIGIT_BITS == 32 else (*lower, 32 - DIGIT_BITS)
