"""Owns the tests of making large arrays quickly: repeated values, and computing on all cores.

Knows nothing of rules.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from kerneldecl.arrays import BLOCK_ELEMENTS, PERIOD, by_rows, distinct, numpy_dtype, random_array, repeated, widened
from kerneldecl.hardware.blas_threads import one_thread, threads
from kerneldecl.signature import Arg


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("period", [BLOCK_ELEMENTS, PERIOD])
def test_periods_are_primes(period: int) -> None:
    assert all(period % divisor for divisor in range(2, int(period**0.5) + 1))


def test_numbers_repeat_only_after_a_block() -> None:
    values = random_array(rng(), Arg("X", (3, 700_000), "float32")).reshape(-1)
    assert np.array_equal(values[BLOCK_ELEMENTS:], values[: values.size - BLOCK_ELEMENTS])
    assert np.array_equal(values[:BLOCK_ELEMENTS], random_array(rng(), Arg("X", (BLOCK_ELEMENTS,), "float32")))
    assert len(np.unique(values[:BLOCK_ELEMENTS])) > BLOCK_ELEMENTS / 2
    for shift in (1, 32, 1024, 700_000):
        assert np.mean(values[shift:] == values[:-shift]) < 1e-3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_floats_are_normal_and_scaled(dtype: str) -> None:
    values = random_array(rng(), Arg("X", (100_000,), dtype), 0.125)
    assert values.dtype == numpy_dtype(dtype)
    assert np.std(values.astype(np.float64)) == pytest.approx(0.125, rel=0.02)


def test_integers_are_not_scaled() -> None:
    values = random_array(rng(), Arg("X", (10_000,), "int8"), 0.125)
    assert (values.min(), values.max()) == (-128, 127)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("extent", [1, 3, 7, 21, 100])
def test_slices_repeat_along_an_axis(axis: int, extent: int) -> None:
    array = np.arange(7 * 7 * 7).reshape(7, 7, 7)
    assert np.array_equal(repeated(array, extent, axis), np.take(array, np.arange(extent) % 7, axis=axis))


def test_repeated_slices_are_found_and_a_single_difference_is_noticed() -> None:
    base = rng().standard_normal((PERIOD, 5)).astype(np.float16)
    whole = repeated(base, 3 * PERIOD + 100, 0)
    assert distinct(whole, 0) == PERIOD
    assert distinct(whole.T, 1) == PERIOD
    assert distinct(whole, 1) == 5
    assert distinct(base, 0) == PERIOD
    for row in (PERIOD, 2 * PERIOD + 17, len(whole) - 1):
        other = whole.copy()
        other[row, 4] += 1
        assert distinct(other, 0) == len(whole)


@pytest.mark.parametrize("rows", [1, 2, 1000])
@pytest.mark.parametrize("row_elements", [1, 300, 1 << 20])
def test_rows_are_filled_whatever_the_slices(rows: int, row_elements: int) -> None:
    values = rng().standard_normal((rows, 3))
    assert np.array_equal(by_rows(np.full((rows, 3), np.nan), lambda part: values[part] * 2, row_elements), values * 2)


def test_an_error_in_a_slice_is_raised() -> None:
    with pytest.raises(ZeroDivisionError, match="by zero"):
        by_rows(np.empty(10), lambda part: np.full(part.stop - part.start, 1 // 0), 1)


@pytest.mark.skipif(threads() is None, reason="NumPy's BLAS is not OpenBLAS")
def test_blas_takes_one_thread_where_every_core_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    before = threads()

    def rows_seen(rows: int) -> set[int]:
        return set(by_rows(np.zeros(rows, int), lambda part: np.full(part.stop - part.start, threads()), BLOCK_ELEMENTS))

    assert rows_seen(3) == {1}
    assert rows_seen(2) == {before}
    assert threads() == before


@pytest.mark.skipif(threads() is None, reason="NumPy's BLAS is not OpenBLAS")
def test_blas_has_its_threads_again_after_the_last_one_thread() -> None:
    before = threads()
    first, second = one_thread(), one_thread()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert threads() == 1
    second.__exit__(None, None, None)
    assert threads() == before
    with pytest.raises(ZeroDivisionError, match="by zero"), one_thread():
        assert threads() == 1 // 0
    assert threads() == before


def test_widened_keeps_shape_and_values_whatever_the_order() -> None:
    values = rng().standard_normal((40, 30)).astype(np.float16).T
    wide = widened(values, np.float64)
    assert wide.flags.f_contiguous
    assert wide.dtype == np.float64
    assert np.array_equal(wide, values)
    part = widened(values[:, 3:], np.float64)
    assert np.array_equal(part, values[:, 3:])
