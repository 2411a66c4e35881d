"""Owns attention as a computation: its canonical TensorIR, and the recognition of a function that is one.

Knows nothing of schedules, targets, or who declares an attention.

A function is recognised if the attention that its iteration space, its parameters and its constants describe has the same canonical
text. So what is written here and what is recognised cannot differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tvm
import tvm_ffi
from tvm import te, tirx

from kerneldecl.analysis.attention import AttentionSizes, attention_of
from kerneldecl.analysis.band import EVERYTHING, Band
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of
from kerneldecl.compiler.iter_space import iter_space

ACCUM_DTYPE = "float32"
FLOAT8 = "float8_e4m3fn"

Layout = Literal["bhsd", "bshd", "packed"]
LAYOUTS: tuple[Layout, ...] = ("bhsd", "bshd")


@dataclass(frozen=True)
class HeadsSpec:
    """What every attention has: its heads, their rows, and the order of axes."""

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
    """Of Q, K and V."""
    scale: float
    layout: Layout = "bhsd"
    """Order of axes of Q, K, V and O; packed: Q, K and V are one argument [batch, row, heads of Q, K and V, element], O is bshd."""

    @property
    def group(self) -> int:
        """Return how many heads of queries share a head of keys."""
        return self.heads // self.kv_heads

    def index(self, batch: Any, head: Any, row: Any, column: Any) -> tuple[Any, ...]:
        """Return the index of an argument's element in the layout; also of an extent in its shape."""
        return (batch, head, row, column) if self.layout == "bhsd" else (batch, row, head, column)


