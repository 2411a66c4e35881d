"""Owns what types the values of an ONNX model have, and the dtype in which kernels hold those that they have no arithmetic for.

Knows nothing of TVM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

STORED: Mapping[str, str] = {
    "INT2": "int8",
    "INT4": "int8",
    "UINT2": "uint8",
    "UINT4": "uint8",
    "FLOAT4E2M1": "float16",
    "FLOAT6E2M3": "float16",
    "FLOAT6E3M2": "float16",
    "FLOAT8E4M3FNUZ": "float16",
    "FLOAT8E5M2FNUZ": "float16",
    "FLOAT8E8M0": "float32",
}
"""The dtype in which values of each of ONNX's types are held."""


def types_of(model: Any) -> dict[str, Any]:
    """Return the type of each value of a model, those in its branches among them, as far as onnx knows it."""
    import onnx

    return types_in(onnx.shape_inference.infer_shapes(model).graph)


def types_in(graph: Any) -> dict[str, Any]:
    """Return the type of each value that a graph, or one in its nodes, says."""
    import onnx

    found: dict[str, Any] = {}
    for each in graphs_of(graph):
        found.update((value.name, value.type) for value in (*each.input, *each.value_info, *each.output))
        found.update((weight.name, onnx.helper.make_tensor_type_proto(weight.data_type, weight.dims)) for weight in each.initializer)
    return found


def graphs_of(graph: Any) -> Iterator[Any]:
    """Yield a graph and those in its nodes, such as branches."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_of(attribute.g)


def element_of(node: Any, types: Mapping[str, Any], at: int = 0) -> str:
    """Return the name of the element type of a node's input; empty where it is not known."""
    found = types.get(node.input[at]) if len(node.input) > at else None
    return type_name(found.tensor_type.elem_type) if found is not None else ""


def type_name(element: int) -> str:
    """Return the name of an element type, such as INT4."""
    import onnx

    return str(onnx.TensorProto.DataType.Name(element))
