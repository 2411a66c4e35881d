"""Owns ONNX's Loop and Scan whose number of steps is known: the steps stand one after the other in their place.

Knows nothing of TVM, nor of what steps compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerneldecl.compiler.model_import.onnx_types import graphs_of, types_of

MOST_NODES = 20_000
"""Nodes that a loop may become: TVM compiles each."""


@dataclass(frozen=True)
class _Steps:
    """A loop with a known number of steps."""

    node: Any
    body: Any
    count: int
    states: int
    """Values that a step hands to the next; the body's other outputs are stacked."""
    offset: int
    """The body's inputs and outputs before the states: of a Loop the step's number and the condition, and the condition."""
    axes: Sequence[int]
    reverse: Sequence[int]
    """The axis of each stacked output, and whether the last step comes first in it."""


def with_loops_unrolled(model: Any) -> Any:
    """Return the model with the steps of its loops written out; itself where there is none whose number of steps is known."""
    import onnx

    if not any(node.op_type in {"Loop", "Scan"} for node in model.graph.node):
        return model
    known = {each.name: each for each in model.graph.initializer}
    types = types_of(model)
    names: dict[str, str] = {}
    nodes: list[Any] = []
    is_changed = False
    for node in model.graph.node:
        given = _renamed(node, names)
        steps = _loop(given, known) if node.op_type == "Loop" else _scan(given, types, model) if node.op_type == "Scan" else None
        if steps is None or not 0 < steps.count * max(len(steps.body.node), 1) <= MOST_NODES:
            nodes.append(given)
            continue
        nodes += _unrolled(steps, names, _opset(model))
        is_changed = True
    if not is_changed:
        return model
    unrolled = onnx.ModelProto()
    unrolled.CopyFrom(model)
    del unrolled.graph.node[:]
    results = (onnx.helper.make_node("Identity", [names[each.name]], [each.name]) for each in model.graph.output if each.name in names)
    unrolled.graph.node.extend([*nodes, *results])
    return unrolled


def _loop(node: Any, known: Mapping[str, Any]) -> _Steps | None:
    """Return a Loop's steps; None where their number, or whether it goes on, depends on inputs."""
    from onnx import numpy_helper

    body = _attributes(node)["body"]
    most, condition = (known.get(name) for name in node.input[:2])
    goes_on = not node.input[1] or (condition is not None and bool(numpy_helper.to_array(condition).item()))
    if most is None or not goes_on or not _always_goes_on(body):
        return None
    states = len(node.input) - 2
    stacked = len(node.output) - states
    return _Steps(node, body, int(numpy_helper.to_array(most).item()), states, 2, [0] * stacked, [0] * stacked)


def _always_goes_on(body: Any) -> bool:
    """Say whether the condition that a Loop's step gives is the one it was given, or is true."""
    from onnx import numpy_helper

    values = {each.name: each for each in body.initializer}
    makers = {name: node for node in body.node for name in node.output}
    name = body.output[0].name
    while name in makers and makers[name].op_type == "Identity":
        name = makers[name].input[0]
    if name in makers and makers[name].op_type == "Constant":
        values[name] = _attributes(makers[name]).get("value")
    value = values.get(name)
    return name == body.input[1].name or (value is not None and bool(numpy_helper.to_array(value).item()))


def _scan(node: Any, types: Mapping[str, Any], model: Any) -> _Steps | None:
    """Return a Scan's steps; None where what it scans has a dynamic extent, and before opset 9, which scans batches."""
    given = _attributes(node)
    scanned = given["num_scan_inputs"]
    states = len(node.input) - scanned
    stacked = len(node.output) - states
    shape = types[node.input[-1]].tensor_type.shape.dim if node.input[-1] in types else []
    axis = [*given.get("scan_input_axes", [0] * scanned)][-1]
    extent = shape[axis].dim_value if shape else 0
    if _opset(model) < 9 or not extent:
        return None
    axes, reverse = (list(given.get(f"scan_output_{what}", [0] * stacked)) for what in ("axes", "directions"))
    return _Steps(node, given["body"], extent, states, 0, axes, reverse)