@dataclass(frozen=True)
class AttentionSpec(HeadsSpec):
    """O = softmax(cap(scale Q K^T) + bias) V, for each head. Q, K and V of float8 have a scale each, [1] in float32, after V."""

    band: Band = EVERYTHING
    """Keys that each query sees."""
    mask: tuple[int, ...] = ()
    """Shape of the mask, which is broadcast to [batch, heads, queries, keys]; empty for none."""
    mask_dtype: str = ""
    """Dtype of the mask: bool, true for keys that are seen, or one of floating point that is added; empty for that of O."""
    alibi: int | None = None
    """First query's own key, from which distances are counted that a slope for each head, [heads] in float32, multiplies; None without."""
    softcap: float = 0.0
    """Scores become softcap tanh(scores / softcap) before anything is added; 0 for no cap."""
    has_logsumexp: bool = False
    """Whether the logarithm of the sum of each row's exponentials is a second result, [batch, heads, queries] in float32."""
    out_dtype: str = ""
    """Dtype of O; empty for that of Q, or bfloat16 where that is float8."""

    @property
    def is_causal(self) -> bool:
        """Say whether there is a last key that each query sees, which moves along with it."""
        return self.band.upper is not None

    @property
    def diagonal(self) -> int:
        """Return the last key that the first query sees where `is_causal`; may be negative."""
        return self.keys - 1 if self.band.upper is None else self.band.upper

    @property
    def has_mask(self) -> bool:
        return bool(self.mask)

    @property
    def result_dtype(self) -> str:
        """Return the dtype of O."""
        return self.out_dtype or ("bfloat16" if self.dtype == FLOAT8 else self.dtype)

    @property
    def bias_dtype(self) -> str:
        """Return the dtype of the mask; empty for none."""
        return (self.mask_dtype or self.result_dtype) if self.mask else ""

    @property
    def sizes(self) -> AttentionSizes:
        """Return what policies see of the attention."""
        shared = {name: getattr(self, name) for name in AttentionSizes._fields if name in _SHARED}
        return AttentionSizes(
            **shared,
            mask_dtype=self.bias_dtype,
            has_alibi=self.alibi is not None,
            has_softcap=self.softcap != 0,
            is_packed=self.layout == "packed",
            out_dtype=self.result_dtype,
        )

    def shape(self, heads: int, rows: int, columns: int) -> tuple[int, ...]:
        """Return the shape of an argument in the layout."""
        return self.index(self.batch, heads, rows, columns)

    @property
    def arguments(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return name, shape and dtype of each argument: inputs, then results."""
        return tuple(self._inputs()) + tuple(self._outputs())

    def _inputs(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        if self.layout == "packed":
            yield "QKV", self.shape(self.heads + 2 * self.kv_heads, self.queries, self.head_dim), self.dtype
        else:
            yield "Q", self.shape(self.heads, self.queries, self.head_dim), self.dtype
            yield "K", self.shape(self.kv_heads, self.keys, self.head_dim), self.dtype
            yield "V", self.shape(self.kv_heads, self.keys, self.value_dim), self.dtype
        if self.dtype == FLOAT8:
            yield from ((name, (1,), "float32") for name in ("q_scale", "k_scale", "v_scale"))
        if self.alibi is not None:
            yield "slopes", (self.heads,), "float32"
        if self.mask:
            yield "mask", self.mask, self.bias_dtype

    def _outputs(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        yield "O", self.shape(self.heads, self.queries, self.value_dim), self.result_dtype
        if self.has_logsumexp:
            yield "logsumexp", (self.batch, self.heads, self.queries), "float32"


_SHARED = frozenset(AttentionSizes._fields) & frozenset(AttentionSpec.__dataclass_fields__) - {"mask_dtype", "out_dtype"}
"""Fields that a spec and its sizes have both, with one meaning."""


def attention(spec: AttentionSpec) -> list[Any]:
    """Return the computation in TE: its arguments in order.

    Rows to which all keys are masked give zeros: te.max begins at the least finite number, so that their powers are zero.
    """
    inputs = {name: te.placeholder(shape, dtype, name) for name, shape, dtype in spec._inputs()}  # noqa: SLF001  it is ours
    rows = (spec.batch, spec.heads, spec.queries)
    read = _Operands(spec, inputs)

    def score(b: Any, h: Any, i: Any, j: Any) -> Any:
        d = te.reduce_axis((0, spec.head_dim), "d")
        return te.sum(read.q(b, h, i, d) * read.k(b, h, j, d), axis=d)

    def along(combine: Any, term: Any) -> Any:
        j = te.reduce_axis((0, spec.keys), "j")
        return lambda *row: combine(term(j, *row), axis=j)

    def power(b: Any, h: Any, i: Any, j: Any) -> Any:
        return te.exp(biased(b, h, i, j) - highest(b, h, i))

    def weight(j: Any, b: Any, h: Any, i: Any, e: Any) -> Any:
        return powers(b, h, i, j) * read.v(b, h, j, e)

    scores = te.compute((*rows, spec.keys), score, name="scores")
    biased = te.compute((*rows, spec.keys), _biased(spec, inputs, scores), name="biased")
    highest = te.compute(rows, along(te.max, lambda j, b, h, i: biased(b, h, i, j)), name="highest")
    powers = te.compute((*rows, spec.keys), power, name="powers")
    total = te.compute(rows, along(te.sum, lambda j, b, h, i: powers(b, h, i, j)), name="total")
    weighted = te.compute((*rows, spec.value_dim), along(te.sum, weight), name="weighted")
    value_scale = inputs.get("v_scale")
    out = te.compute(spec.shape(spec.heads, spec.queries, spec.value_dim), _quotient(spec, weighted, total, value_scale), name="O")
    results = [out]
    if spec.has_logsumexp:
        results.append(te.compute(rows, lambda *row: highest(*row) + te.log(total(*row)), name="logsumexp"))
    return [*inputs.values(), *results]


@dataclass(frozen=True)
class _Operands:
    """Elements of Q, K and V in the dtype of sums, by batch, head of queries, row and column."""

    spec: AttentionSpec
    inputs: dict[str, Any]

    def q(self, b: Any, h: Any, i: Any, d: Any) -> Any:
        return self._element("Q", 0, b, h, i, d)

    def k(self, b: Any, h: Any, j: Any, d: Any) -> Any:
        return self._element("K", self.spec.heads, b, self._kv_head(h), j, d)

    def v(self, b: Any, h: Any, j: Any, e: Any) -> Any:
        return self._element("V", self.spec.heads + self.spec.kv_heads, b, self._kv_head(h), j, e)

    def _kv_head(self, head: Any) -> Any:
        return head // self.spec.group if self.spec.group > 1 else head

    def _element(self, name: str, first_head: int, *index: Any) -> Any:
        batch, head, row, column = index
        if self.spec.layout == "packed":
            name, head = "QKV", head + first_head if first_head else head
        return _wide(self.inputs[name](*self.spec.index(batch, head, row, column)), self.spec.dtype)


def _wide(value: Any, dtype: str) -> Any:
    return value if dtype == ACCUM_DTYPE else value.astype(ACCUM_DTYPE)


def _biased(spec: AttentionSpec, inputs: dict[str, Any], scores: Any) -> Callable[..., Any]:
    """Return what a score becomes: scaled, capped, biased by distance and mask, and minus infinity outside the band."""
    lowest = tirx.const(float("-inf"), ACCUM_DTYPE)

    def element(b: Any, h: Any, i: Any, j: Any) -> Any:
        value = scores(b, h, i, j) * tirx.const(spec.scale, ACCUM_DTYPE)
        if spec.dtype == FLOAT8:
            value = value * (inputs["q_scale"](0) * inputs["k_scale"](0))
        if spec.softcap:
            cap = tirx.const(spec.softcap, ACCUM_DTYPE)
            value = te.tanh(value / cap) * cap
        if spec.alibi is not None:
            distance = te.max(i + spec.alibi - j, j - i - spec.alibi) if spec.band.upper != spec.alibi else i + spec.alibi - j
            value = value - inputs["slopes"](h) * distance.astype(ACCUM_DTYPE)
        if spec.mask:
            masked = inputs["mask"](*_mask_index(spec.mask, (b, h, i, j)))
            is_choice = spec.mask_dtype == "bool"
            value = tirx.if_then_else(masked, value, lowest) if is_choice else value + _wide(masked, spec.bias_dtype)
        seen = _is_seen(spec.band, i, j)
        return value if seen is None else tirx.if_then_else(seen, value, lowest)

    return element


def _mask_index(shape: tuple[int, ...], at: tuple[Any, ...]) -> list[Any]:
    return [0 if extent == 1 else place for extent, place in zip(shape, at[4 - len(shape) :], strict=True)]


def _is_seen(band: Band, i: Any, j: Any) -> Any:
    """Return whether a query sees a key; None where all do."""
    limits = [j <= i + band.upper] if band.upper is not None else []
    limits += [j >= i + band.lower] if band.lower is not None else []
    return tirx.all(*limits) if limits else None


def _quotient(spec: AttentionSpec, weighted: Any, total: Any, value_scale: Any) -> Callable[..., Any]:
    """Return what an element of the result is: zero in rows without a power, NaN in those with one of NaN."""

    def element(*index: Any) -> Any:
        b, h, i, e = spec.index(*index)  # an exchange of two axes is its own inverse
        zero = tirx.const(0.0, ACCUM_DTYPE)
        value = tirx.Select(tirx.EQ(total(b, h, i), zero), zero, weighted(b, h, i, e) / total(b, h, i))
        value = value if value_scale is None else value * value_scale(0)
        return value if spec.result_dtype == ACCUM_DTYPE else value.astype(spec.result_dtype)

    return element


def attention_func(spec: AttentionSpec) -> Any:
    """Return the computation as a PrimFunc."""
    return te.create_prim_func(attention(spec), index_dtype_override="int64")


def read_attention(mod: tvm.IRModule) -> AttentionSpec | None:
    """Return the attention that a canonical module's `main` computes, None if it is none."""
    func = mod["main"]
    text = canonical_text(mod)
    return next((spec for spec in _candidates(mod, func) if canonical_text(canonical_module(attention_func(spec))) == text), None)


def _candidates(mod: tvm.IRModule, func: Any) -> Iterator[AttentionSpec]:
    """Yield the attentions that a function with this iteration space, these parameters and constants may compute."""
    try:
        args, sizes = signature_of(func), attention_of(iter_space(mod))
    except (TypeError, ValueError):
        return
    if sizes is None:
        return
    shared = {name: getattr(sizes, name) for name in _SHARED}
    own = dict.fromkeys((sizes.keys - sizes.queries, 0)) if sizes.has_alibi else (None,)
    layouts: tuple[Layout, ...] = ("packed",) if sizes.is_packed else LAYOUTS
    caps = constants_of(func, tirx.Div) if sizes.has_softcap else [0.0]
    for scale, layout, alibi, softcap in itertools.product([1.0, *constants_of(func, tirx.Mul)], layouts, own, caps):
        spec = AttentionSpec(
            **shared,
            scale=scale,
            layout=layout,
            mask_dtype=sizes.mask_dtype,
            alibi=alibi,
            softcap=softcap,
            out_dtype=sizes.out_dtype,
        )
        if spec.heads % spec.kv_heads == 0 and args == [(shape, dtype) for _, shape, dtype in spec.arguments]:
            yield spec


def constants_of(func: Any, operation: Any) -> list[float]:
    """Return the constants that are operands of an operation."""
    found: list[float] = []

    def note(node: Any) -> None:
        found.extend(float(operand.value) for operand in (node.a, node.b) if isinstance(operand, tirx.FloatImm))

    tvm_ffi.structural_map(func.body, [(operation, note)], order="post")
    return list(dict.fromkeys(found))
