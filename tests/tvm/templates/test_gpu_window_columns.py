"""Windows of columns of pixels, for channels that are no whole vectors: right on the emulated GPU, and proposed before single pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_window as policy
from kerneldecl.templates import gpu_window

H200 = load_arch(REPOSITORY, "h200")
SMALL = {"n": 2, "h": 13, "w": 11, "c": 5, "f": 5, "kh": 3, "kw": 3, "padding": 1, "groups": 5, "layout": "nhwc", "dtype": "bfloat16"}
POOL = {"op": "max", "n": 2, "h": 13, "w": 11, "c": 5, "kh": 3, "kw": 3, "stride": 2, "padding": 1, "layout": "nhwc", "dtype": "float16"}
CASES: list[tuple[str, dict[str, Any], int, int]] = [
    ("conv2d", SMALL, 55, 4),
    ("conv2d", SMALL | {"n": 1, "padding": 0, "dtype": "float16"}, 45, 4),
    ("conv2d", SMALL | {"kh": 5, "stride": 2, "dtype": "float32", "epilogue": ("bias", "relu")}, 30, 4),
    ("conv2d", SMALL | {"padding": 2, "dilation": 2}, 55, 8),
    ("conv2d", SMALL | {"h": 8}, 55, 8),
    ("pool2d", POOL, 30, 3),
    ("pool2d", POOL | {"c": 2 * 67}, 134, 4),
]


@needs_nvcc
@pytest.mark.parametrize(("name", "attrs", "threads", "column"), at({2, 5}, CASES))
def test_right_results(name: str, attrs: dict[str, Any], threads: int, column: int) -> None:
    rule = load_rule(REPOSITORY, name).of(REPOSITORY, attrs)
    made = gpu_window.apply(canonical.lower(rule), {"rows": 0, "width": 1, "threads": threads, "column": column}, H200)
    assert made is not None
    inputs = rule.inputs(np.random.default_rng(0))
    [got] = emulate(made.mod["main"], *inputs, *map(poisoned, rule.signature().outputs))[len(inputs) :]
    assert relative_error(got, rule.reference(*inputs)) <= rule.tolerance()


def test_few_odd_channels_have_columns_first() -> None:
    """37 x 73 x 73 x 19: threads of one pixel each took 22.6 us on an H200, which is what their instructions take (2026-11-28)."""
    attrs = SMALL | {"n": 37, "h": 73, "w": 73, "c": 19, "f": 19, "groups": 19}
    mod = canonical.lower(load_rule(REPOSITORY, "conv2d").of(REPOSITORY, attrs))
    proposals = policy.propose(iter_space(mod), H200, 20)
    columns = [dict(one.candidate.params) for one in proposals if "column" in dict(one.candidate.params)]
    assert "column" in dict(proposals[0].candidate.params)
    assert {each["column"] for each in columns} == {4, 8, 15}
    for params in columns:
        assert gpu_window.apply(mod, params, H200) is not None, params


def test_twice_a_prime_of_channels_has_lines_first() -> None:
    """223 vectors have no threads but one along the channels, whose neighbours load from pixels of 892 bytes."""
    mod = canonical.lower(load_rule(REPOSITORY, "pool2d").of(REPOSITORY, POOL | {"n": 19, "h": 83, "w": 10, "c": 446}))
    first, *others = policy.propose(iter_space(mod), H200, 20)
    assert {"column", "strip"} & dict(first.candidate.params).keys()
    for proposal in (first, *others):
        assert gpu_window.apply(mod, dict(proposal.candidate.params), H200) is not None


@pytest.mark.parametrize(("threads", "column"), [(7, 4), (55, 0)])
def test_none_for_threads_that_do_not_divide(threads: int, column: int) -> None:
    mod = canonical.lower(load_rule(REPOSITORY, "conv2d").of(REPOSITORY, SMALL))
    if column:
        assert gpu_window.apply(mod, {"rows": 0, "width": 1, "threads": threads, "column": column}, H200) is None
    else:
        assert gpu_window.apply(mod, {"rows": 0, "width": 1, "threads": threads, "strip": 4}, H200) is None
