"""Owns the converters of ONNX's RNN, GRU and LSTM, in both directions.

Knows nothing of other operators, nor of what a step computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.model_import.onnx_elementwise import text
from kerneldecl.compiler.model_import.recurrent_layers import Weights, recurrent_layer, stacked
from kerneldecl.compiler.model_import.recurrent_steps import Cell

_GATES = {"RNN": "h", "GRU": "zrn", "LSTM": "iofg"}


def recurrent(kind: str, builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert a recurrent operator; its results are Y, Y_h and, of an LSTM, Y_c."""
    _refuse(kind, inputs, attrs)
    if attrs.get("layout"):
        return _batch_first(kind, builder, inputs, attrs)
    given: list[Any] = [*inputs, *[None] * (8 - len(inputs))]
    x, weights, recurrence, bias, initial = *given[:4], given[5:]
    steps, batch, _ = (int(extent) for extent in x.ty.shape)
    directions, hidden = int(weights.ty.shape[0]), int(attrs["hidden_size"])
    cell = Cell(_GATES[kind], reset_first=not attrs.get("linear_before_reset"))
    zeros = builder.emit(op.zeros((batch, hidden), str(x.ty.dtype.dtype)))
    outputs, finals = [], []
    for direction in range(directions):
        at = _Direction(builder, direction)
        states = [zeros if state is None else at.of(state) for state in initial[: 2 if kind == "LSTM" else 1]]
        is_reverse = direction == 1 or text(attrs.get("direction", "forward")) == "reverse"
        y, last = recurrent_layer(builder, cell, x, at.weights(weights, recurrence, bias), states, is_reverse=is_reverse)
        outputs.append(builder.emit(op.reshape(y, (steps, 1, batch, hidden))))
        finals.append(last)
    whole = builder.emit(op.concat(outputs, axis=1)) if directions > 1 else outputs[0]
    return relax.Tuple([whole, *(stacked(builder, [states[i] for states in finals]) for i in range(len(finals[0])))])


def _batch_first(kind: str, builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert a recurrent operator of layout 1: x is [batch, steps, inputs], states are [batch, directions, hidden]."""
    given = list(inputs)
    for at in {0, 5, 6} & {at for at, value in enumerate(given) if value is not None}:
        given[at] = builder.emit(op.permute_dims(given[at], [1, 0, 2]))
    y, *states = recurrent(kind, builder, given, {**attrs, "layout": 0}).fields
    return relax.Tuple(
        [builder.emit(op.permute_dims(y, [2, 0, 1, 3])), *(builder.emit(op.permute_dims(each, [1, 0, 2])) for each in states)]
    )


def _refuse(kind: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> None:
    defaults = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}[kind]
    given = [text(each) for each in attrs.get("activations", ())]
    reasons = {
        "sequence_lens": len(inputs) > 4 and inputs[4] is not None,
        "peepholes": len(inputs) > 7 and inputs[7] is not None,
        "activations other than the default": bool(given) and given != defaults * (len(given) // len(defaults)),
        "clip": "clip" in attrs,
        "input_forget": bool(attrs.get("input_forget")),
    }
    if found := [reason for reason, is_given in reasons.items() if is_given]:
        raise NotImplementedError(f"{kind} with {', '.join(found)}")


class _Direction:
    """One direction's part of what is stacked by direction."""

    def __init__(self, builder: Any, direction: int) -> None:
        self._builder, self._direction = builder, direction

    def of(self, x: Any) -> Any:
        return self._builder.emit(op.take(x, relax.const(self._direction, "int64"), axis=0))

    def weights(self, weights: Any, recurrence: Any, bias: Any) -> Weights:
        """Return this direction's weights, and the two halves of its bias."""
        inputs, state = self.of(weights), self.of(recurrence)
        if bias is None:
            return Weights(inputs, state)
        whole, size = self.of(bias), int(weights.ty.shape[1])
        return Weights(inputs, state, *(self._builder.emit(op.strided_slice(whole, [0], [start], [start + size])) for start in (0, size)))
