"""Owns the functions that the steps of recurrent layers call: what a cell computes of each element, and states joined to one tensor.

Knows nothing of how steps follow each other. A function says in an attribute what it was made of, so that it can be made for another
dtype. Nothing is fused with it: fusion would make one function of the states of all steps.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tvm import relax, te, tirx

from kerneldecl.compiler import canonical
from kerneldecl.compiler.graph.places import RULE
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.rule_use import HALVES, Use, dtype_attr
from kerneldecl.compiler.prim_funcs import OPAQUE

MADE_OF = "kerneldecl.recurrent"
MOST_JOINED = 16
"""Tensors that rule `concat` joins at most."""
_KINDS = {1: "rnn", 3: "gru", 4: "lstm"}


@dataclass(frozen=True)
class Cell:
    """What a step computes."""

    gates: str
    """A letter for each gate in the order of the weights' rows: i, f, g, o of an LSTM; r, z, n of a GRU; h of a simple layer."""
    reset_first: bool = False
    """Whether a GRU's reset gate multiplies the state before its GEMM, not what the GEMM gives."""
    activation: str = "tanh"
    """Of a simple layer, tanh or relu."""

    @property
    def kind(self) -> str:
        return _KINDS[len(self.gates)]


def step_call(builder: Any, name: str, cell: Cell, args: Sequence[Any]) -> Any:
    """Emit the call of a step's function, which is one for all calls with arguments of these shapes and dtypes.

    Arguments of a cell are what the GEMM of all steps gives, [steps, batch, gates * hidden], the number of the step, [1], what the step's
    GEMM gives, [batch, gates * hidden], and tensors [batch, hidden]. Of `joined` they are the tensors to join along the first axis.
    """
    func = _function(name, cell, tuple((static_shape(arg) or (), dtype_of(arg)) for arg in args))
    out = func.params[-1]
    extents = [int(extent) for extent in out.shape]
    return builder.emit(relax.call_tir(builder.add_func(func, name), list(args), relax.TensorType(extents, str(out.dtype))))


def in_dtype_of(builder: Any, func: Any, args: Sequence[Any]) -> Any:
    """Emit the call of a function that computes for these arguments what another one, of `step_call`, does; None for any other one."""
    made_of = (func.attrs or {}).get(MADE_OF)
    if made_of is None:
        return None
    name, fields = json.loads(str(made_of))
    return step_call(builder, name, Cell(**fields), args)


@functools.lru_cache(maxsize=64)
def _function(name: str, cell: Cell, args: tuple[tuple[tuple[int, ...], str], ...]) -> Any:
    made_of = {MADE_OF: json.dumps([name, asdict(cell)]), "op_pattern": OPAQUE}
    if name == "joined":
        rule = Use("concat", {"shapes": tuple(shape for shape, _ in args), **dtype_attr(args[0][1])}, ())
        made_of |= {RULE: json.dumps({"rule": rule.rule, "attrs": rule.attrs})}
        return canonical.lower(rule.instance)["main"].without_attr("global_symbol").with_attr(made_of)
    inputs = [te.placeholder(shape, dtype, f"x{at}") for at, (shape, dtype) in enumerate(args)]
    (_, batch, size), dtype = args[0]
    shape = (batch, size // len(cell.gates))
    out = te.compute(shape, lambda row, column: _CELLS[name](_Element(cell, inputs, row, column)).astype(dtype), name=name)
    func = te.create_prim_func([*inputs, out], index_dtype_override="int64")
    return func.without_attr("global_symbol").with_attr(made_of)


class _Element:
    """One element of a step's result, in TE: what the gates get there, in float32 where elements have 16 bits."""

    def __init__(self, cell: Cell, inputs: Sequence[Any], row: Any, column: Any) -> None:
        self.cell, self._inputs, self._at = cell, inputs, (row, column)
        self._hidden = int(inputs[0].shape[-1]) // len(cell.gates)
        dtype = str(inputs[0].dtype)
        self._accum = "float32" if dtype in HALVES else dtype

    def of_input(self, gate: str) -> Any:
        """Return what the input adds to a gate."""
        projected, number, *_ = self._inputs
        return projected(number[0], self._at[0], self._column(gate)).astype(self._accum)

    def of_state(self, gate: str) -> Any:
        """Return what the step's GEMM adds to a gate."""
        return self._inputs[2](self._at[0], self._column(gate)).astype(self._accum)

    def gate(self, gate: str) -> Any:
        return self.of_input(gate) + self.of_state(gate)

    def given(self, place: int) -> Any:
        """Return the element of one of the arguments of the result's shape."""
        return self._inputs[3 + place](*self._at).astype(self._accum)

    def _column(self, gate: str) -> Any:
        return self.cell.gates.index(gate) * self._hidden + self._at[1]


def _lstm_cell(at: _Element) -> Any:
    return te.sigmoid(at.gate("f")) * at.given(0) + te.sigmoid(at.gate("i")) * te.tanh(at.gate("g"))


def _lstm_hidden(at: _Element) -> Any:
    return te.sigmoid(at.gate("o")) * te.tanh(at.given(0))


def _rnn_hidden(at: _Element) -> Any:
    total = at.gate("h")
    return te.tanh(total) if at.cell.activation == "tanh" else tirx.max(total, tirx.const(0, total.ty.dtype))


def _gru_hidden(at: _Element) -> Any:
    new = te.tanh(at.of_input("n") + te.sigmoid(at.gate("r")) * at.of_state("n"))
    return _between(te.sigmoid(at.gate("z")), at.given(0), new)


def _gru_reset(at: _Element) -> Any:
    return te.sigmoid(at.gate("r")) * at.given(0)


def _gru_hidden_of_new(at: _Element) -> Any:
    return _between(te.sigmoid(at.gate("z")), at.given(1), te.tanh(at.of_input("n") + at.given(0)))


def _between(update: Any, old: Any, new: Any) -> Any:
    return new + update * (old - new)


_CELLS: Mapping[str, Callable[[_Element], Any]] = {
    "lstm_cell": _lstm_cell,
    "lstm_hidden": _lstm_hidden,
    "rnn_hidden": _rnn_hidden,
    "gru_hidden": _gru_hidden,
    "gru_reset": _gru_reset,
    "gru_hidden_of_new": _gru_hidden_of_new,
}
"""What a function computes for an element."""
