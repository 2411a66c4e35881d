"""The comparison with torch on a GPU, as far as it needs none: errors as NumPy has them, and a race that nobody takes part in."""

from __future__ import annotations

from dataclasses import asdict

import ml_dtypes
import numpy as np
import pytest
import torch
from bench_support.gpu.timing import interleaved
from bench_support.gpu.torch_baselines import inputs_of, reference
from bench_support.gpu.torch_baselines import relative_error as torch_error
from support.repository import REPOSITORY

from kerneldecl.arrays import finite_rms, relative_error, row_scales
from kerneldecl.plugins.load import load_rule


def test_errors_are_those_of_numpy_by_row_as_well() -> None:
    rng = np.random.default_rng(0)
    want = rng.standard_normal((2, 9, 16)) * np.logspace(-2, 0, 9)[:, None]
    got = want + 1e-3 * rng.standard_normal(want.shape)
    both = torch.from_numpy(got), torch.from_numpy(want)
    scales = row_scales(want, finite_rms(want))
    np.testing.assert_allclose(torch_error(*both), relative_error(got, want), rtol=1e-12)
    np.testing.assert_allclose(torch_error(*both, rows_vary=True), relative_error(got, want, scales), rtol=1e-12)


def test_where_every_contender_is_wrong_nothing_is_timed() -> None:
    assert interleaved({}, 3) == {}


@pytest.mark.parametrize("layout", ["bhsd", "packed"])
def test_the_reference_of_attention_in_float8_multiplies_by_its_scales(layout: str) -> None:
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 9, "head_dim": 16}
    rule = load_rule(REPOSITORY, "attention").of(REPOSITORY, {**sizes, "dtype": "float8_e4m3fn", "causal": True, "layout": layout})
    attrs = asdict(rule)
    inputs = inputs_of("attention", rule, attrs, "cpu")
    arrays = [x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) if x.dtype.itemsize == 1 else x.numpy() for x in inputs]
    want = rule.reference(*arrays)
    got = reference("attention", attrs, [*inputs, None])
    np.testing.assert_allclose(got.numpy(), np.asarray(want, "float64"), rtol=1e-9)
