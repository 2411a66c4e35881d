"""Owns finding the rules `attention` and `attention_decode`: whether one is accepted, masks, result, and why another is left apart.

Knows nothing of how attention is written, but of what was found of it, nor of how functions are replaced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.attention import Mask, RefusedError, Written, attention_of
from kerneldecl.compiler.graph.attention_axes import Choice, choices_of, operands_of
from kerneldecl.compiler.graph.attention_lengths import decode_attrs, decode_use
from kerneldecl.compiler.graph.attention_masks import Known, kind_of, known_mask, widened
from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.mask_arguments import Computed, is_seen
from kerneldecl.compiler.graph.named_constants import array_of, constant, scalar_of
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.rule_use import Found, Made, Operand, Use
from kerneldecl.compiler.graph.view_rewriting import RESHAPES, VIEWS, ViewRewriter
from kerneldecl.compiler.graph.views import Shape

_DTYPES = frozenset({"float16", "bfloat16", "float32"})


def find_attention(found: Found, var: relax.Var, call: relax.Call) -> None:
    """Find an attention, from its last product, and note why one is left apart."""
    if call.op.name != "relax.matmul":
        return
    try:
        written = attention_of(found.graph, call)
        if written is not None:
            last, use = _used(found, var, written)
            found.add(last, use)
            found.graph.values.pop(last)  # what reads it through views must not look behind it
    except RefusedError as refused:
        found.refused[var] = str(refused)


def dynamic_attentions(graph: Dataflow) -> dict[relax.Var, str]:
    """Return attentions of sizes that are known at run time only, by their last products, with the reason why they are left apart."""
    reason = "a size is known at run time only; `--dim` declares sizes"
    found: dict[relax.Var, str] = {}
    for var in graph.values:
        call = graph.call(var)
        if call is not None and call.op.name == "relax.matmul" and static_shape(call) is None and int(call.ty.ndim) > 2:
            before = graph.call(call.args[0])
            while before is not None and before.op.name in {"relax.astype", *RESHAPES}:
                before = graph.call(before.args[0])
            found |= {var: reason} if before is not None and before.op.name == "relax.nn.softmax" else {}
    return found


def _used(found: Found, var: relax.Var, written: Written) -> tuple[relax.Var, Use]:
    """Return the rule in place of an attention, and the last variable that it replaces."""
    graph, ((q, k, v), scale) = found.graph, operands_of(found.graph, written)
    if len({q.dtype, k.dtype, v.dtype}) > 1 or q.dtype not in _DTYPES:
        raise RefusedError(f"queries, keys and values are {', '.join(dict.fromkeys((q.dtype, k.dtype, v.dtype)))}")
    core, behind = _guarded(graph, written, _rounded(graph, var, q.dtype))
    written = replace(written, is_guarded=bool(behind), scale=written.scale * scale)
    inner = {*written.inner, *(each for each in (var, *behind) if not each.same_as(core))}
    if any({*graph.readers[each]} - {*inner, var, core} for each in inner):
        raise RefusedError("scores are used elsewhere, too")
    last, use = _best(graph, written, choices_of(graph, written, (q, k, v), core), inner)
    if not use.is_accepted(last):
        raise RefusedError("; ".join(use.instance.problems()) or "the rule takes no such sizes")
    use = _in_cache(found, var, written, use)
    if not found.fuses(use.instance):
        raise RefusedError("there is no fused kernel for it")
    return last, use


def _in_cache(found: Found, var: relax.Var, written: Written, use: Use) -> Use:
    """Return `attention_decode` in place of an attention where the target has a kernel for it, and note why it is not that rule."""
    attrs = decode_attrs(use)
    if attrs is None or not found.fuses(replace(use, rule="attention_decode", attrs=attrs).instance):
        return use
    try:
        return decode_use(found.graph, written, use, attrs)
    except RefusedError as refused:
        found.noted[var] = f"rule attention, not attention_decode: {refused}"
        return use


def _best(graph: Dataflow, written: Written, choices: Iterator[Choice], inner: set[relax.Var]) -> tuple[relax.Var, Use]:
    """Return the choice with the smallest mask of those that move the fewest bytes; raise RefusedError where none can be."""
    reasons = []
    for _, equal in itertools.groupby(sorted(choices, key=lambda choice: choice.cost), key=lambda choice: choice.cost):
        uses = []
        for choice in equal:
            try:
                uses.append(_use(graph, written, choice, inner))
            except RefusedError as refused:
                reasons.append(str(refused))
        if uses:
            return min(uses, key=lambda use: use[0])[1:]
    raise RefusedError(reasons[0] if reasons else "its batch, heads and rows are in an order that the rule does not have")


def _rounded(graph: Dataflow, var: relax.Var, dtype: str) -> relax.Var:
    """Return the result in the operands' dtype, which may be the product itself."""
    reader = graph.only_reader(var)
    if dtype_of(var) != dtype and reader is not None and graph.operator(reader) == "relax.astype":
        var = reader
    if dtype_of(var) != dtype:
        raise RefusedError(f"its result is {dtype_of(var)}, its operands are {dtype}")
    return var


