"""Owns finding the rules `rotary`, `elementwise` and `transpose`: what moves or computes each element by itself.

Knows nothing of other rules but where they were found, nor of how functions are replaced.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax

from kerneldecl.compiler.graph.activations import ACTIVATIONS
from kerneldecl.compiler.graph.gemm_operands import view_of
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.rotary import rotary_of
from kerneldecl.compiler.graph.rule_use import Found, Use, dtype_attr
from kerneldecl.compiler.graph.view_rewriting import VIEWS, axes_of
from kerneldecl.compiler.graph.views import View

_BINARY = {"relax.add": "add", "relax.multiply": "mul", "relax.subtract": "sub", "relax.divide": "div"}
_GATES = {"relax.nn.silu": "silu_mul", "relax.nn.gelu": "gelu_mul", "relax.nn.gelu_tanh": "gelu_tanh_mul"}
_UNARY = {**ACTIVATIONS, "relax.exp": "exp", "relax.sqrt": "sqrt"}


def find_rotary(found: Found, var: relax.Var, _: relax.Call) -> None:
    """Find a rotary embedding of heads, [batch, heads, tokens, size], by one table for all of them; heads may lie interleaved."""
    rotary, graph = rotary_of(found.graph, var), found.graph
    shape = static_shape(var) or ()
    if rotary is None or len(shape) != 4 or any({*graph.readers[each]} - {*rotary.inner, var} for each in rotary.inner):
        return
    batch, heads, tokens, size = shape
    tables = [static_shape(table) or () for table in (rotary.cos, rotary.sin)]
    if any(math.prod(table) != tokens * size or table[-2:] != (tokens, size) for table in tables):
        return
    source, view = view_of(graph, rotary.x)
    projected = View.of((batch, tokens, heads, size))
    is_interleaved = view is not None and projected is not None and view.joined() == projected.permuted((0, 2, 1, 3)).joined()
    attrs: dict[str, Any] = {"batch": batch, "heads": heads, "tokens": tokens, "size": size, **dtype_attr(dtype_of(var))}
    written = _written_by_rows(found, var)
    names = ("x" if is_interleaved and not (view is not None and view.is_reshape) else "") + ("y" if written is not None else "")
    stored = {"interleaved": names} if names else {}
    x = source if is_interleaved else rotary.x
    found.add(var, Use("rotary", {**attrs, **stored}, (x, rotary.cos, rotary.sin), rotary.inner, is_viewed=True, written=written))


def _written_by_rows(found: Found, var: relax.Var) -> View | None:
    """Return the view that heads are of what is written row by row, where an attention reads it so; None where none does."""
    batch, heads, tokens, size = static_shape(var) or ()
    uses = (use for use in found.uses.values() if use.rule == "attention" and use.attrs.get("layout") == "bshd")
    whole = View.of((batch, tokens, heads, size))
    is_read = any(var.same_as(source) for use in uses for source in use.sources)
    return whole.permuted((0, 2, 1, 3)) if is_read and whole is not None and 1 not in {heads, tokens} else None


def find_gated(found: Found, var: relax.Var, call: relax.Call) -> None:
    """Find silu(x) * y, or gelu(x) * y, of values that rules or the caller give."""
    if call.op.name != "relax.multiply" or static_shape(call.args[0]) != static_shape(call.args[1]):
        return
    for gate, y in (call.args, call.args[::-1]):
        activation = found.graph.call(gate)
        op = _GATES.get(activation.op.name) if activation is not None else None
        if activation is None or op is None or gate in found.taken or found.graph.only_reader(gate) is None:
            continue
        if all(_is_given(found, each) for each in (activation.args[0], y)) and _is_for_rules(found, var):
            attrs = {"op": op, "shape": static_shape(call) or (), **dtype_attr(dtype_of(call))}
            found.add(var, Use("elementwise", attrs, (activation.args[0], y), (gate,)))
            return


def find_elements(found: Found, var: relax.Var, call: relax.Call) -> None:
    """Find the transpose or the operator of elements that a call is, where only rules are around it."""
    name, shape = str(call.op.name), static_shape(call) or ()
    tensors = [arg for arg in call.args if isinstance(getattr(arg, "ty", None), relax.TensorType)]
    if not shape or not all(_is_given(found, each) for each in tensors) or not _is_for_rules(found, var) or _is_read_through(found, var):
        return
    if name == "relax.permute_dims" and len(shape) <= 4:
        given = static_shape(call.args[0]) or ()
        found.add(var, Use("transpose", {"shape": given, "axes": axes_of(call), **dtype_attr(dtype_of(call))}, (call.args[0],)))
    elif name in {**_BINARY, **_UNARY} and all(static_shape(each) == shape for each in tensors):
        attrs = {"op": {**_BINARY, **_UNARY}[name], "shape": shape, **dtype_attr(dtype_of(call))}
        found.add(var, Use("elementwise", attrs, tuple(call.args)))


def _is_given(found: Found, value: relax.Expr) -> bool:
    """Say whether a rule gives a value, or the caller: nothing is there to be fused with."""
    while found.graph.operator(value) == "relax.reshape":
        value = found.graph.call(value).args[0]  # type: ignore[union-attr]
    return value in found.uses or (isinstance(value, relax.Var) and value not in found.graph.values)


def _is_for_rules(found: Found, var: relax.Var) -> bool:
    """Say whether rules alone read a value, in whatever shape or layout."""
    return all(
        reader is None or reader in found.taken or (found.graph.operator(reader) in VIEWS and _is_for_rules(found, reader))
        for reader in found.graph.readers[var]
    )


def _is_read_through(found: Found, var: relax.Var) -> bool:
    """Say whether a view is none that remains: rules read through it what it views."""
    if found.graph.operator(var) not in VIEWS or None in found.graph.readers[var]:
        return False
    read = {source for use in found.uses.values() for source in use.sources if isinstance(source, relax.Var)}
    return var not in read and all(
        reader in found.taken or (reader is not None and _is_read_through(found, reader)) for reader in found.graph.readers[var]
    )