def _unrolled(steps: _Steps, names: dict[str, str], opset: int) -> Iterator[Any]:
    """Yield the nodes of all steps, and note what the loop's results are called."""
    import onnx

    body, prefix = steps.body, next(name for name in steps.node.output if name)
    states = list(steps.node.input[2:] if steps.offset else steps.node.input[: steps.states])
    stacked: list[list[str]] = [[] for _ in steps.axes]
    inner = {name for graph in graphs_of(body) for name in _defined(graph)}
    for step in range(steps.count):
        own = {name: f"{prefix}.{step}.{name}" for name in inner}
        yield from _slices(steps, step, own)
        first = steps.offset
        own |= {each.name: state for each, state in zip(body.input[first : first + steps.states], states, strict=True)}
        yield from (onnx.helper.make_node("Constant", [], [own[each.name]], value=each) for each in body.initializer)
        yield from (_renamed(node, own) for node in body.node)
        outputs = [own.get(each.name, each.name) for each in body.output][1 if steps.offset else 0 :]
        states = outputs[: steps.states]
        for found, name in zip(stacked, outputs[steps.states :], strict=True):
            found.append(name)
    names.update({outer: state for outer, state in zip(steps.node.output, states, strict=False) if outer})
    places = zip(steps.node.output[steps.states :], stacked, steps.axes, steps.reverse, strict=True)
    for outer, parts, axis, is_reverse in places:
        if outer:
            yield from _stacked(outer, parts[::-1] if is_reverse else parts, axis, opset)


def _slices(steps: _Steps, step: int, own: Mapping[str, str]) -> Iterator[Any]:
    """Yield the nodes that give a step its number and condition, or its slices of what is scanned."""
    import onnx
    from onnx import numpy_helper

    def constant(value: Any, name: str) -> Any:
        return onnx.helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value))

    import numpy as np

    if steps.offset:
        yield constant(np.array(step, "int64"), own[steps.body.input[0].name])
        yield constant(np.array(True), own[steps.body.input[1].name])
        return
    given = _attributes(steps.node)
    scanned = steps.node.input[steps.states :]
    axes, reverse = (given.get(f"scan_input_{what}", [0] * len(scanned)) for what in ("axes", "directions"))
    for name, inner, axis, is_reverse in zip(scanned, steps.body.input[steps.states :], axes, reverse, strict=True):
        at = f"{own[inner.name]}.at"
        yield constant(np.array(steps.count - 1 - step if is_reverse else step, "int64"), at)
        yield onnx.helper.make_node("Gather", [name, at], [own[inner.name]], axis=axis)


def _stacked(name: str, parts: Sequence[str], axis: int, opset: int) -> Iterator[Any]:
    """Yield the nodes that make one tensor of each step's output, along a new axis."""
    import numpy as np
    import onnx
    from onnx import numpy_helper

    wide, axes = [f"{part}.{name}" for part in parts], f"{name}.axes"
    by_input = opset >= 13
    if by_input:
        yield onnx.helper.make_node("Constant", [], [axes], value=numpy_helper.from_array(np.array([axis], "int64")))
    for part, each in zip(parts, wide, strict=True):
        given: dict[str, Any] = {} if by_input else {"axes": [axis]}
        yield onnx.helper.make_node("Unsqueeze", [part, axes] if by_input else [part], [each], **given)
    yield onnx.helper.make_node("Concat", wide, [name], axis=axis)


def _renamed(node: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of a node, with the graphs in it, whose values have other names."""
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    nodes = [copy]
    for attribute in copy.attribute:
        for graph in graphs_of(attribute.g) if attribute.HasField("g") else ():
            nodes += graph.node
            for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
                value.name = names.get(value.name, value.name)
    for each in nodes:
        for values in (each.input, each.output):
            values[:] = [names.get(name, name) for name in values]
    return copy


def _defined(graph: Any) -> Iterator[str]:
    yield from (each.name for each in (*graph.input, *graph.initializer))
    yield from (name for node in graph.node for name in node.output if name)


def _attributes(node: Any) -> dict[str, Any]:
    import onnx

    return {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}


def _opset(model: Any) -> int:
    return next((int(each.version) for each in model.opset_import if each.domain in {"", "ai.onnx"}), 1)
