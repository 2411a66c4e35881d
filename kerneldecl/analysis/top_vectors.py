"""Owns in which vectors rows are read of which the first elements are wanted: rows of odd length begin between vectors.

Knows nothing of TVM or of which parameters are fast. The rules do not import it: what is changed here is no change of their references.
"""

from __future__ import annotations

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.analysis.row_sort import GpuTopParams, TopSizes
from kerneldecl.model import dtype_bytes


def has_ends(sizes: TopSizes) -> bool:
    """Say whether a row is whole vectors, wherever it begins, and ends that are read one by one.

    A bound is found of as many results at most as there are vectors; for more, all elements are read one by one.
    """
    whole = VECTOR_BYTES // dtype_bytes(sizes.dtype)
    return sizes.extent % 2 == 1 and sizes.results <= least_vectors(sizes, whole)


def least_vectors(sizes: TopSizes, width: int) -> int:
    """Return the vectors of so many elements that lie in every row."""
    return (sizes.extent - width + 1) // width


def top_width(sizes: TopSizes, params: GpuTopParams) -> int:
    """Return the elements of one access."""
    return VECTOR_BYTES // dtype_bytes(sizes.dtype) if has_ends(sizes) else params.width(sizes)
