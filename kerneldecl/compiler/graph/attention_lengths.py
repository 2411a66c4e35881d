"""Owns attention whose mask says how many keys of a KV cache each sequence has: rule `attention_decode` in place of `attention`.

Knows nothing of how attention or its mask is written, but of what was found of them.

Such a mask compares the numbers of keys, which are known, with those of queries: query i sees key j if j <= position + i. The sequence
has position + queries keys then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.attention import RefusedError, Written
from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.mask_arguments import Computed
from kerneldecl.compiler.graph.named_constants import array_of
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.rule_use import Made, Use
from kerneldecl.compiler.graph.view_rewriting import RESHAPES, ViewRewriter
from kerneldecl.compiler.graph.views import Shape

_MOST_QUERIES = 16
_SHARED = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "layout", "scale", "dtype")
"""Attributes that both rules have, with one meaning."""
_EXCHANGED = {"less": "greater", "less_equal": "greater_equal", "greater": "less", "greater_equal": "less_equal"}
"""A comparison whose operands change places."""
_OPPOSITE = {"less": "greater_equal", "less_equal": "greater", "greater": "less_equal", "greater_equal": "less"}


def decode_attrs(use: Use) -> Mapping[str, Any] | None:
    """Return the attributes of `attention_decode` in place of an attention of few queries with a mask; None where others forbid it."""
    given = {"keys": use.attrs["queries"], **use.attrs}
    if given["queries"] > _MOST_QUERIES or not given.get("mask", False) or {"causal", "window", "softcap"} & given.keys():
        return None
    return {name: given[name] for name in _SHARED if name in given}


def decode_use(graph: Dataflow, written: Written, use: Use, attrs: Mapping[str, Any]) -> Use:
    """Return `attention_decode` with these attributes in place of an attention; raise RefusedError where its mask says no lengths."""
    batch, _, queries, keys = whole = (attrs["batch"], attrs["heads"], attrs["queries"], attrs["keys"])
    masks = [each for each in written.masks if array_of(each.value) is None]
    if len(masks) != 1:
        raise RefusedError("its mask does not compare positions")
    found = Computed.of(graph, masks[0], whole, is_guarded=written.is_guarded)
    positions, shape, seen = _positions(graph, found, keys)
    if found.low is not None:
        raise RefusedError("a row that sees no key is not 0 in the model")
    if queries > 1:
        positions, shape, first = _first_positions(graph, positions, shape)
        seen += first + queries - 1

    def make(rewriter: ViewRewriter, value: relax.Expr) -> relax.Expr:
        counts = rewriter.emitted(op.add(rewriter.reshaped(value, (shape[0],)), relax.const(seen, dtype_of(value))))
        # A position beyond the cache has no row there: its query sees all keys.
        lengths = rewriter.emitted(op.astype(rewriter.emitted(op.clip(counts, 0, keys)), "int32"))
        return rewriter.spread(lengths, (shape[0],), (batch,))

    lengths = Made(positions, (batch,), "int32", make, f"lengths of {batch} sequences of {keys} keys, {seen} more than positions")
    return replace(use, rule="attention_decode", attrs=attrs, operands=(*use.operands[:3], lengths))


def _positions(graph: Dataflow, found: Computed, keys: int) -> tuple[relax.Expr, Shape, int]:
    """Return integers whose sum with the last result is how many keys each query sees, and their shape with the axes of scores."""
    call, own = graph.call(found.value), static_shape(found.value) or ()
    name = "" if call is None else str(call.op.name).removeprefix("relax.")
    if call is None or name not in _OPPOSITE or found.kind == "added" or own[-1:] != (keys,) or keys == 1:
        raise RefusedError("its mask does not compare positions")
    numbers, positions = call.args
    if array_of(numbers) is None:
        numbers, positions, name = positions, numbers, _EXCHANGED[name]
    name = _OPPOSITE[name] if found.kind == "hidden" else name
    values = array_of(numbers)
    is_counted = values is not None and values.dtype.kind in "iu" and (np.broadcast_to(values, own) == np.arange(keys)).all()
    shape = _placed(static_shape(positions) or (), own, found.shape)
    if not is_counted or name not in {"less", "less_equal"} or shape[1] > 1 or shape[3] > 1:
        raise RefusedError("its mask does not compare the numbers of keys with a position for each query")
    return positions, shape, int(name == "less_equal")


def _first_positions(graph: Dataflow, positions: relax.Expr, shape: Shape) -> tuple[relax.Expr, Shape, int]:
    """Return what the positions of each sequence's queries are the sum of: an integer of the sequence, its shape, and a known one."""
    call = graph.call(positions)
    while call is not None and call.op.name in RESHAPES:
        positions, call = call.args[0], graph.call(call.args[0])
    if call is not None and call.op.name == "relax.add" and shape[2] > 1:
        own = static_shape(positions) or ()
        for start, other in (call.args, call.args[::-1]):
            steps, start_shape = array_of(other), _placed(static_shape(start) or (), own, shape)
            if steps is not None and start_shape[2] == 1:
                placed = np.broadcast_to(steps, own).reshape(shape)[:, 0, :, 0]
                if (placed == placed[0, 0] + np.arange(shape[2])).all():
                    return start, start_shape, int(placed[0, 0])
    raise RefusedError("the positions of its queries are not known to follow each other")


def _placed(given: Shape, own: Shape, four: Shape) -> Shape:
    """Return a shape that is broadcast to `own` with the axes of `four`, which has the same axes of more than one element."""
    kept = [extent for extent, full in zip((1,) * (len(own) - len(given)) + given, own, strict=True) if full > 1]
    wide = iter(kept)
    return tuple(next(wide, 1) if full > 1 else 1 for full in four)
