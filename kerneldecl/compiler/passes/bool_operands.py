"""Owns arithmetic and comparisons of bools, which TVM's code generation for CPUs takes for floating-point ones and refuses.

Knows nothing of schedules or of what is computed.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm_ffi import structural

_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_ARITHMETIC = {tirx.Add: tirx.Or, tirx.Mul: tirx.And, tirx.Max: tirx.Or, tirx.Min: tirx.And, tirx.Sub: tirx.NE}
"""NumPy's and torch's meaning of arithmetic on bools; NumPy has no difference of them, TVM's wraps around as an exclusive or does."""


def integer_bools(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with comparisons of bools made on uint8, and with additions and multiplications of bools as `or` and `and`."""
    done = {name: _of_function(func) if isinstance(func, tirx.PrimFunc) else func for name, func in mod.functions.items()}
    return tvm.IRModule(done, attrs=mod.attrs)


def _of_function(func: Any) -> Any:
    compared = [(kind, _compared) for kind in _COMPARISONS]
    computed = [(kind, _computed) for kind in _ARITHMETIC]
    return func.with_body(structural.structural_map(func.body, [*computed, *compared]))


def _is_bool(expr: Any) -> bool:
    return str(expr.ty.dtype).startswith("bool")


def _compared(node: Any) -> Any:
    if not (_is_bool(node.a) and _is_bool(node.b)):
        return node
    dtype = str(node.a.ty.dtype).replace("bool", "uint8")
    return type(node)(tirx.Cast(dtype, node.a), tirx.Cast(dtype, node.b))


def _computed(node: Any) -> Any:
    if not _is_bool(node):
        return node
    if isinstance(node, tirx.Sub):
        return _compared(tirx.NE(node.a, node.b))
    return _ARITHMETIC[type(node)](node.a, node.b)
