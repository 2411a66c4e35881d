"""Loops whose number of steps is known are written out: inside one another, around branches, and with what they do not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from kerneldecl.compiler.model_import.from_onnx import module_of_model
from kerneldecl.compiler.model_import.model_error import ModelError
from kerneldecl.compiler.model_import.read_model import fused


def value(name: str, dtype: int = TensorProto.FLOAT, shape: Sequence[int] = (3,)) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def body(name: str, nodes: Sequence[Any], outputs: Sequence[Any], weights: Sequence[Any] = ()) -> Any:
    """Return a Loop's body, whose values have the same names in every loop."""
    ends = [value("step", TensorProto.INT64, ()), value("goes_on", TensorProto.BOOL, ()), value("old")]
    return helper.make_graph(list(nodes), name, ends, [value("goes_on_" + name, TensorProto.BOOL, ()), *outputs], list(weights))


def model(nodes: Sequence[Any], count: int | None) -> Any:
    ends = [value("x"), value("last"), value("all", shape=(count or 1, 3))]
    weights = [] if count is None else [numpy_helper.from_array(np.array(count, "int64"), "count")]
    inputs = ends[:1] if count is not None else [ends[0], value("count", TensorProto.INT64, ())]
    graph = helper.make_graph(list(nodes), "net", inputs, ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def doubled_and_summed() -> list[Any]:
    """Return a Loop that adds (step + 1) * 2^2 * x to its state: x is doubled twice by a loop in it."""
    twice = numpy_helper.from_array(np.array(2, "int64"), "twice")
    inner = body(
        "inner",
        [helper.make_node("Identity", ["goes_on"], ["goes_on_inner"]), helper.make_node("Add", ["old", "old"], ["new"])],
        [value("new")],
    )
    one = numpy_helper.from_array(np.array(1, "float32"), "one")
    outer = body(
        "outer",
        [
            helper.make_node("Identity", ["goes_on"], ["goes_on_outer"]),
            helper.make_node("Loop", ["twice", "", "x"], ["large"], body=inner),
            helper.make_node("Cast", ["step"], ["number"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["number", "one"], ["factor"]),
            helper.make_node("Mul", ["large", "factor"], ["share"]),
            helper.make_node("Add", ["old", "share"], ["sum"]),
            helper.make_node("Identity", ["sum"], ["seen"]),
        ],
        [value("sum"), value("seen")],
        [twice, one],
    )
    return [helper.make_node("Loop", ["count", "", "x"], ["last", "all"], body=outer)]


def test_a_loop_in_a_loop_is_written_out() -> None:
    executable = tvm.relax.build(fused(module_of_model(model(doubled_and_summed(), 3))), "llvm")
    x = np.array([1, -2, 0.5], "float32")
    last, every = tvm.relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x))
    np.testing.assert_array_equal(every.numpy(), [5 * x, 13 * x, 25 * x])
    np.testing.assert_array_equal(last.numpy(), 25 * x)


@pytest.mark.parametrize("count", [None, 0, 10_000])
def test_a_loop_of_unknown_length_one_without_steps_and_a_very_long_one_are_refused(count: int | None) -> None:
    with pytest.raises(ModelError) as refusal:
        module_of_model(model(doubled_and_summed(), count))
    assert refusal.value.sentence == "no converter for ONNX's operator Loop (node that gives last, all)"
    assert refusal.value.hint
