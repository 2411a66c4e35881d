"""Owns the converters of ONNX's RNN, GRU and LSTM: one step after the other, in both directions.

Knows nothing of other operators, nor of files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.model_import.onnx_elementwise import text

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def recurrent(kind: str, builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert a recurrent operator; its results are Y, Y_h and, of an LSTM, Y_c."""
    _refuse(kind, inputs, attrs)
    if attrs.get("layout"):
        return _batch_first(kind, builder, inputs, attrs)
    given: list[Any] = [*inputs, *[None] * (8 - len(inputs))]
    x, weights, recurrence, bias, initial = *given[:4], given[5:]
    steps, batch, _ = (int(extent) for extent in x.ty.shape)
    directions, hidden = int(weights.ty.shape[0]), int(attrs["hidden_size"])
    dtype = str(x.ty.dtype.dtype)
    outputs, finals = [], []
    for direction in range(directions):
        at = _Direction(builder, direction)
        states = [
            at.of(state) if state is not None else op.zeros((batch, hidden), dtype) for state in initial[: 2 if kind == "LSTM" else 1]
        ]
        parts = at.weights(kind, (weights, recurrence, bias), hidden, dtype)
        is_reverse = direction == 1 or text(attrs.get("direction", "forward")) == "reverse"
        found: list[Any] = [None] * steps
        for step in range(steps)[:: -1 if is_reverse else 1]:
            row = builder.emit(op.take(x, relax.const(step, "int64"), axis=0))
            states = _STEPS[kind](builder, row, parts, [*states, attrs])
            found[step] = states[0]
        outputs.append(builder.emit(op.stack(found, axis=0)))
        finals.append(states)
    y = builder.emit(op.stack(outputs, axis=1))
    return relax.Tuple([y, *(builder.emit(op.stack([states[i] for states in finals], axis=0)) for i in range(len(finals[0])))])


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

    def weights(self, kind: str, stacked: Sequence[Any], hidden: int, dtype: str) -> list[Any]:
        """Return W and R with the inputs first, and the two halves of the bias."""
        weights, recurrence, bias = stacked
        transposed = [self._builder.emit(op.permute_dims(self.of(each))) for each in (weights, recurrence)]
        size = _GATES[kind] * hidden
        whole = self.of(bias) if bias is not None else op.zeros((2 * size,), dtype)
        return [*transposed, *(self._builder.emit(op.strided_slice(whole, [0], [start], [start + size])) for start in (0, size))]


def _parts(builder: Any, x: Any, count: int) -> list[Any]:
    found = builder.emit(op.split(x, count, axis=-1)) if count > 1 else None
    return [builder.emit(relax.TupleGetItem(found, i)) for i in range(count)] if found is not None else [x]


def _projected(builder: Any, x: Any, weights: Any, bias: Any) -> Any:
    return builder.emit(op.add(builder.emit(op.matmul(x, weights)), bias))


def _rnn(builder: Any, x: Any, given: Sequence[Any], states: Sequence[Any]) -> list[Any]:
    (w, r, wb, rb), (h, _) = given, states
    return [builder.emit(op.tanh(op.add(_projected(builder, x, w, wb), _projected(builder, h, r, rb))))]


def _gru(builder: Any, x: Any, given: Sequence[Any], states: Sequence[Any]) -> list[Any]:
    (w, r, wb, rb), (h, attrs) = given, states
    zx, rx, hx = _parts(builder, _projected(builder, x, w, wb), 3)
    zh, rh, hh = _parts(builder, _projected(builder, h, r, rb), 3)
    update, reset = (builder.emit(op.sigmoid(op.add(a, b))) for a, b in ((zx, zh), (rx, rh)))
    if not attrs.get("linear_before_reset"):
        last = _parts(builder, r, 3)[2], _parts(builder, rb, 3)[2]
        hh = _projected(builder, builder.emit(op.multiply(reset, h)), *last)
    else:
        hh = builder.emit(op.multiply(reset, hh))
    new = builder.emit(op.tanh(op.add(hx, hh)))
    return [builder.emit(op.add(new, op.multiply(update, op.subtract(h, new))))]


def _lstm(builder: Any, x: Any, given: Sequence[Any], states: Sequence[Any]) -> list[Any]:
    (w, r, wb, rb), (h, c, _) = given, states
    gates = builder.emit(op.add(_projected(builder, x, w, wb), _projected(builder, h, r, rb)))
    i, o, f, new = _parts(builder, gates, 4)
    kept = op.multiply(op.sigmoid(f), c)
    cell = builder.emit(op.add(kept, op.multiply(op.sigmoid(i), op.tanh(new))))
    return [builder.emit(op.multiply(op.sigmoid(o), op.tanh(cell))), cell]


_STEPS: Mapping[str, Callable[[Any, Any, Sequence[Any], Sequence[Any]], list[Any]]] = {"RNN": _rnn, "GRU": _gru, "LSTM": _lstm}
