"""Owns what an ONNX graph computes of constants and static shapes alone: it becomes initializers, as TVM's importer wants sizes.

Knows nothing of TVM.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

LARGEST = 1 << 16
"""Elements of the largest constant that is computed here: TVM folds larger ones, such as transposed weights."""
_RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})


def with_known_constants(model: Any) -> Any:
    """Return the model with initializers in place of nodes whose inputs are known, shapes of static tensors among them."""
    import onnx
    from onnx import numpy_helper

    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    shapes = _static_shapes(inferred)
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
            waiting.extendleft(reversed(_branch(node, bool(values[node.input[0]].item()))))
            continue
        found = None if outputs & set(node.output) else _value(node, values, shapes, model)
        if found is None:
            kept.append(node)
            continue
        values[node.output[0]] = found
        folded.graph.initializer.append(numpy_helper.from_array(found, node.output[0]))
    del folded.graph.node[:]
    folded.graph.node.extend(kept)
    return folded


def _branch(node: Any, condition: bool) -> list[Any]:
    """Return the nodes of the branch that an If takes, and those that name its results; ONNX wants names unique in all of a graph."""
    import onnx

    name = "then_branch" if condition else "else_branch"
    branch = next(attribute.g for attribute in node.attribute if attribute.name == name)
    weights = [onnx.helper.make_node("Constant", [], [each.name], value=each) for each in branch.initializer]
    results = [onnx.helper.make_node("Identity", [inner.name], [outer]) for inner, outer in zip(branch.output, node.output, strict=True)]
    return [*weights, *branch.node, *results]


def _static_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    found = {each.name: tuple(each.dims) for each in model.graph.initializer}
    for info in (*model.graph.input, *model.graph.value_info, *model.graph.output):
        tensor = info.type.tensor_type
        if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
            found[info.name] = tuple(dim.dim_value for dim in tensor.shape.dim)
    return found


def _value(node: Any, values: dict[str, Any], shapes: dict[str, tuple[int, ...]], model: Any) -> Any:
    """Return the array that a node gives; None where it is not known."""
    import numpy as np

    if node.domain not in {"", "ai.onnx"} or len(node.output) != 1 or node.op_type in _RANDOM or _has_graph(node):
        return None
    given = [name for name in node.input if name]
    if node.op_type in {"Shape", "Size"} and given[0] in shapes:
        values = {**values, given[0]: np.broadcast_to(np.zeros((), "int8"), shapes[given[0]])}
    if any(name not in values for name in given) or (not given and node.op_type != "Constant"):
        return None
    found = _computed(node, {name: values[name] for name in given}, model)
    is_number = isinstance(found, (np.ndarray, np.generic)) and np.asarray(found).dtype.kind in "biuf"
    return np.asarray(found) if is_number and np.size(found) <= LARGEST else None


def _computed(node: Any, given: dict[str, Any], model: Any) -> Any:
    """Return what onnx's own reference computes of a node; None where it has no implementation."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    inputs = [onnx.ValueInfoProto(name=name) for name in given]
    graph = onnx.helper.make_graph([node], "node", inputs, [onnx.ValueInfoProto(name=node.output[0])])
    try:
        return next(iter(ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=model.opset_import)).run(None, given)))
    except (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def _has_graph(node: Any) -> bool:
    return any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
