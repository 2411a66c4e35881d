"""Owns kernels' arguments in NumPy: random values, poison, comparison.

Knows nothing of rules, kernels or devices.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kerneldecl.hardware.blas_threads import one_thread
from kerneldecl.lazy import ml_dtypes, np
from kerneldecl.model import Arg

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
else:
    Array = Any
Result = TypeVar("Result")

ALIGNMENT_BYTES = 64
"""TVM's kAllocAlignment: kernels load whole vectors and crash the process where memory is aligned to less. NumPy aligns to 16."""


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return NumPy's dtype for TVM's spelling, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def aligned(array: Array) -> Array:
    """Return the array in C order at an aligned address: itself where it is so already, else a copy."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT_BYTES == 0:
        return array
    memory = np.empty(array.nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


BLOCK_ELEMENTS = 1_048_583
"""Random numbers of a large array; further elements repeat them, for hundreds of millions would take seconds.

A prime: an index that is off by a few rows, tiles or vectors still reads another number.
"""


def random_array(rng: np.random.Generator, arg: Arg, scale: float = 1.0) -> Array:
    """Return random values: for floating point standard normal ones times `scale`, else integers.

    Integers are from the dtype's range, cut to [-128, 127], and are not scaled.
    """
    return np.resize(_random(rng, arg.dtype, min(math.prod(arg.shape), BLOCK_ELEMENTS), scale), arg.shape)


def _random(rng: np.random.Generator, dtype: str, count: int, scale: float) -> Array:
    if is_float(dtype):
        return (rng.standard_normal(count, dtype=np.float32) * np.float32(scale)).astype(numpy_dtype(dtype))
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(numpy_dtype(dtype))
    info = np.iinfo(numpy_dtype(dtype))
    return rng.integers(max(info.min, -128), min(info.max, 127), count, endpoint=True).astype(numpy_dtype(dtype))


def integers_between(rng: np.random.Generator, arg: Arg, low: int, high: int, without: Collection[int] = ()) -> Array:
    """Return random integers from `low` to `high`, both included, but for those of `without`, as an argument has them."""
    values = rng.integers(low, high, min(math.prod(arg.shape), BLOCK_ELEMENTS), endpoint=True)
    values[np.isin(values, list(without))] = high
    return np.resize(values.astype(numpy_dtype(arg.dtype)), arg.shape)


PERIOD = 2039
"""Distinct rows of a large GEMM operand; further rows repeat them, so that a reference computes fewer dot products.

