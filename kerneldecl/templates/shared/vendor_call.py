"""Owns functions that call a vendor's library by what is linked with their objects (toolchain/companions.py).

Knows nothing of which functions there are, or of what they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import IRModule, tirx

NULL = tirx.reinterpret("handle", tirx.const(0, "uint64"))
"""The address of a buffer that there is not."""


def vendor_call(name: str, *args: Any, can_fail: bool = True) -> Any:
    """Return the statement that calls a function with texts, buffers' addresses and numbers, and raises the error that it sets."""
    # Not call_cpacked: TVM 0.27 declares a packed function anew in each call, and LLVM gives the second one of a module another name.
    call = tirx.call_extern("int32", name, *(tirx.const(int(arg), "int64") if isinstance(arg, int) else arg for arg in args))
    return tirx.IfThenElse(call != 0, tirx.Evaluate(tirx.tvm_throw_last_error()), None) if can_fail else tirx.Evaluate(call)


def function_of(params: Sequence[Any], body: Any) -> IRModule:
    """Return a module whose function has a body; `params` are its buffers."""
    func = tirx.PrimFunc(list(params), body)
    return IRModule({"main": func.with_attr({"global_symbol": "main", "tirx.noalias": True, "s_tir": True})})
