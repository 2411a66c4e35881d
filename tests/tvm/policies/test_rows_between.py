"""Kernels of any number of rows are for numbers at which a GPU's times rise: at every number one is as good as its own, but for little."""

from __future__ import annotations

import functools

import pytest
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_matmul
from kerneldecl.rows import chosen_numbers, considered_numbers, top_k_between

H200 = load_arch(REPOSITORY, "h200")
TUNED, UPTO = (1, 16, 128, 1024), 4096


@functools.cache
def predicted_secs(m: int, n: int, k: int) -> float:
    rule = load_rule(REPOSITORY, "matmul").of(REPOSITORY, {"m": m, "n": n, "k": k, "layout": "nt", "dtype": "float16"})
    return min(each.predicted_secs for each in gpu_matmul.propose(iter_space(canonical.lower(rule)), H200, top_k_between(m)))


@pytest.mark.parametrize(("n", "k", "least"), at({0}, [(4096, 4096, 0.95), (14336, 4096, 0.94), (11008, 4096, 0.92)]))
def test_at_every_number_of_rows_a_kernel_is_predicted_to_take_little_longer_than_its_own(n: int, k: int, least: float) -> None:
    """A kernel takes no longer with fewer rows than it is tuned for."""
    numbers = (*considered_numbers(TUNED, UPTO), *TUNED)
    own = {number: predicted_secs(number, n, k) for number in numbers if number > 1}
    tuned = {*chosen_numbers(TUNED, UPTO, own), *TUNED[1:]}
    assert len(tuned) <= 22
    for rows in range(17, TUNED[-1], 24):
        taken = min(own[number] for number in tuned if number >= rows)
        assert predicted_secs(rows, n, k) >= (least - 0.001) * taken, f"{rows} rows"
