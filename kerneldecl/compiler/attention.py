"""Owns attention as a computation: its canonical TensorIR, and the recognition of a function that is one.

Knows nothing of schedules, targets, or who declares an attention.

A function is recognised if the attention that its parameters and its one constant describe has the same canonical text. So what is
written here and what is recognised cannot differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tvm
import tvm_ffi
from tvm import te, tirx

from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of

ACCUM_DTYPE = "float32"

Layout = Literal["bhsd", "bshd"]
LAYOUTS: tuple[Layout, ...] = ("bhsd", "bshd")


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes and kind of one attention, O = softmax(scale Q K^T + mask) V, for each head."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    """Elements of a row of Q and K."""
    value_dim: int
    """Elements of a row of V and O."""
    dtype: str
    scale: float
    layout: Layout = "bhsd"
    is_causal: bool = False
    has_mask: bool = False

    @property
    def group(self) -> int:
        """Return how many heads of queries share a head of keys."""
        return self.heads // self.kv_heads

    @property
    def diagonal(self) -> int:
        """Return the last key that the first query sees with a causal mask, which is aligned to the last query and key; may be negative."""
        return self.keys - self.queries

    def shape(self, heads: int, rows: int, columns: int) -> tuple[int, int, int, int]:
        """Return the shape of an argument in the layout."""
        return (self.batch, heads, rows, columns) if self.layout == "bhsd" else (self.batch, rows, heads, columns)

    def index(self, batch: Any, head: Any, row: Any, column: Any) -> tuple[Any, ...]:
        """Return the index of an argument's element in the layout."""
        return (batch, head, row, column) if self.layout == "bhsd" else (batch, row, head, column)


def attention(spec: AttentionSpec) -> list[Any]:
    """Return the computation in TE: Q, K, V, the additive mask if there is one, and O.

    Rows to which all keys are masked give zeros: te.max begins at the least finite number, so that their powers are zero.
    """
    queries, keys, group = spec.queries, spec.keys, spec.group
    q = te.placeholder(spec.shape(spec.heads, queries, spec.head_dim), spec.dtype, "Q")
    k = te.placeholder(spec.shape(spec.kv_heads, keys, spec.head_dim), spec.dtype, "K")
    v = te.placeholder(spec.shape(spec.kv_heads, keys, spec.value_dim), spec.dtype, "V")
    mask = te.placeholder((queries, keys), spec.dtype, "mask") if spec.has_mask else None
    rows = (spec.batch, spec.heads, queries)

    def kv_head(head: Any) -> Any:
        return head // group if group > 1 else head

    def wide(tensor: Any, *index: Any) -> Any:
        value = tensor(*index)
        return value if spec.dtype == ACCUM_DTYPE else value.astype(ACCUM_DTYPE)

    def score(b: Any, h: Any, i: Any, j: Any) -> Any:
        d = te.reduce_axis((0, spec.head_dim), "d")
        return te.sum(wide(q, *spec.index(b, h, i, d)) * wide(k, *spec.index(b, kv_head(h), j, d)), axis=d)

    def bias(b: Any, h: Any, i: Any, j: Any) -> Any:
        value = scores(b, h, i, j) * tirx.const(spec.scale, ACCUM_DTYPE)
        value = value if mask is None else value + wide(mask, i, j)
        return value + _causal_mask(spec, i, j) if spec.is_causal else value

    def along(combine: Any, term: Any) -> Any:
        j = te.reduce_axis((0, keys), "j")
        return lambda *row: combine(term(j, *row), axis=j)

    def power(b: Any, h: Any, i: Any, j: Any) -> Any:
        return te.exp(biased(b, h, i, j) - highest(b, h, i))

    def weight(j: Any, b: Any, h: Any, i: Any, e: Any) -> Any:
        return powers(b, h, i, j) * wide(v, *spec.index(b, kv_head(h), j, e))

    scores = te.compute((*rows, keys), score, name="scores")
    biased = te.compute((*rows, keys), bias, name="biased")
    highest = te.compute(rows, along(te.max, lambda j, b, h, i: biased(b, h, i, j)), name="highest")
    powers = te.compute((*rows, keys), power, name="powers")
    total = te.compute(rows, along(te.sum, lambda j, b, h, i: powers(b, h, i, j)), name="total")
    weighted = te.compute((*rows, spec.value_dim), along(te.sum, weight), name="weighted")
    out = te.compute(spec.shape(spec.heads, queries, spec.value_dim), _quotient(spec, weighted, total), name="O")
    return [q, k, v, *([] if mask is None else [mask]), out]


