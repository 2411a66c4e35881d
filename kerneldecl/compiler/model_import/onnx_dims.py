"""Owns the dynamic dimensions of an ONNX model's inputs: their names, and the model in which some of them have sizes.

Knows nothing of TVM, nor of what is computed.

Exporters name a dimension by a word (`batch`), by an expression of others (`past_sequence_length + sequence_length`), by any other
text, or not at all.
"""

from __future__ import annotations

import ast
import keyword
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def with_named_dims(model: Any) -> Any:
    """Return the model in which each dynamic extent of an input is a name, or an expression of names that stand alone elsewhere.

    An extent without a name is called after its input and axis: x_0. What is no name becomes one: `batch size` is batch_size.
    """
    import onnx

    if not any(_dynamic(model.graph)):
        return model
    named = onnx.ModelProto()
    named.CopyFrom(model)
    words = {dim.dim_param for _, _, dim in _dynamic(named.graph) if _is_name(dim.dim_param)}
    for value, axis, dim in _dynamic(named.graph):
        text = dim.dim_param.strip()
        if not text:
            dim.dim_param = _word(f"{value.name}_{axis}")
        elif not _is_name(text) and not _names_in(text) & words == _names_in(text) != set():
            dim.dim_param = _word(text)
    return named


def dims_of(model: Any) -> list[str]:
    """Return the names of the dynamic dimensions of a model with named ones, in the order in which its inputs have them."""
    texts = (dim.dim_param for _, _, dim in _dynamic(model.graph))
    return list(dict.fromkeys(text for text in texts if _is_name(text)))


def with_sizes(model: Any, sizes: Mapping[str, int]) -> Any:
    """Return a model with named dimensions in which some have sizes; what it says of other values' dynamic extents is forgotten."""
    import onnx

    sized = onnx.ModelProto()
    sized.CopyFrom(model)
    for _, _, dim in _dynamic(sized.graph):
        text = _substituted(dim.dim_param, sizes)
        if _names_in(text):
            dim.dim_param = text
        else:
            dim.dim_value = _value(_parsed(text), sizes.__getitem__)
    for value in (*sized.graph.value_info, *sized.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_param"):
                dim.Clear()
    return sized


def shapes_of(model: Any, variable: Callable[[str], Any]) -> dict[str, list[Any]]:
    """Return the shapes of a model's inputs of known rank, with a variable for each name of a dynamic dimension."""
    given = {value.name: value.type.tensor_type for value in _inputs(model.graph)}
    return {name: [_extent(dim, variable) for dim in tensor.shape.dim] for name, tensor in given.items() if tensor.HasField("shape")}


def _inputs(graph: Any) -> Iterator[Any]:
    weights = {each.name for each in graph.initializer}
    yield from (value for value in graph.input if value.name not in weights)


def _dynamic(graph: Any) -> Iterator[tuple[Any, int, Any]]:
    """Yield each dynamic extent of an input, with the input and its axis; some exporters write -1 for one."""
    for value in _inputs(graph):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value") or dim.dim_value < 0:
                yield value, axis, dim


def _extent(dim: Any, variable: Callable[[str], Any]) -> Any:
    return dim.dim_value if dim.HasField("dim_value") else _value(_parsed(dim.dim_param), variable)


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _word(text: str) -> str:
    word = re.sub(r"\W+", "_", text).strip("_")
    return word if _is_name(word) else f"n_{word}"


def _parsed(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _names_in(text: str) -> set[str]:
    """Return the names in an expression of integers; none where the text is no such expression."""
    try:
        nodes = list(ast.walk(_parsed(text)))
    except SyntaxError:
        return set()
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    known = (ast.Name, ast.Load, ast.BinOp, *_OPERATORS)
    are_known = all(isinstance(node, known) or (isinstance(node, ast.Constant) and type(node.value) is int) for node in nodes)
    return names if are_known else set()


def _substituted(text: str, sizes: Mapping[str, int]) -> str:
    """Return an expression with numbers in the place of some of its names."""
    tree = ast.parse(text.strip(), mode="eval")
    return ast.unparse(_Substitute(sizes).visit(tree))


class _Substitute(ast.NodeTransformer):
    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes

    def visit_Name(self, node: ast.Name) -> ast.expr:  # ast's name
        return ast.Constant(self._sizes[node.id]) if node.id in self._sizes else node


def _value(node: ast.expr, variable: Callable[[str], Any]) -> Any:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return variable(name)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, variable), _value(right, variable))
    raise ValueError(f"{ast.unparse(node)} is no extent")
