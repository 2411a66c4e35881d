"""Owns which operators, together, are an activation that an epilogue may have: relu6, hard_sigmoid and hard_swish are several.

Knows nothing of rules or of what the activation follows. Clips are maxima and minima here (`SimplifyClips`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from tvm import relax

from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.named_constants import scalar_of
from kerneldecl.compiler.graph.rewriting import dtype_of

ACTIVATIONS: Mapping[str, str] = {
    "relax.nn.relu": "relu",
    "relax.nn.gelu": "gelu",
    "relax.nn.gelu_tanh": "gelu_tanh",
    "relax.nn.silu": "silu",
    "relax.sigmoid": "sigmoid",
    "relax.tanh": "tanh",
}
"""Activations that are one operator."""
_HALVES = frozenset({"float16", "bfloat16"})


@dataclass(frozen=True)
class Activation:
    """An activation of a value."""

    name: str
    variables: tuple[relax.Var, ...]
    """What its operators give; the last is the activation's value, the others nothing else reads."""


def activation_of(graph: Dataflow, value: relax.Var) -> Activation | None:
    """Return the longest activation that alone reads a value; None where there is none."""
    return _hard_swish(graph, value) or _hard_sigmoid(graph, value) or _relu6(graph, value) or _single(graph, value)


def wide_activation_of(graph: Dataflow, value: relax.Var) -> Activation | None:
    """Return an activation of a 16-bit value that is cast to float32 before it and back after it, with the casts; None for another."""
    wide = graph.only_reader(value)
    if wide is None or graph.operator(wide) != "relax.astype" or dtype_of(value) not in _HALVES or dtype_of(wide) != "float32":
        return None
    activation = activation_of(graph, wide)
    narrow = graph.only_reader(activation.variables[-1]) if activation is not None else None
    if activation is None or narrow is None or graph.operator(narrow) != "relax.astype" or dtype_of(narrow) != dtype_of(value):
        return None
    return Activation(activation.name, (wide, *activation.variables, narrow))


def _single(graph: Dataflow, value: relax.Var) -> Activation | None:
    reader = graph.only_reader(value)
    name = ACTIVATIONS.get(graph.operator(reader)) if reader is not None else None
    return Activation(name, (reader,)) if name else None


_ROUNDED = (np.float32, np.float16, ml_dtypes.bfloat16)
"""Dtypes that a model may have rounded a number to."""
_Step = tuple[str, float | None]
_SIXTH = (("relax.divide", 6.0), ("relax.multiply", 1 / 6))
_CLIP_TO_6: tuple[_Step, ...] = (("relax.add", 3.0), ("relax.nn.relu", None), ("relax.minimum", 6.0))
_CLIP_TO_1: tuple[_Step, ...] = (("relax.add", 0.5), ("relax.nn.relu", None), ("relax.minimum", 1.0))
_HARD_SIGMOIDS: tuple[tuple[_Step, ...], ...] = tuple(steps for sixth in _SIXTH for steps in ((*_CLIP_TO_6, sixth), (sixth, *_CLIP_TO_1)))
"""min(max(x + 3, 0), 6) / 6 and min(max(x / 6 + 0.5, 0), 1), which ONNX writes."""


def _relu6(graph: Dataflow, value: relax.Var) -> Activation | None:
    found = _chain(graph, value, graph.only_reader(value), (("relax.nn.relu", None), ("relax.minimum", 6.0)))
    return Activation("relu6", found) if found else None


def _hard_sigmoid(graph: Dataflow, value: relax.Var) -> Activation | None:
    chains = (_chain(graph, value, graph.only_reader(value), steps) for steps in _HARD_SIGMOIDS)
    return next((Activation("hard_sigmoid", found) for found in chains if found), None)


def _hard_swish(graph: Dataflow, value: relax.Var) -> Activation | None:
    """Return x * hard_sigmoid(x), or x * min(max(x + 3, 0), 6) / 6; the value has two readers."""
    readers = graph.readers[value]
    if len(readers) != 2 or None in readers:
        return None
    for start, steps in itertools.product(readers, (*_HARD_SIGMOIDS, _CLIP_TO_6)):
        gate = _chain(graph, value, start, steps)
        product = graph.only_reader(gate[-1]) if gate else None
        if product is None or product not in readers or graph.operator(product) != "relax.multiply":
            continue
        ends = [_chain(graph, product, graph.only_reader(product), (sixth,)) for sixth in _SIXTH] if steps is _CLIP_TO_6 else [(product,)]
        end = next(filter(None, ends), ())
        if end:
            return Activation("hard_swish", (*gate, *dict.fromkeys((product, *end))))
    return None


def _chain(graph: Dataflow, value: relax.Var, start: relax.Var | None, steps: Sequence[_Step]) -> tuple[relax.Var, ...]:
    """Return what steps from a value on give, each of which alone reads the one before; nothing where they are others."""
    found: list[relax.Var] = []
    for operator, number in steps:
        reader = graph.only_reader(found[-1]) if found else start
        if reader is None or not _is(graph, reader, found[-1] if found else value, operator, number):
            return ()
        found.append(reader)
    return tuple(found)


def _is(graph: Dataflow, reader: relax.Var, value: relax.Var, operator: str, number: float | None) -> bool:
    call = graph.call(reader)
    if call is None or call.op.name != operator or not call.args[0].same_as(value):
        return False
    if number is None:
        return True
    given = scalar_of(call.args[1]) if len(call.args) == 2 else None
    return given is not None and given in {number, *(float(np.asarray(number).astype(dtype)) for dtype in _ROUNDED)}
