"""Owns finding the rule `group_norm`: group and instance norms, with the activation after them and the casts that models write around both.

Knows nothing of other rules, nor of how functions are replaced.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from kerneldecl.arrays import numpy_dtype
from kerneldecl.compiler.graph.activations import activation_of, wide_activation_of
from kerneldecl.compiler.graph.named_constants import array_of, constant, name_of
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.rule_use import HALVES, Found, Use, dtype_attr
from kerneldecl.compiler.group_norm import ACTIVATIONS

_NORMS = frozenset({"relax.nn.group_norm", "relax.nn.instance_norm"})


def find_group_norm(found: Found, var: relax.Var, call: relax.Call) -> None:
    """Find a norm over groups of channels and all pixels, channels being axis 1 or the last."""
    shape = static_shape(call)
    if call.op.name not in _NORMS or shape is None or len(shape) < 2 or not (call.attrs.center and call.attrs.scale):
        return
    rank, channel = len(shape), int(call.attrs.channel_axis) % len(shape)
    # The axis of one image may be among those that are normalised.
    normalised = {int(axis) % rank for axis in call.attrs.axes} - ({0} if shape[0] == 1 else set())
    if channel not in {1, rank - 1} or normalised != set(range(1, rank)) - {channel}:
        return
    groups = int(call.attrs.num_groups) if call.op.name == "relax.nn.group_norm" else shape[channel]
    x, ends = _chain(found, var, call)
    weights = [_in_dtype(found, weight, dtype_of(x)) for weight in call.args[1:]]
    if any(weight is None for weight in weights):
        return
    attrs: dict[str, Any] = {"shape": shape, "groups": groups, "eps": float(call.attrs.epsilon), **dtype_attr(dtype_of(x))}
    if channel != 1:
        attrs["axis"] = -1
    for activation, variables in reversed(ends):
        *replaced, last = variables
        found.add(last, Use("group_norm", {**attrs, **({"activation": activation} if activation else {})}, (x, *weights), tuple(replaced)))
        if last in found.uses:
            return


def _chain(found: Found, var: relax.Var, call: relax.Call) -> tuple[relax.Expr, list[tuple[str, tuple[relax.Var, ...]]]]:
    """Return what is normalised, before a cast to float32, and where the rule may end: the activation until there, and the variables."""
    graph, x = found.graph, call.args[0]
    cast = graph.call(x)
    if cast is not None and cast.op.name == "relax.astype" and dtype_of(x) == "float32" and dtype_of(cast.args[0]) in HALVES:
        x = cast.args[0]
    ends: list[tuple[str, tuple[relax.Var, ...]]] = [("", (var,))]
    for name, variables in list(ends) + _casts(graph, dtype_of(x), ends[0]):
        activation = activation_of(graph, variables[-1]) or wide_activation_of(graph, variables[-1])
        if (name, variables) not in ends:
            ends.append((name, variables))
        if activation is not None and activation.name in ACTIVATIONS:
            longer = (activation.name, (*variables, *activation.variables))
            ends += [longer, *_casts(graph, dtype_of(x), longer)]
    return x, ends


def _casts(graph: Any, dtype: str, end: tuple[str, tuple[relax.Var, ...]]) -> list[tuple[str, tuple[relax.Var, ...]]]:
    """Return the end behind the cast to a dtype that alone reads an end, if there is one."""
    name, variables = end
    narrow = graph.only_reader(variables[-1])
    is_cast = narrow is not None and graph.operator(narrow) == "relax.astype" and dtype_of(narrow) == dtype != dtype_of(variables[-1])
    return [(name, (*variables, narrow))] if is_cast else []


def _in_dtype(found: Found, weight: relax.Expr, dtype: str) -> relax.Expr | None:
    """Return a weight in the dtype of what is normalised; None where that would round it."""
    if dtype_of(weight) == dtype:
        return weight
    cast, values = found.graph.call(weight), array_of(weight)
    if cast is not None and cast.op.name == "relax.astype" and dtype_of(cast.args[0]) == dtype:
        return cast.args[0]
    if values is None or dtype not in HALVES:
        return None
    rounded = values.astype(numpy_dtype(dtype))
    return constant(rounded, dtype, name_of(weight)) if np.array_equal(rounded.astype(values.dtype), values) else None
