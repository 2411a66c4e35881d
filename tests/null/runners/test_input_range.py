"""Inputs of long sums: smaller where results would leave the range of their dtype, and byte for byte what they were elsewhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import finfo
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl import arrays
from kerneldecl.arrays import is_float, numpy_dtype
from kerneldecl.plugins.load import load_rule
from kerneldecl.runners.input_range import MOST, halved, halvings, within_range
from kerneldecl.runners.reference_data import ReferenceData, make_reference_data
from kerneldecl.signature import Arg

LONG = 1 << 20
"""Terms of a sum. Of more random numbers there are repetitions: see the tests of these."""
FLOATS = ("float16", "bfloat16", "float32", "float64")
EXTREMES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "adaptive_pool2d": ({"op": "mean", "n": 1, "h": 1024, "w": 1024, "c": 1, "rows": 1, "columns": 1}, FLOATS),
    "arg_reduce": ({"op": "argmax", "shape": (1, LONG), "axis": -1}, FLOATS),
    "attention": ({"batch": 1, "heads": 1, "queries": 2, "keys": 8192, "head_dim": 16}, FLOATS[:3]),
    "batch_norm": ({"shape": (LONG, 1), "axis": 1}, FLOATS),
    "conv2d": ({"n": 1, "h": 3, "w": 3, "c": 1 << 14, "f": 1, "kh": 3, "kw": 3}, FLOATS),
    "cross_entropy": ({"rows": 2, "classes": LONG}, FLOATS[:3]),
    "cumsum": ({"shape": (LONG,)}, FLOATS),
    "gemv": ({"n": 2, "k": LONG}, FLOATS),
    "gemv_i4": ({"n": 2, "k": LONG}, FLOATS),
    "group_norm": ({"shape": (1, 1, LONG), "groups": 1}, FLOATS),
    "layer_norm": ({"shape": (1, LONG)}, FLOATS),
    "matmul": ({"m": 2, "n": 2, "k": LONG}, FLOATS),
    "matmul_gated": ({"m": 2, "n": 2, "k": 1 << 16}, FLOATS[:3]),
    "pool2d": ({"op": "mean", "n": 1, "h": 256, "w": 256, "c": 1, "kh": 256, "kw": 256}, FLOATS),
    "reduce": ({"op": "sum", "shape": (2, LONG), "axes": (-1,)}, (*FLOATS, "float8_e4m3fn", "float8_e5m2")),
    "rms_norm": ({"shape": (1, LONG)}, FLOATS),
    "scatter_add": ({"rows": 3, "columns": 1, "updates": LONG}, FLOATS),
    "softmax": ({"shape": (1, LONG)}, FLOATS),
}
"""Rules whose results add up as many terms as the rule is long, and how they are declared so."""
CASES = [(rule, dtype) for rule, (_, dtypes) in EXTREMES.items() for dtype in dtypes]


def data_of(rule: str, **attrs: Any) -> ReferenceData:
    return make_reference_data({"root": str(REPOSITORY), "rule": rule, "attrs": attrs, "seed": 20})


def largest_share(data: ReferenceData) -> float:
    """Return the largest result of random inputs, of those that are finite, as a part of the largest number of its dtype."""
    plain = [
        each
        for each in data.sets
        if all(np.isfinite(array.astype(np.float64)).all() for array in each.inputs if array.dtype.kind not in "iu")
    ]
    results = [(want, arg.dtype) for each in plain for want, arg in zip(each.expected, data.signature.outputs, strict=True)]
    return max(
        (float(np.abs(want).max()) / float(finfo(numpy_dtype(dtype)).max) for want, dtype in results if is_float(dtype)), default=0.0
    )


@pytest.mark.filterwarnings("ignore:invalid value")  # of infinities, in NumPy's threads
@pytest.mark.parametrize(("rule", "dtype"), at(range(0, len(CASES), 3), CASES), ids=str)
def test_no_reference_of_a_long_operator_leaves_its_dtype(rule: str, dtype: str) -> None:
    assert largest_share(data_of(rule, **EXTREMES[rule][0], dtype=dtype)) < 1


def test_the_operators_are_all_that_add_up() -> None:
    """Each other rule computes an element of few others, whatever its length, or is one of these with more around it."""
    names = {path.stem for path in (REPOSITORY / "rules").glob("*.py")}
    of_few = {"cast", "concat", "elementwise", "embedding", "expression", "pack_weights", "pad", "resize2d", "rotary", "rotary_append"}
    of_few |= {"sort", "take", "tensor_ir", "topk", "transpose", "where"}
    alike = {"attention_decode", "conv1d", "conv2d_transpose", "conv3d", "matmul_grouped", "matmul_quantized"}
    assert names == of_few | alike | set(EXTREMES)


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have random numbers repeat after 4096, as those of large arrays do after a million: their sum grows with each repetition."""
    monkeypatch.setattr(arrays, "BLOCK_ELEMENTS", 4099)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize(
    ("rule", "attrs"), [("cumsum", {"shape": (1 << 22,)}), ("reduce", {"op": "sum", "shape": (1 << 22,), "axes": (0,)})]
)
def test_sums_of_numbers_that_repeat_stay_in_range(rule: str, attrs: dict[str, Any]) -> None:
    """The sum of a block, some 64, counts 1023 times: as it does in 2^30 float16 of blocks of a million."""
    declared = load_rule(REPOSITORY, rule)(**attrs, dtype="float16")
    before = declared.reference(*declared.inputs(np.random.default_rng(20)))
    data = data_of(rule, **attrs, dtype="float16")
    assert np.abs(before).max() > 65504 > 2 * np.abs(data.expected[0]).max()
    assert largest_share(data) < 1
    (x,) = data.inputs
    assert len(np.unique(x)) > 1000


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("rule", "attrs"), [("cumsum", {"shape": (64, 4096)}), ("matmul", {"m": 16, "n": 16, "k": 512}), ("gemv", {"n": 8, "k": 64})]
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_inputs_of_other_sizes_are_those_of_the_rule(rule: str, attrs: dict[str, Any], dtype: str) -> None:
    declared = load_rule(REPOSITORY, rule)(**attrs, dtype=dtype)
    data = data_of(rule, **attrs, dtype=dtype)
    assert [array.tobytes() for array in data.inputs] == [array.tobytes() for array in declared.inputs(np.random.default_rng(20))]


