"""Shares count every call, and all means all."""

from __future__ import annotations

import pytest

from kerneldecl.extract.coverage import Coverage, Work, coverage


def test_a_share_counts_calls_and_sizes() -> None:
    found = coverage([Work("conv2d", calls=3, flops=100, bytes=10), Work("tensor_ir", calls=1, flops=100, bytes=90)])
    assert found == Coverage(functions=2, standard=1, flops=0.75, bytes=0.25)


@pytest.mark.parametrize(
    ("coverage", "text"),
    [
        (Coverage(3, 3, 1.0, 1.0), "standard rules: 3 of 3 functions, 100.0 % of the operations and 100.0 % of the bytes"),
        (Coverage(3, 2, 0.99999, 0.5), "standard rules: 2 of 3 functions, 99.9 % of the operations and 50.0 % of the bytes"),
    ],
)
def test_nearly_all_is_not_shown_as_all(coverage: Coverage, text: str) -> None:
    assert str(coverage) == text


def test_functions_that_compute_nothing_are_not_held_against_the_rules() -> None:
    assert coverage([Work("transpose", calls=1, flops=0, bytes=8)]) == Coverage(functions=1, standard=1, flops=1.0, bytes=1.0)
