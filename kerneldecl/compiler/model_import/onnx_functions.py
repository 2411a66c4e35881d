"""Owns how operators that TVM's importer lacks or gets wrong are written out in others, where ONNX itself defines them so.

Knows nothing of TVM.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

_OWN_DOMAIN = "kerneldecl.written"


def _always(_: Any) -> bool:
    return True


def _has_statistics(node: Any) -> bool:
    return len([name for name in node.output if name]) > 1


def _is_not_of_the_last_axis(node: Any) -> bool:
    return any(attribute.name == "axis" and attribute.i != -1 for attribute in node.attribute)


BROKEN: Mapping[str, Callable[[Any], bool]] = {
    "AffineGrid": _always,
    "Attention": _always,  # TVM's is that of com.microsoft, with other inputs and attributes
    "Elu": _always,  # TVM's has float32 constants, whatever the dtype
    "GroupNormalization": _always,
    "LayerNormalization": _has_statistics,
    "MeanVarianceNormalization": _always,
    "RMSNormalization": _is_not_of_the_last_axis,
}
"""Operators that TVM's importer has and gets wrong, and at which nodes."""


def with_functions_written_out(model: Any, known: Collection[str]) -> Any:
    """Return the model without operators that are functions of others and that an importer does not know."""
    import onnx
    from onnx.inliner import inline_local_functions

    if model.functions:
        model = inline_local_functions(model)
        if model.functions:
            raise ValueError(f"the function {model.functions[0].name} is of another opset than the model")
    wanted = [at for at, node in enumerate(model.graph.node) if _is_wanted(node, known)]
    if not wanted:
        return model
    written, opset = _with_types(model), _opset(model)
    types = {each.name: each.type for each in (*written.graph.input, *written.graph.value_info, *written.graph.output)}
    for at in wanted:
        node = written.graph.node[at]
        function = _definition(node, opset, types)
        if function is not None:
            function.domain, function.name = _OWN_DOMAIN, f"{node.op_type}_{at}"
            node.domain, node.op_type = function.domain, function.name
            written.functions.append(function)
    if not written.functions:
        return model
    written.opset_import.append(onnx.helper.make_opsetid(_OWN_DOMAIN, 1))
    # A function may be written for an older opset than the model's; its own operators may be functions that the importer does not know.
    return with_functions_written_out(inline_local_functions(written, convert_version=True), known)


def _is_wanted(node: Any, known: Collection[str]) -> bool:
    return node.domain in {"", "ai.onnx"} and (node.op_type not in known or BROKEN.get(node.op_type, _never)(node))


def _never(_: Any) -> bool:
    return False


def _opset(model: Any) -> int:
    return next((int(each.version) for each in model.opset_import if each.domain in {"", "ai.onnx"}), 1)


def _with_types(model: Any) -> Any:
    """Return the model with the type of each value: a function may depend on those of its inputs, and so does its conversion."""
    import onnx

    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    weights = (onnx.helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in inferred.graph.initializer)
    inferred.graph.value_info.extend(weights)
    return inferred


def _definition(node: Any, opset: int, types: Mapping[str, Any]) -> Any:
    """Return the function that ONNX defines an operator by, for this node; None where it does not."""
    import onnx

    try:
        schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return None
    plain, dependent = (
        [version for version in versions if version <= opset]
        for versions in (schema.function_opset_versions, schema.context_dependent_function_opset_versions)
    )
    # onnx gives a function no default attributes.
    given = {attribute.name for attribute in node.attribute}
    defaults = (each.default_value for name, each in schema.attributes.items() if name not in given)
    node.attribute.extend(default for default in defaults if default.name)
    if plain:
        content = schema.get_function_with_opset_version(max(plain))
    elif dependent:
        inputs = [types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
        content = schema.get_context_dependent_function_with_opset_version(max(dependent), node.SerializeToString(), inputs)
    else:
        return None
    function = onnx.FunctionProto()
    function.ParseFromString(content)
    return function
