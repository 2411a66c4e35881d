"""The sets of inputs that kernels are verified on: special values, and data on which any kernel would pass."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import finfo
from support.repository import REPOSITORY

from kerneldecl.arrays import PERIOD, distinct, finite_rms, numpy_dtype, relative_error, repeated
from kerneldecl.plugins.load import load_rule
from kerneldecl.runners.reference_data import DataSet, ReferenceData, make_reference_data
from kerneldecl.runners.special_values import in_range, large, small, sprinkled
from kerneldecl.signature import Signature

RULE = """
import numpy as np
from dataclasses import dataclass

from kerneldecl.arrays import random_array
from kerneldecl.rule import Arg, Rule, Signature


@dataclass(frozen=True, kw_only=True)
class Own(Rule):
    dtype: str = "float32"
    operations: int = 1

    def signature(self):
        args = [Arg(name, (40, 30), self.dtype) for name in "XZY"]
        return Signature(tuple(args[:2]), (args[2],))

    def lower(self):
        raise NotImplementedError

    def flops(self):
        return self.operations

    def inputs(self, rng):
        {inputs}

    def reference(self, x, z):
        {reference}
"""
RANDOM = "return super().inputs(rng)"
SUM = "return x.astype(np.float64) + z"


def made(folder: Path, inputs: str = RANDOM, reference: str = SUM, **fields: Any) -> ReferenceData:
    (folder / "rules").mkdir()
    (folder / "rules/own.py").write_text(RULE.format(inputs=inputs, reference=reference), encoding="utf-8")
    attrs = {name: fields.pop(name) for name in ("dtype", "operations") if name in fields}
    return make_reference_data({"root": str(folder), "rule": "own", "attrs": attrs, "seed": 1, **fields})


def test_the_sets_have_nan_in_each_operand_tiny_and_huge_numbers_and_infinities(tmp_path: Path) -> None:
    plain, small_set, large_set = made(tmp_path).sets
    assert all(np.isfinite(array).all() for array in (*plain.inputs, *plain.expected))
    for array in small_set.inputs:
        assert np.isnan(array).sum() == 1
        assert (array == 0).sum() == 2
        assert (np.abs(array) < 1e-37).sum() > 4
    for array in large_set.inputs:
        assert np.isposinf(array).sum() == np.isneginf(array).sum() == 1
        assert (np.isfinite(array) & (array > 1e6)).sum() == 1
    assert not np.array_equal(plain.inputs[0], small_set.inputs[0])
    assert (plain.any_for_nan, small_set.any_for_nan, large_set.any_for_nan) == (False, False, True)


def test_no_nan_where_an_entry_ignores_it(tmp_path: Path) -> None:
    assert not any(np.isnan(array).any() for each in made(tmp_path, nan="ignore").sets for array in each.inputs)


def test_integers_have_other_inputs_instead(tmp_path: Path) -> None:
    first, second = made(tmp_path, reference="return x + z", dtype="int32").sets
    assert not np.array_equal(first.inputs[0], second.inputs[0])


def test_where_nan_of_one_operand_is_everywhere_another_set_has_it_in_the_largest_alone(tmp_path: Path) -> None:
    _, everywhere, alone, _ = made(tmp_path, reference="return x + z.sum(dtype=np.float64)").sets
    assert np.isnan(everywhere.expected[0]).all()
    assert np.isnan(alone.expected[0]).sum() == 1


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"inputs": "x, z = super().inputs(rng); return [x, np.zeros_like(z)]"}, "inputs() gives Z one value everywhere, 0"),
        ({"inputs": "x, z = super().inputs(rng); return [np.full_like(x, np.nan), z]"}, "inputs() gives X one value everywhere, nan"),
        ({"reference": "return np.add(x, z, out=x)"}, "reference() writes into its inputs"),
        ({"reference": "x += z; return x"}, "reference() writes into its inputs"),
        ({"reference": "return z"}, "reference() returns its input Z as output Y"),
        ({"reference": "return x.copy()"}, "reference() returns its input X as output Y"),
        ({"reference": "return x * np.float32(np.nan)"}, "reference() gives NaN everywhere in output Y"),
        ({"reference": "return (x + z)[1:]"}, "reference() returns [39, 30] for Y, expected [40, 30], as signature() has it"),
        ({"reference": "return x + z, x"}, "reference() returns 2 arrays, expected 1, those of signature().outputs"),
        ({"inputs": "return [rng.standard_normal((3, 4))]"}, "inputs() returns 1 arrays, expected 2, those of signature().inputs"),
        ({"inputs": "return [rng.standard_normal((3, 4))] * 2"}, "inputs() returns [3, 4] for X, expected [40, 30], as signature() has it"),
    ],
    ids=str,
)
def test_data_on_which_any_kernel_would_pass_is_a_mistake(tmp_path: Path, fields: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        made(tmp_path, **fields)


def test_a_copy_is_no_mistake_where_nothing_is_computed(tmp_path: Path) -> None:
    assert len(made(tmp_path, reference="return x", operations=0).sets) == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_special_values_stay_apart_in_each_dtype(dtype: str) -> None:
    values = np.array([*small(dtype), *large(dtype, math.inf)]).astype(numpy_dtype(dtype)).astype(np.float64)
    assert len(set(values)) == len(values) - 1, "0 and -0 alone are equal"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_tiny_numbers_are_the_smallest_normal_ones_and_subnormal_ones(dtype: str) -> None:
    info, values = finfo(numpy_dtype(dtype)), {abs(value) for value in small(dtype)} - {0.0}
    normal = float(info.smallest_normal)
    assert {-value for value in small(dtype)} == set(small(dtype)), "each with both signs"
    if dtype == "bfloat16":
        assert values == {normal}, "GPUs flush its subnormal numbers to zero"
    elif "float8" in dtype:
        assert values == {float(info.smallest_subnormal)}
    else:
        assert max(values) == normal
        assert float(info.smallest_subnormal) <= min(values) < normal / 100


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_of_a_huge_number_the_third_power_is_finite_and_the_sixth_is_not(dtype: str) -> None:
    *infinities, huge = large(dtype, math.inf)
    assert infinities == [math.inf, -math.inf]
    largest = float(finfo(numpy_dtype(dtype)).max)
    assert largest ** (1 / 6) < huge <= largest ** (1 / 3)


def test_eight_bits_have_no_huge_number_and_one_form_of_them_no_infinity() -> None:
    assert large("float8_e5m2", math.inf) == (math.inf, -math.inf)
    assert large("float8_e4m3fn", math.inf) == ()


def test_huge_numbers_are_at_most_what_a_rule_takes() -> None:
    assert large("float32", 32.0) == (math.inf, -math.inf, 32.0)
    assert large("float16", 1e9) == large("float16", math.inf)


def test_places_repeat_as_rows_of_large_operands_do() -> None:
    rng = np.random.default_rng(0)
    array = sprinkled(rng, repeated(rng.standard_normal((PERIOD, 16)), 2 * PERIOD + 7, 0), (np.nan,))
    assert distinct(array, 0) == PERIOD
    assert np.isnan(array).sum() in {2, 3}


def test_a_small_array_keeps_some_of_its_values() -> None:
    values = sprinkled(np.random.default_rng(0), np.ones(16), (np.nan, 0.0, 2.0))
    assert (values == 1).sum() >= 14


def test_results_beyond_the_outputs_range_are_infinite() -> None:
    expected = np.array([1.0, 65504.0, 7e4, -7e4, np.nan])
    np.testing.assert_array_equal(in_range(expected, "float16"), [1.0, 65504.0, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(in_range(expected, "bfloat16"), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e5m2"])
def test_the_largest_number_of_an_output_is_finite_and_any_over_it_is_not(dtype: str) -> None:
    largest = float(finfo(numpy_dtype(dtype)).max)
    over = np.nextafter(largest, np.inf)
    np.testing.assert_array_equal(in_range(np.array([[largest, over], [-largest, -over]]), dtype), [[largest, np.inf], [-largest, -np.inf]])


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn"])
def test_results_of_a_dtype_without_infinity_stay_as_they_are(dtype: str) -> None:
    np.testing.assert_array_equal(in_range(np.array([1e9, -1e9]), dtype), [1e9, -1e9])


def test_a_standard_rule_may_compute_nothing() -> None:
    attrs = {"op": "mean", "shape": [2, 1, 1, 8], "axes": [1, 2], "keepdims": True}
    data = make_reference_data({"root": str(REPOSITORY), "rule": "reduce", "attrs": attrs, "seed": 1})
    np.testing.assert_array_equal(data.expected[0], data.inputs[0])


def test_huge_numbers_that_repeat_are_small_enough_not_to_cancel() -> None:
    attrs = {"m": 4, "n": 8, "k": 3072}
    last = make_reference_data({"root": str(REPOSITORY), "rule": "matmul", "attrs": attrs, "seed": 0}).sets[-1]
    assert all(np.abs(array[np.isfinite(array)]).max() == 32.0 for array in last.inputs)


def test_a_scale_of_all_results_is_never_infinite() -> None:
    """It would multiply the sign of what rounding leaves of zero, which no kernel can know."""
    attrs = {"m": 4, "n": 8, "k": 16, "epilogue": ["scale", "add"]}
    data = make_reference_data({"root": str(REPOSITORY), "rule": "matmul", "attrs": attrs, "seed": 0})
    scales = [each.inputs[2] for each in data.sets]
    assert all(scale.size == 1 for scale in scales)
    assert np.isfinite(scales[-1]).all()
    assert any(np.isinf(array).any() for array in data.sets[-1].inputs)
    assert any(np.isnan(scale).any() for scale in scales)


def test_rows_of_each_set_are_judged_by_their_own_size_where_that_is_larger() -> None:
    sets = [DataSet((), (np.array([[3.0, 4.0], [0.3, 0.4]]) * size,)) for size in (1.0, 100.0)]
    data = ReferenceData(Signature((), ()), (), sets[0].expected, (sets[1],), rows_vary=True)
    first, last = (scales[0] for scales in data.all_scales([2.0]))
    np.testing.assert_allclose(first, [np.sqrt(12.5), 2.0])
    np.testing.assert_allclose(last, [100 * np.sqrt(12.5), 100 * np.sqrt(0.125)])
    assert [scales[0].tolist() for scales in dataclasses.replace(data, rows_vary=False).all_scales([2.0])] == [[2.0], [2.0]]


@pytest.mark.parametrize("at_once", [16, 64], ids=["mma.sync", "tiles"])
def test_float16_accumulators_of_a_long_reduction_are_within_the_tolerance(at_once: int) -> None:
    """All tilings of a GEMM of 3262 x 1240 x 7336 with float16 accumulators were once refused, since huge numbers met in one column."""
    attrs = {"m": 2048, "n": 8, "k": 7336, "layout": "tt", "dtype": "float16", "accum_dtype": "float16"}
    data = make_reference_data({"root": str(REPOSITORY), "rule": "matmul", "attrs": attrs, "seed": 1})
    tolerance = load_rule(REPOSITORY, "matmul").of(REPOSITORY, attrs).tolerance()
    scale = np.array([finite_rms(data.expected[0])])
    for each in data.sets:
        a, b = (array.astype(np.float32) for array in each.inputs)
        total = np.zeros((2048, 8), np.float16)
        with np.errstate(all="ignore"):
            for k in range(0, 7336, at_once):
                total = (total + a[k : k + at_once].T @ b[:, k : k + at_once].T).astype(np.float16)
        assert relative_error(total, each.expected[0], scale, any_for_nan=each.any_for_nan) <= tolerance / 2, each.where
