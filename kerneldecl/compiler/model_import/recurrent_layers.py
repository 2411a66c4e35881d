"""Owns recurrent layers in Relax: one GEMM for what all steps read of the input, then a GEMM and functions of elements for each step.

Knows nothing of ONNX or torch, nor of what a step computes. All steps call the same functions: which step it is, a function reads from
an argument. So a model has as many functions whatever its steps are, and each is tuned once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.rewriting import dtype_of
from kerneldecl.compiler.graph.rule_use import HALVES
from kerneldecl.compiler.model_import.recurrent_steps import MOST_JOINED, Cell, step_call


class Weights(NamedTuple):
    """One direction's weights, [gates * hidden, inputs] and [gates * hidden, hidden], and biases, [gates * hidden] or None."""

    inputs: Any
    state: Any
    input_bias: Any = None
    state_bias: Any = None


def recurrent_layer(
    builder: Any, cell: Cell, x: Any, weights: Weights, states: Sequence[Any], *, is_reverse: bool = False
) -> tuple[Any, list[Any]]:
    """Emit one direction of a layer; return the hidden states of all steps, [steps, batch, hidden], and the last states.

    `x` is [steps, batch, inputs]; `states` are [batch, hidden], hidden and, of an LSTM, cell.
    """
    steps = int(x.ty.shape[0])
    layer = _Layer.of(builder, cell, x, weights)
    found: list[Any] = [None] * steps
    for step in range(steps)[:: -1 if is_reverse else 1]:
        states = layer.step(relax.const(np.array([step]), "int64"), states)
        found[step] = states[0]
    return _joined(builder, cell, found), list(states)


def stacked(builder: Any, states: Sequence[Any]) -> Any:
    """Emit [batch, hidden] of each direction as [directions, batch, hidden]; of one direction it is a view."""
    if len(states) > 1:
        return builder.emit(op.stack(states, axis=0))
    return builder.emit(op.reshape(states[0], (1, *states[0].ty.shape)))


@dataclass(frozen=True)
class _Layer:
    """What the steps of a layer share."""

    builder: Any
    cell: Cell
    projected: Any
    """What the GEMM of all steps gives, [steps, batch, gates * hidden], biases included but for those that a reset gate multiplies."""
    state: tuple[Any, ...]
    """The weights that states are multiplied by, [hidden, gates * hidden]; the last gate's apart where the reset comes first."""
    bias: Any
    """What a step's GEMM adds, None where that is in `projected`."""

    @classmethod
    def of(cls, builder: Any, cell: Cell, x: Any, weights: Weights) -> _Layer:
        steps, batch, inputs = (int(extent) for extent in x.ty.shape)
        size, hidden = (int(extent) for extent in weights.state.ty.shape)
        is_apart = cell.kind == "gru" and not cell.reset_first and weights.state_bias is not None
        biases = [bias for bias in (weights.input_bias, None if is_apart else weights.state_bias) if bias is not None]
        rows = builder.emit(op.reshape(x, (steps * batch, inputs)))
        product = _product(builder, rows, builder.emit(op.permute_dims(weights.inputs)))
        if biases:
            product = builder.emit(op.add(product, builder.emit(op.add(*biases)) if len(biases) > 1 else biases[0]))
        projected = builder.emit(op.reshape(product, (steps, batch, size)))
        state = builder.emit(op.permute_dims(weights.state))
        cuts = ((0, 2), (2, 3)) if cell.kind == "gru" and cell.reset_first else ()
        parts = [builder.emit(op.strided_slice(state, [1], [start * hidden], [stop * hidden])) for start, stop in cuts]
        return cls(builder, cell, projected, tuple(parts or [state]), weights.state_bias if is_apart else None)

    def step(self, number: Any, states: Sequence[Any]) -> list[Any]:
        """Emit a step, whose number is a tensor of one element; return its states."""
        hidden = states[0]
        product = _product(self.builder, hidden, self.state[0])
        if self.bias is not None:
            product = self.builder.emit(op.add(product, self.bias))
        given = (self.projected, number, product)
        if self.cell.kind == "lstm":
            kept = step_call(self.builder, "lstm_cell", self.cell, (*given, states[1]))
            return [step_call(self.builder, "lstm_hidden", self.cell, (*given, kept)), kept]
        if self.cell.kind == "rnn":
            return [step_call(self.builder, "rnn_hidden", self.cell, given)]
        if not self.cell.reset_first:
            return [step_call(self.builder, "gru_hidden", self.cell, (*given, hidden))]
        reset = step_call(self.builder, "gru_reset", self.cell, (*given, hidden))
        new = _product(self.builder, reset, self.state[1])
        return [step_call(self.builder, "gru_hidden_of_new", self.cell, (*given, new, hidden))]


def _product(builder: Any, a: Any, b: Any) -> Any:
    """Emit a GEMM, whose accumulators have 32 bits, as rules declare it."""
    dtype = dtype_of(a)
    if dtype not in HALVES:
        return builder.emit(op.matmul(a, b))
    return builder.emit(op.astype(builder.emit(op.matmul(a, b, out_dtype="float32")), dtype))


def _joined(builder: Any, cell: Cell, parts: Sequence[Any]) -> Any:
    """Emit [batch, hidden] of all steps as [steps, batch, hidden], a few at a time: functions stay small, and equal ones are one."""
    batch, hidden = (int(extent) for extent in parts[0].ty.shape)
    while len(parts) > 1:
        several = [parts[start : start + MOST_JOINED] for start in range(0, len(parts), MOST_JOINED)]
        parts = [step_call(builder, "joined", cell, each) if len(each) > 1 else each[0] for each in several]
    return builder.emit(op.reshape(parts[0], (-1, batch, hidden)))
