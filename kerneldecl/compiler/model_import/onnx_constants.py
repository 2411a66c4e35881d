"""Owns what an ONNX graph computes of constants and static shapes alone: it becomes initializers, as TVM's importer wants sizes.

Knows nothing of TVM.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from kerneldecl.compiler.model_import.onnx_types import types_in

LARGEST = 1 << 16
"""Elements of the largest constant that is computed here: TVM folds larger ones, such as transposed weights."""
_RANDOM = frozenset({"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})


def with_known_constants(model: Any) -> Any:
    """Return the model with initializers in place of nodes whose inputs are known, shapes of static tensors among them."""
    import onnx
    from onnx import numpy_helper

    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    stand_ins = _stand_ins(inferred)
    known = {each.name: each for each in model.graph.initializer if math.prod(each.dims) <= LARGEST}
    values = {name: numpy_helper.to_array(each) for name, each in known.items() if each.data_type != onnx.TensorProto.STRING}
    outputs = {output.name for output in model.graph.output}
    kept = []
    folded = onnx.ModelProto()
    folded.CopyFrom(model)
    waiting = deque(model.graph.node)
    while waiting:
        node = waiting.popleft()
        if node.op_type == "If" and node.input[0] in values:
            waiting.extendleft(reversed(branch_of(node, bool(values[node.input[0]].item()))))
            continue
        found = [] if outputs & set(node.output) else _values(node, values, stand_ins, model)
        if not found:
            kept.append(node)
        for name, value in zip(node.output, found, strict=False):
            values[name] = value
            folded.graph.initializer.append(numpy_helper.from_array(value, name))
    del folded.graph.node[:]
    folded.graph.node.extend(kept)
    return folded


def branch_of(node: Any, condition: bool) -> list[Any]:
    """Return the nodes of the branch that an If takes, and those that name its results; ONNX wants names unique in all of a graph."""
    import onnx

    name = "then_branch" if condition else "else_branch"
    branch = next(attribute.g for attribute in node.attribute if attribute.name == name)
    weights = [onnx.helper.make_node("Constant", [], [each.name], value=each) for each in branch.initializer]
    results = [onnx.helper.make_node("Identity", [inner.name], [outer]) for inner, outer in zip(branch.output, node.output, strict=True)]
    return [*weights, *branch.node, *results]


def _stand_ins(model: Any) -> dict[str, Any]:
    """Return an array without memory for each value of known shape or dtype: what Shape and CastLike give depends on no elements."""
    import numpy as np
    import onnx

    found = {}
    for name, type_ in types_in(model.graph).items():
        tensor = type_.tensor_type
        if not tensor.elem_type or tensor.elem_type == onnx.TensorProto.STRING:
            continue
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        is_static = tensor.HasField("shape") and all(dim.HasField("dim_value") and dim.dim_value >= 0 for dim in tensor.shape.dim)
        shape = tuple(dim.dim_value for dim in tensor.shape.dim) if is_static else ()
        found[name] = _StandIn(np.broadcast_to(np.zeros((), dtype), shape), is_static)
    return found


class _StandIn(NamedTuple):
    array: Any
    is_static: bool
    """Its shape is the value's."""


def _values(node: Any, values: dict[str, Any], stand_ins: dict[str, _StandIn], model: Any) -> list[Any]:
    """Return the arrays that a node gives; none where they are not known."""
    given = [name for name in node.input if name]
    unread = {"Shape": given[:1], "Size": given[:1], "CastLike": given[1:]}.get(node.op_type, [])
    stand = {name: stand_ins[name] for name in unread if name in stand_ins}
    return evaluated(
        node, {**values, **{name: each.array for name, each in stand.items() if each.is_static or node.op_type == "CastLike"}}, model
    )


def evaluated(node: Any, values: Mapping[str, Any], model: Any) -> list[Any]:
    """Return the arrays that a node of a model gives of arrays, by the names of its inputs; none where it cannot be computed here."""
    import numpy as np

    if node.domain not in {"", "ai.onnx"} or node.op_type in _RANDOM or _has_graph(node) or "" in node.output:
        return []
    given = [name for name in node.input if name]
    if any(name not in values for name in given) or (not given and node.op_type != "Constant"):
        return []
    found = [np.asarray(each) for each in _computed(node, {name: values[name] for name in given}, model) if each is not None]
    are_numbers = len(found) == len(node.output) and all(each.dtype.kind in "biuf" and each.size <= LARGEST for each in found)
    return found if are_numbers else []


def _computed(node: Any, given: dict[str, Any], model: Any) -> list[Any]:
    """Return what onnx's own reference computes of a node; nothing where it has no implementation."""
    import numpy as np
    import onnx
    from onnx.reference import ReferenceEvaluator

    inputs, outputs = ([onnx.ValueInfoProto(name=name) for name in names] for names in (given, node.output))
    graph = onnx.helper.make_graph([node], "node", inputs, outputs)
    try:
        found = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=model.opset_import)).run(None, given)
    except (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return []
    return [each for each in found if isinstance(each, (np.ndarray, np.generic))]


def _has_graph(node: Any) -> bool:
    return any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
