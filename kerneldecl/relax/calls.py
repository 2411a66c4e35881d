"""Owns the calls of a module's Relax functions that go by symbol: to kernels of an artifact, or to functions compiled apart.

Knows nothing of artifacts, of matching or of who has the symbol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relax

_CALL_TIR = tvm.ir.Op.get("relax.call_tir")


def called_by_symbol(mod: tvm.IRModule, symbols: Mapping[str, str]) -> tvm.IRModule:
    """Return the module with each call_tir of the functions, given by name, as a call of their symbols; what nothing calls then is gone.

    A function that is called in another way, or from outside, stays.
    """
    calls = _Calls(mod, symbols)
    for var, func in mod.functions.items():
        if isinstance(func, relax.Function):
            calls.builder_.update_func(var, calls.visit_expr(func))
    return relax.transform.DeadCodeElimination()(calls.builder_.get())


@relax.expr_functor.mutator
class _Calls(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    """Replaces each call_tir of a function that has a symbol by a call of that."""

    def __init__(self, mod: tvm.IRModule, symbols: Mapping[str, str]) -> None:
        super().__init__(mod)
        self._symbols = symbols

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op != _CALL_TIR or call.args[0].name_hint not in self._symbols:
            return call
        return relax.call_dps_packed(self._symbols[call.args[0].name_hint], call.args[1], _outputs(call))


def _outputs(call: relax.Call) -> list[Any]:
    """Return the type of each output of a call_tir: several outputs have a tuple's type."""
    (result,) = call.ty_args
    return list(result.fields) if isinstance(result, relax.TupleType) else [result]
