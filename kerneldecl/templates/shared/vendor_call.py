"""Owns functions that call a vendor's library by what is linked with their objects (toolchain/companions.py).

Knows nothing of which functions there are, or of what they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import IRModule, tirx


def vendor_call(name: str, *args: Any) -> Any:
    """Return the statement that calls a function with buffers' addresses, numbers and texts."""
    return tirx.Evaluate(tirx.call_cpacked(name, *(tirx.const(int(arg), "int64") if isinstance(arg, int) else arg for arg in args)))


def function_of(params: Sequence[Any], body: Any) -> IRModule:
    """Return a module whose function has a body; `params` are its buffers."""
    func = tirx.PrimFunc(list(params), body)
    return IRModule({"main": func.with_attr({"global_symbol": "main", "tirx.noalias": True, "s_tir": True})})
