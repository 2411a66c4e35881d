"""Owns attention of few queries against a KV cache as a computation: its canonical TensorIR, and the recognition of a function that is one.

Knows nothing of schedules, targets, or who declares it. A function is recognised as `compiler.attention` does it: by its canonical text.

A cache is contiguous, or lies in pages that a table names; sequences have lengths at run time. Nothing of a cache is read beyond a
sequence's length, neither rows nor entries of the page table: what is there may be anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from kerneldecl.compiler.attention import ACCUM_DTYPE, LAYOUTS, HeadsSpec, constants_of
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of


@dataclass(frozen=True)
class DecodeSpec(HeadsSpec):
    """One attention of the last `queries` tokens of sequences, each of which sees the keys up to its own, of at most `keys`."""

    page_size: int = 0
    """Keys of a page; 0 for a contiguous cache."""
    pages: int = 0
    """Pages of the cache."""
    is_latent: bool = False
    """Whether there is one cache, and the rows of V are the first elements of the rows of K."""

    @property
    def table_columns(self) -> int:
        return self.keys // self.page_size

    def shape(self, columns: int) -> tuple[int, ...]:
        """Return the shape of Q or O."""
        return self.index(self.batch, self.heads, self.queries, columns)

    def cache_shape(self, columns: int) -> tuple[int, ...]:
        """Return the shape of K or V: sequences or pages, then heads and keys in the order of the layout."""
        outer, rows = (self.pages, self.page_size) if self.page_size else (self.batch, self.keys)
        return self.index(outer, self.kv_heads, rows, columns)

    @property
    def arguments(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Return name, shape and dtype of all arguments in order; the last one is the result."""
        values = [] if self.is_latent else [("V", self.cache_shape(self.value_dim), self.dtype)]
        table = [("page_table", (self.batch, self.table_columns), "int32")] if self.page_size else []
        return [
            ("Q", self.shape(self.head_dim), self.dtype),
            ("K", self.cache_shape(self.head_dim), self.dtype),
            *values,
            *table,
            ("lengths", (self.batch,), "int32"),
            ("O", self.shape(self.value_dim), self.dtype),
        ]


def attention_decode(spec: DecodeSpec) -> list[Any]:
    """Return the computation in TE, with arguments as `DecodeSpec.arguments` has them.

    Queries that see no key give zeros: te.max begins at the least finite number, so that their powers are zero.
    """
    inputs = [te.placeholder(shape, dtype, name) for name, shape, dtype in spec.arguments[:-1]]
    by_name = {tensor.op.name: tensor for tensor in inputs}
    q, k, lengths = (by_name[name] for name in ("Q", "K", "lengths"))
    v = by_name.get("V", k)
    rows = (spec.batch, spec.heads, spec.queries)

    def cached(cache: Any, b: Any, h: Any, j: Any, d: Any) -> Any:
        head = h // spec.group if spec.group > 1 else h
        outer, row = (by_name["page_table"](b, j // spec.page_size), j % spec.page_size) if spec.page_size else (b, j)
        zero = tirx.const(0.0, ACCUM_DTYPE)
        return tirx.if_then_else(j < lengths(b), _wide(cache(*spec.index(outer, head, row, d))), zero)

    def score(b: Any, h: Any, i: Any, j: Any) -> Any:
        d = te.reduce_axis((0, spec.head_dim), "d")
        return te.sum(_wide(q(*spec.index(b, h, i, d))) * cached(k, b, h, j, d), axis=d)

    def masked(b: Any, h: Any, i: Any, j: Any) -> Any:
        lowest = tirx.const(float("-inf"), ACCUM_DTYPE)
        return tirx.if_then_else(j <= lengths(b) - spec.queries + i, scores(b, h, i, j) * tirx.const(spec.scale, ACCUM_DTYPE), lowest)

    def along(combine: Any, term: Any) -> Any:
        j = te.reduce_axis((0, spec.keys), "j")
        return lambda *row: combine(term(j, *row), axis=j)

    def weight(j: Any, b: Any, h: Any, i: Any, e: Any) -> Any:
        return powers(b, h, i, j) * cached(v, b, h, j, e)

    scores = te.compute((*rows, spec.keys), score, name="scores")
    seen = te.compute((*rows, spec.keys), masked, name="seen")
    highest = te.compute(rows, along(te.max, lambda j, b, h, i: seen(b, h, i, j)), name="highest")
    powers = te.compute((*rows, spec.keys), lambda b, h, i, j: te.exp(seen(b, h, i, j) - highest(b, h, i)), name="powers")
    total = te.compute(rows, along(te.sum, lambda j, b, h, i: powers(b, h, i, j)), name="total")
    weighted = te.compute((*rows, spec.value_dim), along(te.sum, weight), name="weighted")
    out = te.compute(spec.shape(spec.value_dim), _quotient(spec, weighted, total), name="O")
    return [*inputs, out]


def _wide(value: Any) -> Any:
    return value if str(value.ty.dtype) == ACCUM_DTYPE else value.astype(ACCUM_DTYPE)


def _quotient(spec: DecodeSpec, weighted: Any, total: Any) -> Callable[..., Any]:
    """Return what an element of the result is: zero in rows without a power."""

    def element(*index: Any) -> Any:
        b, h, i, e = spec.index(*index)  # an exchange of two axes is its own inverse
        zero = tirx.const(0.0, ACCUM_DTYPE)
        value = tirx.Select(total(b, h, i) == zero, zero, weighted(b, h, i, e) / total(b, h, i))
        return value if spec.dtype == ACCUM_DTYPE else value.astype(spec.dtype)

    return element


def attention_decode_func(spec: DecodeSpec) -> Any:
    """Return the computation as a PrimFunc."""
    return te.create_prim_func(attention_decode(spec), index_dtype_override="int64")


def read_attention_decode(mod: tvm.IRModule) -> DecodeSpec | None:
    """Return the attention against a KV cache that a canonical module's `main` computes, None if it is none."""
    func = mod["main"]
    text = canonical_text(mod)
    return next((spec for spec in _candidates(func) if canonical_text(canonical_module(attention_decode_func(spec))) == text), None)


def _candidates(func: Any) -> Iterator[DecodeSpec]:
    """Yield the attentions that a function with these parameters and constants may compute."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    ranks, integers = [len(shape) for shape, _ in args], [shape for shape, dtype in args if dtype == "int32"]
    if ranks not in _RANKS or len(integers) != ranks.count(2) + ranks.count(1):
        return
    has_pages, is_latent = len(integers) == 2, ranks[2] != 4
    (q, dtype), (k, _), (o, _) = args[0], args[1], args[-1]
    for scale, layout in itertools.product([1.0, *constants_of(func, tirx.Mul)], LAYOUTS):
        head, row = (1, 2) if layout == "bhsd" else (2, 1)
        spec = DecodeSpec(
            batch=q[0],
            heads=q[head],
            kv_heads=k[head],
            queries=q[row],
            keys=integers[0][1] * k[row] if has_pages else k[row],
            head_dim=q[3],
            value_dim=o[3],
            dtype=dtype,
            scale=scale,
            layout=layout,
            page_size=k[row] if has_pages else 0,
            pages=k[0] if has_pages else 0,
            is_latent=is_latent,
        )
        if spec.heads % spec.kv_heads == 0 and [(shape, dtype) for _, shape, dtype in spec.arguments] == args:
            yield spec


_RANKS = ([4, 4, 4, 1, 4], [4, 4, 4, 2, 1, 4], [4, 4, 1, 4], [4, 4, 2, 1, 4])
"""Ranks of the arguments of a computation: with values or without, contiguous or in pages."""