def within(values: list[float], function: Any, dtype: str = "float16") -> tuple[Any, Any, int]:
    x, out = Arg("X", (len(values),), dtype), Arg("Y", (len(values),), dtype)
    made = [np.array(values, numpy_dtype(dtype))]
    return within_range(made, [x], lambda inputs: (function(inputs[0].astype(np.float64)),), [out])


def test_a_product_of_inputs_is_in_range_as_well_as_a_sum() -> None:
    (x,), (y,), times = within([3e3, -2e3], np.square)
    assert times > 0
    assert x.tolist() == [3e3 / 2**times, -2e3 / 2**times]
    assert np.abs(y).max() < 65504


@pytest.mark.parametrize("function", [lambda x: 1e6 + x, lambda x: 1e4 / x, lambda x: np.full_like(x, math.inf), lambda x: x * math.nan])
def test_what_no_smaller_input_helps_keeps_its_inputs(function: Any) -> None:
    (x,), (y,), times = within([0.5, 1e-3], function)
    assert times == 0
    np.testing.assert_array_equal(x, np.array([0.5, 1e-3], np.float16))
    np.testing.assert_array_equal(y, function(x.astype(np.float64)))


def test_rows_quantised_to_the_largest_number_are_in_range() -> None:
    """float8_e4m3fn has no infinity: a little more than its largest number is rounded to that."""
    assert halvings([np.array([448.0 * (1 + 2e-16), 464.0])], [Arg("Y", (2,), "float8_e4m3fn")]) == 0
    assert halvings([np.array([500.0])], [Arg("Y", (1,), "float8_e4m3fn")]) == 3


def test_halving_rounds_no_normal_number_and_leaves_indices() -> None:
    given = [Arg("I", (2,), "int64"), Arg("X", (2,), "float16")]
    indices, x = halved([np.array([5, 7]), np.array([1.5, -0.75], np.float16)], given, MOST)
    assert indices.tolist() == [5, 7]
    assert x.tolist() == [1.5 / 2**MOST, -0.75 / 2**MOST]


def test_a_rule_of_a_workspace_is_in_range_too(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/own.py").write_text(
        """
from dataclasses import dataclass

import numpy as np

from kerneldecl.rule import Arg, Rule, Signature


@dataclass(frozen=True, kw_only=True)
class Own(Rule):
    def signature(self):
        return Signature((Arg("X", (64,), "float16"),), (Arg("Y", (64,), "float16"),))

    def lower(self):
        raise NotImplementedError

    def flops(self):
        return 64

    def takes_special_values(self):
        return False

    def reference(self, x):
        return x.astype(np.float64) * 1e5
""",
        encoding="utf-8",
    )
    data = make_reference_data({"root": str(tmp_path), "rule": "own", "attrs": {}, "seed": 1})
    assert len(data.sets) == 2
    assert largest_share(data) < 1
