"""Owns which operators, together, are an activation that an epilogue may have: relu6, hard_sigmoid and hard_swish are several.

Knows nothing of rules or of what the activation follows. Clips are maxima and minima here (`SimplifyClips`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import relax

from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.named_constants import scalar_of

ACTIVATIONS: Mapping[str, str] = {
    "relax.nn.relu": "relu",
    "relax.nn.gelu": "gelu",
    "relax.nn.gelu_tanh": "gelu_tanh",
    "relax.nn.silu": "silu",
    "relax.sigmoid": "sigmoid",
    "relax.tanh": "tanh",
}
"""Activations that are one operator."""


@dataclass(frozen=True)
class Activation:
    """An activation of a value."""

    name: str
    variables: tuple[relax.Var, ...]
    """What its operators give; the last is the activation's value, the others nothing else reads."""


def activation_of(graph: Dataflow, value: relax.Var) -> Activation | None:
    """Return the longest activation that alone reads a value; None where there is none."""
    return _hard_swish(graph, value) or _hard_sigmoid(graph, value) or _relu6(graph, value) or _single(graph, value)


def _single(graph: Dataflow, value: relax.Var) -> Activation | None:
    reader = graph.only_reader(value)
    name = ACTIVATIONS.get(graph.operator(reader)) if reader is not None else None
    return Activation(name, (reader,)) if name else None


def _relu6(graph: Dataflow, value: relax.Var) -> Activation | None:
    positive = _next(graph, value, "relax.nn.relu")
    bounded = _next(graph, positive, "relax.minimum", 6)
    return Activation("relu6", (positive, bounded)) if positive is not None and bounded is not None else None


def _gate(graph: Dataflow, shifted: relax.Var) -> tuple[relax.Var, ...]:
    """Return what min(max(x + 3, 0), 6) consists of, from x + 3 on; nothing for another value."""
    bounded = _relu6(graph, shifted)
    return (shifted, *bounded.variables) if bounded is not None else ()


def _hard_sigmoid(graph: Dataflow, value: relax.Var) -> Activation | None:
    shifted = _next(graph, value, "relax.add", 3)
    gate = _gate(graph, shifted) if shifted is not None else ()
    last = _next(graph, gate[-1], "relax.divide", 6) if gate else None
    return Activation("hard_sigmoid", (*gate, last)) if last is not None else None


def _hard_swish(graph: Dataflow, value: relax.Var) -> Activation | None:
    """Return x * min(max(x + 3, 0), 6) / 6, whose value has two readers."""
    readers = graph.readers[value]
    if len(readers) != 2 or None in readers:
        return None
    for shifted in readers:
        gate = _gate(graph, shifted) if shifted is not None and _is(graph, shifted, value, "relax.add", 3) else ()
        product = graph.only_reader(gate[-1]) if gate else None
        if product is None or product not in readers or graph.operator(product) != "relax.multiply":
            continue
        last = _next(graph, product, "relax.divide", 6)
        if last is not None:
            return Activation("hard_swish", (*gate, product, last))
    return None


def _next(graph: Dataflow, value: relax.Var | None, operator: str, number: float | None = None) -> relax.Var | None:
    """Return the only reader of a value if it is an operator of it, and of a number; None for anything else."""
    reader = graph.only_reader(value) if value is not None else None
    return reader if reader is not None and value is not None and _is(graph, reader, value, operator, number) else None


def _is(graph: Dataflow, reader: relax.Var, value: relax.Var, operator: str, number: float | None) -> bool:
    call = graph.call(reader)
    if call is None or call.op.name != operator or not call.args[0].same_as(value):
        return False
    return number is None or (len(call.args) == 2 and scalar_of(call.args[1]) == number)
