"""The comparison with torch on a GPU, as far as it needs none: errors as NumPy has them, and a race that nobody takes part in."""

from __future__ import annotations

import numpy as np
import torch
from bench_support.gpu.timing import interleaved
from bench_support.gpu.torch_baselines import relative_error as torch_error

from kerneldecl.arrays import finite_rms, relative_error, row_scales


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