def _guarded(graph: Dataflow, written: Written, core: relax.Var) -> tuple[relax.Var, list[relax.Var]]:
    """Return the result with 0 in rows that see no key, as the rule has it, and the variables before it; else the result itself."""
    behind, last = [core], core
    reader = graph.only_reader(core)
    while reader is not None and graph.operator(reader) in RESHAPES:
        behind.append(reader)
        last, reader = reader, graph.only_reader(reader)
    call = graph.call(reader)
    if reader is None or call is None or call.op.name != "relax.where":
        return core, []
    condition, value, instead = call.args
    whole = (*(static_shape(value) or ())[:-1], written.shapes[0][-1])
    given = [mask for mask in written.masks if len(whole) == 4 and array_of(mask.value) is None]
    masks = [Computed.of(graph, mask, whole, is_guarded=True).passed for mask in given]
    is_guard = value.same_as(last) and scalar_of(instead) == 0 and len(masks) == 1
    if not is_guard or not is_seen(graph, condition, masks[0]):
        return core, []
    return reader, behind


def _use(graph: Dataflow, written: Written, choice: Choice, inner: set[relax.Var]) -> tuple[tuple[int, ...], relax.Var, Use]:
    """Return how good a choice is beside others that move as many bytes, the last variable, and the rule."""
    axes, (q, k, v) = choice.axes, choice.operands
    keys = k.shape[1 if choice.layout == "bshd" else 2]
    whole = (axes.batch, axes.heads, axes.queries, keys)
    known, masks = _masks(graph, written, whole, q.dtype)
    attrs: dict[str, Any] = {
        "batch": axes.batch,
        "heads": axes.heads,
        "kv_heads": axes.kv_heads,
        "queries": axes.queries,
        "keys": keys,
        "head_dim": q.shape[-1],
        "value_dim": v.shape[-1],
        "layout": choice.layout,
        "causal": known.is_causal,
        "align": known.align,
        "window": known.window,
        "softcap": written.softcap,
        "scale": _scale(written, q.shape[-1]),
        "dtype": q.dtype,
    }
    usual = {"kv_heads": axes.heads, "keys": axes.queries, "value_dim": q.shape[-1], "layout": "bhsd", "align": "end", "dtype": "float16"}
    given = {name: value for name, value in attrs.items() if value and value != usual.get(name)}
    for attr, _ in masks:
        given |= attr
    use = Use(
        "attention",
        given,
        (q, k, v, *(mask for _, mask in masks)),
        tuple({*inner, *_until(graph, choice.last, inner)}),
        is_viewed=True,
        written=choice.written,
    )
    sizes = [math.prod(mask.shape if isinstance(mask, Made) else static_shape(mask) or ()) for _, mask in masks]
    rank = (sum(sizes), not known.is_causal, not choice.is_seen, axes.batch)
    return tuple(map(int, rank)), choice.last, use


