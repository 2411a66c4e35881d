"""Arithmetic of extents that are known as expressions of dimensions: what is proved, what cancels, and what depends on sizes."""

from __future__ import annotations

import pytest
import tvm

from kerneldecl.compiler.model_import.extents import UnknownError, are_equal, is_less, is_same, least, plain, product, quotient, ratio

N, M = (tvm.tirx.Var(name, "int64") for name in "nm")


def test_dimensions_have_no_negative_size() -> None:
    assert not is_same(N, -1)
    assert is_less(N, -1) is False
    assert is_less(N, N + 1)
    assert is_same(N * M, M * N)


@pytest.mark.parametrize("ask", [lambda: is_same(N, M), lambda: is_same(N, 1), lambda: is_less(N, M), lambda: quotient(-N, 2)])
def test_what_depends_on_sizes_is_unknown(ask: object) -> None:
    with pytest.raises(UnknownError):
        ask()  # type: ignore[operator]


def test_factors_cancel_that_no_size_is_known_of() -> None:
    assert ratio([N, M, 768], [N, M]) == 768
    assert are_equal(ratio([N, M, 12, 64], [M, 768]), N)
    assert are_equal(ratio([N, 12], [4]), N * 3)
    assert are_equal(product([N, 2, M]), 2 * M * N)


def test_quotients_are_rounded_towards_zero_as_onnx_has_them() -> None:
    assert (quotient(7, 2), quotient(-7, 2), quotient(7, -2)) == (3, -3, -3)


def test_numbers_are_ints_again() -> None:
    assert plain(N - N + 3) == 3
    assert type(plain(N - N + 3)) is int
    assert are_equal(least(N, N + M), N)