def _causal_mask(spec: AttentionSpec, i: Any, j: Any) -> Any:
    zero, lowest = tirx.const(0.0, ACCUM_DTYPE), tirx.const(float("-inf"), ACCUM_DTYPE)
    return tirx.if_then_else(j <= i + spec.diagonal, zero, lowest)


def _quotient(spec: AttentionSpec, weighted: Any, total: Any) -> Callable[..., Any]:
    """Return what an element of the result is: zero in rows without a power."""

    def element(*index: Any) -> Any:
        b, h, i, e = spec.index(*index)  # an exchange of two axes is its own inverse
        zero = tirx.const(0.0, ACCUM_DTYPE)
        value = tirx.Select(total(b, h, i) > zero, weighted(b, h, i, e) / total(b, h, i), zero)
        return value if spec.dtype == ACCUM_DTYPE else value.astype(spec.dtype)

    return element


def attention_func(spec: AttentionSpec) -> Any:
    """Return the computation as a PrimFunc."""
    return te.create_prim_func(attention(spec), index_dtype_override="int64")


def read_attention(mod: tvm.IRModule) -> AttentionSpec | None:
    """Return the attention that a canonical module's `main` computes, None if it is none."""
    func = mod["main"]
    text = canonical_text(mod)
    return next((spec for spec in _candidates(func) if canonical_text(canonical_module(attention_func(spec))) == text), None)


def _candidates(func: Any) -> Iterator[AttentionSpec]:
    """Yield the attentions that a function with these parameters and constants may compute."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    shapes = [shape for shape, _ in args]
    if len(args) not in (4, 5) or len({dtype for _, dtype in args}) > 1 or any(len(shape) != 4 for shape in (*shapes[:3], shapes[-1])):
        return
    for scale, layout, is_causal in itertools.product(_scales(func), LAYOUTS, (False, True)):
        head, row = (1, 2) if layout == "bhsd" else (2, 1)
        q, k, v = shapes[:3]
        spec = AttentionSpec(
            batch=q[0],
            heads=q[head],
            kv_heads=k[head],
            queries=q[row],
            keys=k[row],
            head_dim=q[3],
            value_dim=v[3],
            dtype=args[0][1],
            scale=scale,
            layout=layout,
            is_causal=is_causal,
            has_mask=len(args) == 5,
        )
        if spec.heads % spec.kv_heads == 0 and shapes == _shapes(spec):
            yield spec


def _shapes(spec: AttentionSpec) -> list[tuple[int, ...]]:
    keys, values = (spec.shape(spec.kv_heads, spec.keys, columns) for columns in (spec.head_dim, spec.value_dim))
    queries, results = (spec.shape(spec.heads, spec.queries, columns) for columns in (spec.head_dim, spec.value_dim))
    return [queries, keys, values, *([(spec.queries, spec.keys)] if spec.has_mask else []), results]


def _scales(func: Any) -> list[float]:
    """Return the constants by which something is multiplied, and 1, which TVM leaves out."""
    found: list[float] = [1.0]

    def note(product: Any) -> None:
        found.extend(float(factor.value) for factor in (product.a, product.b) if isinstance(factor, tirx.FloatImm))

    tvm_ffi.structural_map(func.body, [(tirx.Mul, note)], order="pre")
    return list(dict.fromkeys(found))
