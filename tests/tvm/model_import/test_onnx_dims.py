"""Names of dynamic dimensions of ONNX files, whatever exporters call them, and the sizes that take their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from onnx import TensorProto, helper

from kerneldecl.compiler.model_import.onnx_dims import dims_of, shapes_of, with_named_dims, with_sizes


def model(*shapes: Sequence[int | str | None]) -> Any:
    inputs = [helper.make_tensor_value_info(f"x.{at}", TensorProto.FLOAT, shape) for at, shape in enumerate(shapes)]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["out", 4])
    return helper.make_model(helper.make_graph([helper.make_node("Identity", ["x.0"], ["y"])], "net", inputs, [output]))


def extents(given: Any) -> list[list[int | str]]:
    return [[dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in given.graph.input]


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        (["batch", 4], ["batch", 4]),
        ([None, None], ["x_0_0", "x_0_1"]),
        (["batch size", "2nd"], ["batch_size", "n_2nd"]),
        (["class", -1], ["n_class", "x_0_1"]),
        (["past + seq", "past", "seq"], ["past + seq", "past", "seq"]),
        (["batch-size", 4], ["batch_size", 4]),
    ],
)
def test_each_dynamic_extent_has_a_name(shape: Sequence[int | str | None], names: Sequence[int | str]) -> None:
    assert extents(with_named_dims(model(shape))) == [names]


def test_a_model_without_dynamic_extents_stays_as_it_is() -> None:
    static = model([2, 4])
    assert with_named_dims(static) is static
    assert dims_of(static) == []


def test_sizes_take_the_place_of_names_in_expressions_as_well() -> None:
    given = model(["batch", "seq"], ["batch", "past + seq"], ["batch", "past"])
    assert dims_of(given) == ["batch", "seq", "past"]
    assert extents(with_sizes(given, {"seq": 1, "batch": 2})) == [[2, 1], [2, "past + 1"], [2, "past"]]
    whole = with_sizes(given, {"seq": 1, "batch": 2, "past": 7})
    assert extents(whole) == [[2, 1], [2, 8], [2, 7]]
    assert dims_of(whole) == []
    assert not whole.graph.output[0].type.tensor_type.shape.dim[0].HasField("dim_param"), "the name of another value's extent says nothing"


def test_shapes_have_one_variable_for_each_name() -> None:
    given = model(["batch", 4], ["batch * 2 - 1", "batch"])
    assert shapes_of(given, {"batch": 5}.__getitem__) == {"x.0": [5, 4], "x.1": [9, 5]}
