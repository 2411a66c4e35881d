"""Owns finding the rules of rows: `softmax`, `layer_norm`, `rms_norm` and `reduce`, with the casts that models write around them.

Knows nothing of other rules, nor of how functions are replaced.
"""

from __future__ import annotations

from typing import Any

from tvm import relax

from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.rule_use import HALVES, Found, Use, dtype_attr


def find_rows(found: Found, var: relax.Var, call: relax.Call) -> None:
    """Find the norm or softmax that a call is."""
    name, shape = str(call.op.name), static_shape(call) or ()
    if name == "relax.nn.softmax":
        _find_softmax(found, var, call)
    if name not in {"relax.nn.layer_norm", "relax.nn.rms_norm"} or [int(axis) % len(shape) for axis in call.attrs.axes] != [len(shape) - 1]:
        return
    if name == "relax.nn.rms_norm" or (call.attrs.center and call.attrs.scale):
        attrs = {"shape": shape, **dtype_attr(dtype_of(call)), "eps": float(call.attrs.epsilon)}
        found.add(var, Use(name.rpartition(".")[2], attrs, tuple(call.args)))


def _find_softmax(found: Found, var: relax.Var, call: relax.Call) -> None:
    """Find a softmax, with the casts around one of 16-bit values that a model computes in float32, or with the cast after it."""
    shape, graph = static_shape(call) or (), found.graph
    axis = int(call.attrs.axis) % len(shape)
    given: dict[str, Any] = {"shape": shape, **({} if axis == len(shape) - 1 else {"axis": axis})}
    casts, narrow = _casts(found, var, call), graph.only_reader(var)
    if casts is not None:
        x, last = casts
        found.add(last, Use("softmax", {**given, "dtype": dtype_of(x)}, (x,), (var,)))
    elif narrow is not None and graph.operator(narrow) == "relax.astype" and dtype_of(call) == "float32" and dtype_of(narrow) in HALVES:
        found.add(narrow, Use("softmax", {**given, "out_dtype": dtype_of(narrow)}, (call.args[0],), (var,)))
    else:
        found.add(var, Use("softmax", {**given, **dtype_attr(dtype_of(call))}, (call.args[0],)))


def find_reduction(found: Found, var: relax.Var, call: relax.Call) -> None:
    """Find the sum or mean of 16-bit values, which accumulates in float32; one of float32 may be fused with what is before it."""
    if call.op.name not in {"relax.sum", "relax.mean"}:
        return
    casts = _casts(found, var, call)
    x, last, replaced = (call.args[0], var, ()) if casts is None else (*casts, (var,))
    shape = static_shape(x)
    if shape is None or dtype_of(x) not in HALVES:
        return
    axes = range(len(shape)) if call.attrs.axis is None else sorted(int(axis) % len(shape) for axis in call.attrs.axis)
    kept = {"keepdims": True} if call.attrs.keepdims else {}
    attrs = {"op": str(call.op.name).rpartition(".")[2], "shape": shape, "axes": tuple(axes), "dtype": dtype_of(x), **kept}
    found.add(last, Use("reduce", attrs, (x,), replaced))


def _casts(found: Found, var: relax.Var, call: relax.Call) -> tuple[relax.Expr, relax.Var] | None:
    """Return the 16-bit value that is cast to float32 before a call, and what its result is cast to; None without such casts."""
    wide, narrow = found.graph.call(call.args[0]), found.graph.only_reader(var)
    if wide is None or narrow is None or wide.op.name != "relax.astype" or found.graph.operator(narrow) != "relax.astype":
        return None
    dtype = dtype_of(narrow)
    is_half = dtype in HALVES and dtype_of(wide.args[0]) == dtype and dtype_of(call) == "float32"
    return (wide.args[0], narrow) if is_half else None
