"""Owns the tests of scans and sorts that are written out as sums.

Knows nothing of how sums are scheduled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.scans_and_sorts import MOST_SORTED, ExpandScansAndSorts

NAMES = {"cumsum", "cumprod", "sort", "argsort", "topk"}


def expanded(build: Callable[[relax.Var], relax.Expr], shape: tuple[int, ...], dtype: str) -> tvm.IRModule:
    x, builder = relax.Var("x", relax.TensorType(shape, dtype)), relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(build(x)))
        builder.emit_func_output(out)
    return ExpandScansAndSorts()(builder.get())


def left(mod: tvm.IRModule) -> set[str]:
    found: set[str] = set()

    def note(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            found.add(str(expr.op.name).removeprefix("relax."))

    relax.analysis.post_order_visit(mod["main"], note)
    return found & NAMES


def computed(build: Callable[[relax.Var], relax.Expr], x: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    mod = expanded(build, x.shape, str(x.dtype))
    assert not left(mod)
    machine = relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(x))
    return [each.numpy() for each in found] if not isinstance(found, tvm.runtime.Tensor) else [found.numpy()]


def values(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype("float32")


@pytest.mark.parametrize(("shape", "axis"), [((1,), 0), ((3, 100), 1), ((5, 17, 4), -2), ((2, 1000), -1)])
def test_a_scan_is_numpys(shape: tuple[int, ...], axis: int) -> None:
    x = values(*shape)
    (found,) = computed(lambda x: op.cumsum(x, axis), x)
    np.testing.assert_allclose(found, np.cumsum(x, axis), rtol=1e-4, atol=1e-4)


def test_an_exclusive_scan_begins_with_what_changes_nothing() -> None:
    x = values(2, 37)
    (found,) = computed(lambda x: op.cumsum(x, 1, exclusive=True), x)
    np.testing.assert_allclose(found[:, 1:], np.cumsum(x, 1)[:, :-1], rtol=1e-4, atol=1e-5)
    assert not found[:, 0].any()
    (product,) = computed(lambda x: op.cumprod(x, 0, exclusive=True), x)
    np.testing.assert_allclose(product, [np.ones(37), x[0]], rtol=1e-6)


def test_products_and_sums_of_bools_are_numpys() -> None:
    x = values(6, 23)
    (product,) = computed(lambda x: op.cumprod(x, 1), x)
    np.testing.assert_allclose(product, np.cumprod(x, 1), rtol=1e-4)
    (count,) = computed(lambda x: op.cumsum(x, 1, dtype="int64"), x > 0)
    np.testing.assert_array_equal(count, np.cumsum(x > 0, 1))


@pytest.mark.parametrize(("shape", "axis"), [((9,), 0), ((4, 33, 3), 1)])
def test_sorts_are_numpys_and_keep_the_order_of_equal_elements(shape: tuple[int, ...], axis: int) -> None:
    x = np.round(values(*shape))
    (found,) = computed(lambda x: op.sort(x, axis), x)
    np.testing.assert_array_equal(found, np.sort(x, axis))
    (order,) = computed(lambda x: op.argsort(x, axis, descending=True, dtype="int64"), x)
    np.testing.assert_array_equal(order, np.argsort(-x, axis, kind="stable"))


def test_the_largest_come_with_their_places() -> None:
    x = values(5, 12, 2)
    largest, places = computed(lambda x: op.topk(x, k=3, axis=1, ret_type="both", largest=True, dtype="int32"), x)
    np.testing.assert_array_equal(largest, np.flip(np.sort(x, 1), 1)[:, :3])
    np.testing.assert_array_equal(np.take_along_axis(x, places, 1), largest)
    (smallest,) = computed(lambda x: op.topk(x, k=20, axis=1, ret_type="values", largest=False), x)
    np.testing.assert_array_equal(smallest, np.sort(x, 1))


def test_nan_is_the_largest_and_infinities_stay() -> None:
    x = np.array([1, np.nan, np.inf, -np.inf, 0, np.nan], "float32")
    (found,) = computed(lambda x: op.sort(x, 0), x)
    np.testing.assert_array_equal(found, np.sort(x))


def test_long_rows_and_sizes_known_at_run_time_are_left_to_tvm() -> None:
    assert left(expanded(lambda x: op.sort(x, 1), (2, MOST_SORTED + 1), "float32")) == {"sort"}
    assert not left(expanded(lambda x: op.sort(x, 0), (2, MOST_SORTED + 1), "float32"))
    n = tvm.tirx.Var("n", "int64")
    assert left(expanded(lambda x: op.cumsum(x, 0), (n, 3), "float32")) == {"cumsum"}
