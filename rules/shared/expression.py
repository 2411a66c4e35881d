"""Owns expressions of elements, such as gelu(x) * y + 1: parsed from text, checked, and computed in TE and in NumPy.

Knows nothing of shapes. The text is parsed by Python's grammar and never evaluated as Python: only what is listed here has a meaning.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kerneldecl.arrays import Array
from kerneldecl.lazy import np

from .pointwise import OPERATIONS

NAMES = ("x", "y", "z", "w", "v", "u")
"""What the inputs are called, in their order."""
MOST_NODES = 200
"""Of an expression: a longer one is a program, which rule tensor_ir takes."""
_BINARY: Mapping[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.Div: ("div", operator.truediv),
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: Mapping[str, int] = {
    **{name: op.operands for name, op in OPERATIONS.items() if name not in {"copy", "add", "sub", "mul", "div", "maximum", "minimum"}},
    "max": 2,
    "min": 2,
    "log": 1,
    "rsqrt": 1,
    "where": 3,
}
"""Functions by their number of operands; `where(a < b, p, q)` takes a comparison first."""


@dataclass(frozen=True)
class Node:
    """One step of an expression: a name, a number, a function of other steps, or a comparison of two."""

    kind: str
    """`name`, `number`, `compare`, or a function of `_FUNCTIONS`, add, sub, mul, div, neg."""
    operands: tuple[Node, ...] = ()
    value: str | float = ""


class ExpressionError(ValueError):
    """What is wrong with an expression, as a phrase."""


@functools.cache
def parsed(text: str) -> Node:
    """Return the steps of an expression; raise ExpressionError where it is no expression, or has what is not known."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f"is no expression: {getattr(error, 'msg', error)}") from None
    if sum(1 for _ in ast.walk(tree)) > MOST_NODES:
        raise ExpressionError(f"has more than {MOST_NODES} parts; rule tensor_ir takes programs")
    return _node(tree.body)


def names_in(node: Node) -> Iterator[str]:
    """Yield the inputs that an expression reads, each as often as it reads it."""
    if node.kind == "name":
        yield str(node.value)
    for operand in node.operands:
        yield from names_in(operand)


def flops_of(node: Node) -> int:
    """Return the operations for one element; a function such as exp counts as one."""
    own = {"name": 0, "number": 0, "where": 1, "compare": 1}.get(node.kind)
    if own is None:
        own = OPERATIONS[node.kind].flops if node.kind in OPERATIONS else 1
    return own + sum(map(flops_of, node.operands))


def in_te(node: Node, read: Callable[[str], Any], dtype: str) -> Any:
    """Return the expression of elements in TE; `read` gives the element of an input as `dtype`."""
    from tvm import te, tirx

    if node.kind == "name":
        return read(str(node.value))
    if node.kind == "number":
        return tirx.const(node.value, dtype)
    values = [in_te(operand, read, dtype) for operand in node.operands]
    if node.kind == "compare":
        return _COMPARED[_comparison(str(node.value))](*values)
    if node.kind == "where":
        return tirx.Select(*values)
    return _te_functions(lambda value: tirx.const(value, dtype), te)[node.kind](*values)


def in_numpy(node: Node, arrays: Mapping[str, Array]) -> Array:
    """Return an expression's value on arrays that broadcast."""
    if node.kind == "name":
        return arrays[str(node.value)]
    if node.kind == "number":
        return np.asarray(node.value, next(iter(arrays.values())).dtype)
    values = [in_numpy(operand, arrays) for operand in node.operands]
    if node.kind == "compare":
        return np.asarray(_COMPARED[_comparison(str(node.value))](*values))
    more: dict[str, Callable[..., Any]] = {
        "where": np.where,
        "max": np.maximum,
        "min": np.minimum,
        "log": np.log,
        "rsqrt": lambda x: 1 / np.sqrt(x),
    }
    return np.asarray(more[node.kind](*values) if node.kind in more else OPERATIONS[node.kind].reference(*values))


