"""Pooling, batch norm, lookups, places of extremes and expressions without TVM: signatures, references beside plain loops, mistakes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.repository import REPOSITORY

from kerneldecl.plugins.load import load_rule
from kerneldecl.rule import Rule

RNG = np.random.default_rng(3)


def rule(name: str, **attrs: Any) -> Rule:
    return load_rule(REPOSITORY, name)(**attrs)


def checked(name: str, **attrs: Any) -> Any:
    instance = rule(name, **attrs)
    assert list(instance.problems()) == []
    return instance


POOLS = st.fixed_dictionaries(
    {name: st.integers(1, 7) for name in ("h", "w")}
    | {name: st.integers(1, 3) for name in ("n", "c", "kh", "kw", "stride")}
    | {"padding": st.integers(0, 1), "op": st.sampled_from(["max", "mean"]), "count_padding": st.booleans()}
)


@given(POOLS)
def test_a_pool_is_what_plain_loops_compute(attrs: dict[str, Any]) -> None:
    made = rule("pool2d", **attrs)
    assume(not list(made.problems()))
    (x,) = made.inputs(np.random.default_rng(1))
    y = made.reference(x)
    assert y.shape == made.signature().outputs[0].shape
    for n, row, column, c in np.ndindex(*y.shape):
        rows = [row * attrs["stride"] - attrs["padding"] + i for i in range(attrs["kh"])]
        columns = [column * attrs["stride"] - attrs["padding"] + j for j in range(attrs["kw"])]
        inside = [float(x[n, i, j, c]) for i, j in itertools.product(rows, columns) if 0 <= i < attrs["h"] and 0 <= j < attrs["w"]]
        count = attrs["kh"] * attrs["kw"] if attrs["count_padding"] else len(inside)
        want = max(inside) if attrs["op"] == "max" else sum(inside) / count
        assert math.isclose(y[n, row, column, c], want, rel_tol=1e-6, abs_tol=1e-6)


def test_both_layouts_of_a_pool_are_the_same_pool() -> None:
    attrs = {"op": "mean", "n": 2, "h": 5, "w": 4, "c": 3, "kh": 3, "kw": 2, "stride": 2, "padding": 1}
    nhwc, nchw = checked("pool2d", **attrs), checked("pool2d", layout="nchw", **attrs)
    x = RNG.standard_normal((2, 5, 4, 3))
    np.testing.assert_array_equal(nhwc.reference(x).transpose(0, 3, 1, 2), nchw.reference(x.transpose(0, 3, 1, 2)))


def test_batch_norm_has_zero_mean_and_unit_variance() -> None:
    x = RNG.standard_normal((64, 3, 5)) * 3 + 2
    made = checked("batch_norm", shape=x.shape, eps=1e-12)
    y = made.reference(x, x.mean((0, 2)), x.var((0, 2)), np.ones(3), np.zeros(3))
    np.testing.assert_allclose((y.mean((0, 2)), y.var((0, 2))), (np.zeros(3), np.ones(3)), atol=1e-9)
    assert (checked("batch_norm", shape=x.shape, activation="relu").reference(*map(np.asarray, (x, *[np.ones(3)] * 4))) >= 0).all()
    assert made.inputs(np.random.default_rng(1))[2].min() > 0, "variances are positive"


def test_lookups_reach_both_ends_and_count_each_row_once() -> None:
    made = checked("embedding", indices=(7, 3), rows=5, columns=4, dtype="float16", index_dtype="int32")
    table, indices = made.inputs(np.random.default_rng(1))
    assert {indices.min(), indices.max()} == {0, 4}
    assert (made.reference(table, indices)[2, 1] == table[indices[2, 1]]).all()
    assert made.least_bytes() == 21 * 4 + (5 + 21) * 4 * 2


def test_the_first_of_equals_is_found() -> None:
    x = np.array([[1.0, 3.0, 3.0, -2.0, -2.0]], np.float32)
    assert checked("arg_reduce", op="argmax", shape=(1, 5)).reference(x).tolist() == [1]
    assert checked("arg_reduce", op="argmin", shape=(1, 5)).reference(x).tolist() == [3]


def test_an_expression_broadcasts_and_is_cast() -> None:
    made = checked("expression", expr="where(x < 0, -y, max(x, y) / 2) + 1", shapes=((2, 3), (3,)), out_dtype="int32")
    x, y = np.array([[-1.0, 4, 6], [2, -3, 0]]), np.array([1.0, 2, 8])
    assert made.reference(x, y).tolist() == [[0, 3, 5], [2, -1, 5]]
    assert [arg.name for arg in made.signature().args] == ["X", "Y", "O"]
    assert made.flops() == 6 * 6


MISTAKES = [
    ("expression", {"expr": "x +", "shapes": ((2,),)}, "expr is no expression: invalid syntax"),
    ("expression", {"expr": "__import__('os')", "shapes": ((2,),)}, "expr calls __import__, which is not known; there are abs, "),
    ("expression", {"expr": "x.real", "shapes": ((2,),)}, "expr has x.real, which has no meaning here; "),
    ("expression", {"expr": "[x for x in y]", "shapes": ((2,),)}, "expr has [x for x in y], which has no meaning here; "),
    ("expression", {"expr": "(lambda: x)()", "shapes": ((2,),)}, "expr calls lambda: x, which is not known; "),
    ("expression", {"expr": "x if y else z", "shapes": ((2,),)}, "expr has x if y else z, which has no meaning here; "),
    ("expression", {"expr": "True", "shapes": ((2,),)}, "expr has True, which has no meaning here; "),
    ("expression", {"expr": "gelu(x, y)", "shapes": ((2,), (2,))}, "expr calls gelu with 2 operands; it takes 1"),
    ("expression", {"expr": "max(x, y=1)", "shapes": ((2,),)}, "expr calls max with 2 operands; it takes 2"),
    ("expression", {"expr": "x < y", "shapes": ((2,), (2,))}, "expr compares outside of where(…): x < y"),
    ("expression", {"expr": "where(x, y, x)", "shapes": ((2,), (2,))}, "expr has x where two values are compared, by one of <, "),
    ("expression", {"expr": "where(0 < x < 1, y, x)", "shapes": ((2,), (2,))}, "expr has 0 < x < 1 where two values are compared, "),
    ("expression", {"expr": "a + x", "shapes": ((2,),)}, "expr reads a, which is no input; inputs are x, y, z, w, v, u"),
    ("expression", {"expr": "x + z", "shapes": ((2,), (2,))}, "expr reads z, but shapes gives x, y alone; write a shape for each"),
    ("expression", {"expr": "x", "shapes": ((2,), (2,))}, "expr does not read y, whose shape is given; leave it out"),
    ("expression", {"expr": "x + y", "shapes": ((2,), (3,))}, "shapes (2,), (3,) do not broadcast; write 1 or equal extents"),
    ("expression", {"expr": "x", "shapes": ((2,),), "dtype": "int8"}, "dtype int8 is an integer's; "),
    ("expression", {"expr": "+".join(["x"] * 300), "shapes": ((2,),)}, "expr has more than 200 parts; rule tensor_ir takes programs"),
    (
        "pool2d",
        {"op": "max", "n": 1, "h": 2, "w": 9, "c": 1, "kh": 3, "kw": 3},
        "kh 3 is larger than the padded image, 2; write a smaller one",
    ),
    ("pool2d", {"op": "max", "n": 1, "h": 9, "w": 9, "c": 1, "kh": 3, "kw": 3, "padding": 2}, "padding 2 is more than half of a window, "),
    ("batch_norm", {"shape": (3,), "axis": 1}, "axis 1 is out of range for a shape of 1 extents"),
    ("embedding", {"indices": (), "rows": 3, "columns": 2}, "indices has no extent; write indices = [512], or other extents"),
    ("arg_reduce", {"op": "argmax", "shape": (3,)}, "shape has 1 extents; expected at least 2, one of which Y keeps"),
]


@pytest.mark.parametrize(("name", "attrs", "sentence"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_what_makes_no_sense_is_one_sentence(name: str, attrs: dict[str, Any], sentence: str) -> None:
    (problem,) = rule(name, **attrs).problems()
    assert problem.startswith(sentence)
