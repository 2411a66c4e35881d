"""Owns how operators that TVM's importer lacks are written out in those that it has, where ONNX itself defines them so.

Knows nothing of TVM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BROKEN = frozenset({"Attention", "AffineGrid", "GroupNormalization", "MeanVarianceNormalization"})
"""Operators that TVM's importer has and gets wrong: its Attention is that of com.microsoft, with other inputs and attributes."""


def with_functions_written_out(model: Any, knows: Callable[[str], bool]) -> Any:
    """Return the model without operators that are functions of others and that an importer does not know."""
    import onnx
    from onnx.inliner import inline_local_functions, inline_selected_functions

    if model.functions:
        model = inline_local_functions(model)
    used = {(node.domain, node.op_type) for node in model.graph.node}
    wanted = [(domain, name) for domain, name in used if domain in {"", "ai.onnx"} and (name in BROKEN or not knows(name))]
    if not wanted:
        return model
    model = _with_defaults(model, {name for _, name in wanted})
    # A function may depend on the types of its inputs, of which initializers have none of their own.
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    inferred.graph.value_info.extend(
        onnx.helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in inferred.graph.initializer
    )
    written = inline_selected_functions(inferred, wanted, inline_schema_functions=True)
    left = {(node.domain, node.op_type) for node in written.graph.node}
    # A function's own operators may be functions that the importer does not know.
    return with_functions_written_out(written, knows) if left - used and any(not knows(name) for _, name in left - used) else written


def _with_defaults(model: Any, operators: set[str]) -> Any:
    """Return the model with default attributes written at nodes of these operators: onnx's inliner leaves them out."""
    import onnx

    version = next(each.version for each in model.opset_import if each.domain in {"", "ai.onnx"})
    written = onnx.ModelProto()
    written.CopyFrom(model)
    for node in written.graph.node:
        if node.op_type in operators:
            given = {attribute.name for attribute in node.attribute}
            schema = onnx.defs.get_schema(node.op_type, version, node.domain)
            defaults = (each.default_value for name, each in schema.attributes.items() if name not in given)
            node.attribute.extend(default for default in defaults if default.name)
    return written