def _node(tree: ast.expr) -> Node:
    """Return the step of a value."""
    if isinstance(tree, ast.Name) and tree.id in NAMES:
        return Node("name", value=tree.id)
    if isinstance(tree, ast.Constant) and type(tree.value) in {int, float}:
        return Node("number", value=float(tree.value))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return Node("neg", (_node(tree.operand),))
    if isinstance(tree, ast.BinOp) and type(tree.op) in _BINARY:
        return Node(_BINARY[type(tree.op)][0], (_node(tree.left), _node(tree.right)))
    if isinstance(tree, ast.Call):
        return _call(tree)
    raise ExpressionError(_without_meaning(tree))


def _without_meaning(tree: ast.expr) -> str:
    if isinstance(tree, ast.Name):
        return f"reads {tree.id}, which is no input; inputs are {', '.join(NAMES)}, in the order of shapes"
    if isinstance(tree, ast.Compare):
        return f"compares outside of where(…): {ast.unparse(tree)}"
    return f"has {ast.unparse(tree)}, which has no meaning here; there are numbers, inputs, + - * / and {_known()}"


def _condition(tree: ast.expr) -> Node:
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or type(tree.ops[0]) not in _COMPARED:
        raise ExpressionError(f"has {ast.unparse(tree)} where two values are compared, by one of <, <=, >, >=, ==, !=")
    return Node("compare", (_node(tree.left), _node(tree.comparators[0])), type(tree.ops[0]).__name__)


def _call(tree: ast.Call) -> Node:
    name = tree.func.id if isinstance(tree.func, ast.Name) else ast.unparse(tree.func)
    if name not in _FUNCTIONS:
        raise ExpressionError(f"calls {name}, which is not known; there are {_known()}")
    if tree.keywords or len(tree.args) != _FUNCTIONS[name]:
        raise ExpressionError(f"calls {name} with {len(tree.args) + len(tree.keywords)} operands; it takes {_FUNCTIONS[name]}")
    first, *rest = tree.args
    return Node(name, (_condition(first) if name == "where" else _node(first), *map(_node, rest)))


def _known() -> str:
    return ", ".join(sorted(_FUNCTIONS))


def _comparison(name: str) -> type[ast.cmpop]:
    return next(kind for kind in _COMPARED if kind.__name__ == name)


def _te_functions(const: Callable[[float], Any], te: Any) -> dict[str, Callable[..., Any]]:
    """Return every function on expressions of TE, each written as `pointwise.lower` writes its stages."""

    def hard_sigmoid(x: Any) -> Any:
        return te.div(te.min(te.max(x + const(3), const(0)), const(6)), const(6))

    def gelu_tanh(x: Any) -> Any:
        return const(0.5) * x * (const(1) + te.tanh(const((2 / np.pi) ** 0.5) * x * (const(1) + const(0.044715) * x * x)))

    return {
        **dict(_BINARY.values()),
        "div": te.div,
        "neg": lambda x: x * const(-1),
        "abs": te.abs,
        "relu": lambda x: te.max(x, const(0)),
        "relu6": lambda x: te.min(te.max(x, const(0)), const(6)),
        "sqrt": te.sqrt,
        "rsqrt": te.rsqrt,
        "exp": te.exp,
        "log": te.log,
        "tanh": te.tanh,
        "sigmoid": te.sigmoid,
        "silu": lambda x: x * te.sigmoid(x),
        "silu_mul": lambda x, y: x * te.sigmoid(x) * y,
        "gelu_mul": lambda x, y: x * (const(0.5) + te.erf(x * const(0.5**0.5)) * const(0.5)) * y,
        "gelu_tanh_mul": lambda x, y: gelu_tanh(x) * y,
        "gelu": lambda x: x * (const(0.5) + te.erf(x * const(0.5**0.5)) * const(0.5)),
        "gelu_tanh": gelu_tanh,
        "hard_sigmoid": hard_sigmoid,
        "hard_swish": lambda x: x * hard_sigmoid(x),
        "max": te.max,
        "min": te.min,
    }
