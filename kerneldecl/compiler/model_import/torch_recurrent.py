"""Owns the converters of torch's recurrent layers: several, in both directions, with the batch first or second.

Knows nothing of files, nor of what a step computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.rewriting import static_shape
from kerneldecl.compiler.model_import.recurrent_layers import Weights, recurrent_layer, stacked
from kerneldecl.compiler.model_import.recurrent_steps import Cell

OPERATORS = ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
"""Operators that torch would write out, step by step."""
_CELLS = {"lstm": Cell("ifgo"), "gru": Cell("rzn"), "rnn_tanh": Cell("h"), "rnn_relu": Cell("h", activation="relu")}


class _Given(NamedTuple):
    """The arguments of a node."""

    x: Any
    states: Sequence[Any]
    """Hidden and, of an LSTM, cell, [layers * directions, batch, hidden]."""
    weights: Sequence[Weights]
    """Of each direction of each layer."""
    directions: int
    is_batch_first: bool


def _recurrent(kind: str, node: Any, importer: Any) -> Any:
    """Convert recurrent layers; the results are the hidden states of the last one's steps, and the last states of all."""
    given, builder = _given(importer.retrieve_args(node)), importer.block_builder
    if static_shape(given.x) is None:
        return NotImplemented
    x = builder.emit(op.permute_dims(given.x, [1, 0, 2])) if given.is_batch_first else given.x
    finals: list[list[Any]] = []
    for layer in range(len(given.weights) // given.directions):
        outputs = []
        for direction in range(given.directions):
            at = layer * given.directions + direction
            states = [builder.emit(op.take(state, relax.const(at, "int64"), axis=0)) for state in given.states]
            y, last = recurrent_layer(builder, _CELLS[kind], x, given.weights[at], states, is_reverse=direction == 1)
            outputs.append(y)
            finals.append(last)
        x = builder.emit(op.concat(outputs, axis=2)) if given.directions > 1 else outputs[0]
    whole = builder.emit(op.permute_dims(x, [1, 0, 2])) if given.is_batch_first else x
    return relax.Tuple([whole, *(stacked(builder, [states[i] for states in finals]) for i in range(len(given.states)))])


def _given(args: Sequence[Any]) -> _Given:
    x, states, params, has_biases, _, _, _, is_bidirectional, is_batch_first = args
    each = 4 if has_biases else 2
    weights = [Weights(*params[start : start + each]) for start in range(0, len(params), each)]
    return _Given(
        x, list(states) if isinstance(states, (list, tuple)) else [states], weights, 1 + bool(is_bidirectional), bool(is_batch_first)
    )


RECURRENT: Mapping[str, Callable[[Any, Any], Any]] = {
    operator: functools.partial(_recurrent, operator.partition(".")[0]) for operator in OPERATORS
}
"""Converters by the names of torch's operators."""
