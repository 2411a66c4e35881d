"""Owns linear layers in a graph: a matmul by constant weights, with the cast of its accumulators and the addition of a bias behind it.

Knows nothing of what reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.named_constants import Array, constant, is_array
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape


@dataclass(frozen=True)
class Linear:
    """A linear layer of a matrix."""

    call: relax.Call
    """The matmul."""
    steps: tuple[relax.Var, ...]
    """What the matmul gives, then the cast and the sum with the bias, where it has these, in any order."""
    operators: tuple[str, ...]
    """The operator of each step."""
    bias: relax.Expr | None

    @property
    def last(self) -> relax.Var:
        return self.steps[-1]

    @property
    def weights(self) -> relax.Expr:
        return self.call.args[1]

    @property
    def width(self) -> int:
        return (static_shape(self.call) or (0,))[-1]

    def emitted(self, builder: Any, x: relax.Expr, weights: tuple[Array, str], bias: tuple[Array, str] | None) -> relax.Expr:
        """Emit a layer of the same steps with other weights and bias; each has a name."""
        value = builder.emit(op.matmul(x, constant(weights[0], dtype_of(self.weights), weights[1]), out_dtype=self.call.attrs.out_dtype))
        for step, operator in zip(self.steps[1:], self.operators[1:], strict=True):
            if operator == "relax.astype":
                value = builder.emit(op.astype(value, dtype_of(step)))
            elif bias is not None:
                value = builder.emit(op.add(value, constant(bias[0], dtype_of(self.bias), bias[1])))
        return value


def linears(graph: Dataflow) -> Iterator[Linear]:
    """Yield the linear layers of matrices by constant weights, in order."""
    for var in graph.values:
        call = graph.call(var)
        if call is None or call.op.name != "relax.matmul" or not isinstance(call.args[0], relax.Var):
            continue
        if not is_array(call.args[1]) or len(static_shape(call.args[1]) or ()) != 2 or len(static_shape(call) or ()) != 2:
            continue
        steps, operators, bias = [var], ["relax.matmul"], None
        while (reader := graph.only_reader(steps[-1])) is not None and graph.operator(reader) not in operators:
            added = _bias(graph, reader, steps[-1])
            if added is None and graph.operator(reader) != "relax.astype":
                break
            bias = added if added is not None else bias
            steps.append(reader)
            operators.append(graph.operator(reader))
        yield Linear(call, tuple(steps), tuple(operators), bias)


def _bias(graph: Dataflow, total: relax.Var, value: relax.Var) -> relax.Expr | None:
    """Return the constant vector that a sum adds to each row of a value; None for another operator."""
    call = graph.call(total)
    others = [arg for arg in call.args if not arg.same_as(value)] if call is not None and call.op.name == "relax.add" else []
    is_bias = len(others) == 1 and is_array(others[0]) and static_shape(others[0]) == (static_shape(value) or ())[-1:]
    return others[0] if is_bias else None
