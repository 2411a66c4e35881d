"""Owns how an ONNX model with numbers that kernels have no arithmetic for, such as int4, becomes one in the dtypes that hold them.

Knows nothing of TVM, nor of how values are rounded to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kerneldecl.arrays import numpy_dtype
from kerneldecl.compiler.model_import.model_error import ModelError
from kerneldecl.compiler.model_import.onnx_refusals import place
from kerneldecl.compiler.model_import.onnx_types import STORED, element_of, graphs_of, type_name
from kerneldecl.compiler.model_import.onnx_weights import tensors_of

_SAME_TYPE_AS = {"CastLike": 1, "QuantizeLinear": 2}
"""Operators whose result has the type of an input, and its position."""


def with_stored_inputs(model: Any, types: Mapping[str, Any]) -> Any:
    """Return the model with inputs of dtypes that kernels have, and with types that nodes round to written at them.

    Weights follow when they have been read (`store_weights`). `types` are those of all values, by name.
    """
    import onnx

    if not any(_stored(each) for each in types.values()):
        return model
    stored = onnx.ModelProto()
    stored.CopyFrom(model)
    for each in stored.graph.input:
        if dtype := _stored(each.type):
            each.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype))
    for graph in graphs_of(stored.graph):
        for node in graph.node:
            _write_type(node, types)
    return stored


def store_weights(model: Any) -> None:
    """Hold a model's weights, those in its branches among them, in dtypes that kernels have: packed ones are unpacked."""
    from onnx import numpy_helper

    for tensor in tensors_of(model.graph):
        if dtype := STORED.get(type_name(tensor.data_type)):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))


def _write_type(node: Any, types: Mapping[str, Any]) -> None:
    """Make CastLike a Cast, and give QuantizeLinear its output's type, where that is no dtype: the input that tells will have another."""
    import onnx

    at = _SAME_TYPE_AS.get(node.op_type, len(node.input))
    if at >= len(node.input) or not node.input[at]:
        return
    element = element_of(node, types, at)
    if not element:
        raise ModelError(f"the dtype that ONNX's operator {place(node)} gives is not known", "write it as a Cast")
    if element not in STORED:
        return
    name = "to" if node.op_type == "CastLike" else "output_dtype"
    given = [each for each in node.attribute if each.name != name]
    del node.attribute[:]
    node.attribute.extend([*given, onnx.helper.make_attribute(name, onnx.TensorProto.DataType.Value(element))])
    if node.op_type == "CastLike":
        node.op_type = "Cast"
        del node.input[1:]


def _stored(type_: Any) -> str:
    is_tensor = type_.WhichOneof("value") == "tensor_type"
    return STORED.get(type_name(type_.tensor_type.elem_type), "") if is_tensor else ""