A prime: rows that are a few tiles apart differ.
"""


def repeated(array: Array, extent: int, axis: int) -> Array:
    """Return the array repeated along an axis up to an extent."""
    have = array.shape[axis]
    if have == extent:
        return array
    out = np.empty([*array.shape[:axis], extent, *array.shape[axis:][1:]], array.dtype)
    source, target = np.moveaxis(array, axis, 0), np.moveaxis(out, axis, 0)

    def fill(start: int) -> None:
        block = target[start : start + have]
        block[...] = source[: len(block)]

    _on_all_cores(fill, range(0, extent, have))
    return out


def distinct(array: Array, axis: int) -> int:
    """Return the period of an array along an axis: PERIOD if its slices repeat after it, else the whole extent."""
    along = np.moveaxis(array, axis, 0)
    if len(along) <= PERIOD:
        return len(along)

    def is_same(start: int) -> bool:
        block = along[start : start + PERIOD]
        return np.array_equal(_bits(block), _bits(along[: len(block)]))

    return PERIOD if all(_on_all_cores(is_same, range(PERIOD, len(along), PERIOD))) else len(along)


def _bits(array: Array) -> Array:
    """Return floating-point numbers as integers, of which a NaN equals itself."""
    return array.view(f"u{array.itemsize}") if array.dtype.kind not in "iub" else array


_SLICE_ELEMENTS = 1 << 18
"""Elements that a core works on at a time: temporaries stay in its caches."""


def by_rows(out: Array, function: Callable[[slice], Array], row_elements: int) -> Array:
    """Fill `out[rows] = function(rows)` for slices of the first axis on all cores, and return it: NumPy itself uses one core.

    `row_elements` is the number of elements in a row, of all arrays together.
    """
    count = max(1, _SLICE_ELEMENTS // max(1, row_elements))

    def fill(start: int) -> None:
        rows = slice(start, start + count)
        out[rows] = function(rows)

    _on_all_cores(fill, range(0, len(out), count))
    return out


def _on_all_cores(function: Callable[[int], Result], items: Sequence[int]) -> list[Result]:
    from concurrent.futures import ThreadPoolExecutor  # as much as a rule's import takes without it

    cores = len(os.sched_getaffinity(0))
    # Where every core runs its own GEMM, more threads per GEMM would only compete for the cores.
    with ThreadPoolExecutor(cores) as pool, one_thread() if len(items) >= cores else contextlib.nullcontext():
        return list(pool.map(function, items))


def widened(array: Array, dtype: Any) -> Array:
    """Return the array as another dtype, with the same order of axes in memory, converted on all cores."""
    order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    inner = array.transpose(order)
    flat = inner.reshape(-1)
    converted = by_rows(np.empty(flat.shape, dtype), lambda rows: flat[rows], 1).reshape(inner.shape)
    return converted.transpose(np.argsort(order))


def poisoned(arg: Arg) -> Array:
    """Return an output that no right kernel leaves unchanged: NaN for floating point, bytes 0xA5 else."""
    dtype = numpy_dtype(arg.dtype)
    if is_float(arg.dtype):
        return np.full(arg.shape, np.nan, dtype)
    return np.frombuffer(b"\xa5" * (int(np.prod(arg.shape)) * dtype.itemsize), dtype).reshape(arg.shape).copy()


def finite_rms(want: Array) -> float:
    """Return the root mean square of the finite elements; 0 if there are none."""

    def part(block: Array) -> tuple[float, int]:
        wide = block.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        return float(np.square(finite).sum()), finite.size

    squares, counts = zip(*_of_blocks(part, want.reshape(-1)), strict=True)
    return math.sqrt(math.fsum(squares) / sum(counts)) if sum(counts) else 0.0


def row_scales(want: Array, rms: float) -> Array:
    """Return the root mean square of the finite elements of each row, along the last axis, or `rms` where that is larger."""
    rows = want.reshape(-1, want.shape[-1])

    def part(block: slice) -> Array:
        wide = rows[block].astype(np.float64)
        is_finite = np.isfinite(wide)
        squares = np.square(np.where(is_finite, wide, 0.0)).sum(axis=1)
        return np.asarray(np.sqrt(squares / np.maximum(1, is_finite.sum(axis=1))))

    return np.maximum(by_rows(np.empty(len(rows)), part, rows.shape[1]), rms)


def relative_error(got: Array, want: Array, scales: Array | None = None, *, any_for_nan: bool = False) -> float:
    """Return the largest |got - want| / (|want| + scale) over all elements; infinity where `got` has a NaN that `want` has not.

    There are as many scales as rows, or one for all of them, the root mean square of `want` unless given. It keeps elements near zero,
    where terms cancelled, from being judged by their own size. With `any_for_nan`, anything passes where `want` is NaN, and NaN where it
    is infinite.
    """
    chosen = np.array([finite_rms(want)]) if scales is None else scales
    columns = max(1, want.size // chosen.size) if chosen.size > 1 else 1
    each = chosen if chosen.size > 1 else np.broadcast_to(chosen, want.size)

    def part(got_rows: Array, want_rows: Array, scale: Array) -> float:
        wide = got_rows.astype(np.float64), want_rows.astype(np.float64)
        return _largest_error(*wide, scale[:, None], any_for_nan=any_for_nan)

    return max(_of_blocks(part, got.reshape(-1, columns), want.reshape(-1, columns), each))


def _largest_error(got: Array, want: Array, scale: Array, *, any_for_nan: bool) -> float:
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    if any_for_nan:
        same |= np.isnan(want) | (np.isinf(want) & np.isnan(got))
    if same.all():
        return 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(got - want) / (np.abs(want) + scale)
    error = np.where(same, 0.0, error)
    return float("inf") if np.isnan(error).any() else float(error.max())


def _of_blocks(function: Callable[..., Result], *arrays: Array) -> list[Result]:
    """Return a function's results for blocks of the arrays' rows, on all cores where there are several blocks."""
    rows = len(arrays[0])
    count = max(1, _SLICE_ELEMENTS * rows // max(1, arrays[0].size))
    starts = range(0, max(1, rows), count)

    def of_block(start: int) -> Result:
        return function(*(array[start : start + count] for array in arrays))

    return [of_block(start) for start in starts] if len(starts) == 1 else _on_all_cores(of_block, starts)