def _until(graph: Dataflow, last: relax.Var, inner: set[relax.Var]) -> Iterator[relax.Var]:
    """Yield the variables between the last product and what the result is bound to."""
    call = graph.call(last)
    while call is not None and last not in inner and call.op.name in {*VIEWS, "relax.astype"} and isinstance(call.args[0], relax.Var):
        last = call.args[0]
        yield last
        call = graph.call(last)


def _scale(written: Written, head_dim: int) -> float:
    """Return the rule's scale: 0 for 1 / sqrt(head_dim), which a model may have rounded to float16."""
    usual = 1 / math.sqrt(head_dim)
    return 0.0 if abs(written.scale - usual) <= 1e-3 * usual else written.scale


def _masks(graph: Dataflow, written: Written, whole: Shape, dtype: str) -> tuple[Known, list[tuple[dict[str, Any], Operand]]]:
    """Return what is known of the masks, and the mask that is an argument, with the attributes that say so; raise RefusedError for more."""
    total: Any = None
    computed = []
    for mask in written.masks:
        array = array_of(mask.value)
        if array is None:
            computed.append((mask, Computed.of(graph, mask, whole, is_guarded=written.is_guarded)))
        for values in [_added(mask, array, whole)] if array is not None else [mask.factor * each for each in computed[-1][1].known]:
            total = values if total is None else total + values
    known = Known() if total is None else known_mask(np.broadcast_to(total, whole))
    if len(computed) + (known.added is not None) > 1:
        raise RefusedError("it has several masks that are neither causal nor a window")
    if known.added is not None:
        shape = widened(known.added.shape, whole)
        value = constant(_of_rule(np.broadcast_to(known.added, shape)), dtype)
        return known, [(_mask_attrs(kind_of(shape, whole), ""), value)]
    return known, [_argument(mask, found, dtype) for mask, found in computed]


def _of_rule(values: Any) -> Any:
    """Return a mask with the axes that the rule has: a matrix where it is the same for batch and heads."""
    return values[0, 0] if values.shape[:2] == (1, 1) and values.shape[2] > 1 else values


def _added(mask: Mask, array: Any, whole: Shape) -> Any:
    """Return what a known mask adds, in float32 [batch, heads, queries, keys]."""
    if mask.kind != "added":
        array = np.where(array if mask.kind == "seen" else ~array, np.float32(0), np.float32(mask.low))
    values = np.broadcast_to(array.astype("float32", copy=False), mask.shape)
    if values.ndim != 4 or values.shape != whole:
        values = values.reshape(whole)
    return values if mask.factor == 1 else values * np.float32(mask.factor)


def _mask_attrs(axes: str | None, dtype: str) -> dict[str, Any]:
    return {"mask": True, **({} if axes in {None, "qk"} else {"mask_axes": axes}), **({"mask_dtype": dtype} if dtype else {})}


def _argument(mask: Mask, found: Computed, dtype: str) -> tuple[dict[str, Any], Operand]:
    """Return a mask that is computed as an operand of the rule, broadcast no further than the rule needs."""
    source, shape, whole, kind = found.value, found.shape, found.whole, found.kind
    if kind == "added" and mask.factor != 1:
        raise RefusedError("its mask is scaled")
    if len(shape) != 4 or any(extent not in {1, full} for extent, full in zip(shape, whole, strict=True)):
        raise RefusedError(f"its mask has the shape {list(shape)}, its scores have {list(whole)}")
    full = widened(shape, whole)
    given = dtype_of(source) if found.low is None else dtype
    attrs = _mask_attrs(kind_of(full, whole), "" if given == dtype else given)

    def make(rewriter: ViewRewriter, value: relax.Expr) -> relax.Expr:
        if found.low is not None:
            ends = relax.const(0.0, dtype), relax.const(found.low, dtype)
            value = rewriter.emitted(op.where(value, *(ends if kind == "seen" else ends[::-1])))
        elif kind == "hidden":
            value = rewriter.emitted(op.logical_not(value))
        return rewriter.spread(value, shape, full)

    return attrs, Made(source, full if "mask_axes" in attrs else full[2:], given, make)
