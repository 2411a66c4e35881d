"""Owns scaled dot-product attention: softmax(cap(scale Q K^T) + bias) V for each head.

Knows nothing of tiles, targets or how it is scheduled.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kerneldecl.analysis.band import Band
from kerneldecl.arrays import Array, numpy_dtype, random_array
from kerneldecl.lazy import np
from kerneldecl.model import dtype_bytes
from kerneldecl.rule import Arg, Extent, Rule, Signature, Size

HEADS_APART = 3
"""Heads of keys, over the whole batch, that differ; others repeat them, so that a reference computes fewer. No power of two: a head that is
off by one or by a group of heads differs."""
GROUP_APART = 2
"""Heads of queries that differ among those with the same keys."""
BLOCK_ELEMENTS = 1 << 23
"""Scores that the reference has in memory at once."""
SCALES = ("q_scale", "k_scale", "v_scale")


class _Head(NamedTuple):
    """What one head's results are computed from."""

    q: Array
    k: Array
    v: Array
    scale: Array
    slope: Array | None
    mask: Array | None
    """[queries, keys], or with one row for all queries."""


@dataclass(frozen=True, kw_only=True)
class Attention(Rule):
    """O = softmax(cap(scale Q K^T) + mask) V for each head; rows of which all keys are masked are zero."""

    batch: Extent
    """Sequences."""
    heads: Extent
    """Heads of Q and O."""
    kv_heads: Size = 0
    """Heads of K and V, each shared by a group of heads of Q (GQA); 0 for as many as Q has."""
    queries: Extent
    """Rows of Q and O in each head."""
    keys: Size = 0
    """Rows of K and V in each head; 0 for as many as Q has."""
    head_dim: Extent
    """Elements of a row of Q and K."""
    value_dim: Size = 0
    """Elements of a row of V and O; 0 for as many as Q has."""
    layout: Literal["bhsd", "bshd", "packed"] = "bhsd"
    """Order of axes: batch, head, row, element; batch, row, head, element; or the latter with the heads of Q, K and V in one argument."""
    causal: bool = False
    """Whether a query sees only keys up to its own."""
    window: Size = 0
    """Keys before its own that a query sees, and as many after it unless the mask is causal; 0 for all."""
    align: Literal["end", "start"] = "end"
    """Whether the last query's own key is the last one, or the first query's the first one; others follow one by one."""
    mask: bool = False
    """Whether there is a mask as an argument."""
    mask_axes: Literal["qk", "bqk", "hqk", "bhqk", "bk"] = "qk"
    """Axes of the mask: of batch, heads, queries and keys. It is [queries, keys], or has four axes, of one element where it has none."""
    mask_dtype: Literal["", "bool", "float16", "bfloat16", "float32"] = ""
    """Dtype of the mask: bool, true for keys that are seen, or of numbers that are added to scores; by default that of O."""
    alibi: bool = False
    """Whether a slope for each head, times the distance of a key from the query's own, is subtracted from scores (ALiBi)."""
    softcap: float = 0.0
    """Scores become softcap * tanh(scores / softcap) before anything is added; 0 for no cap."""
    scale: float = 0.0
    """What scores are multiplied by; 0 for 1 / sqrt(head_dim)."""
    logsumexp: bool = False
    """Whether the logarithm of the sum of each row's exponentials is a second result, for backward passes and for split keys."""
    dtype: Literal["float16", "bfloat16", "float32", "float8_e4m3fn"] = "float16"
    """Dtype of Q, K and V; of float8, each has a scale that it is multiplied by. Scores and sums are float32."""
    out_dtype: Literal["", "float16", "bfloat16", "float32"] = ""
    """Dtype of O; by default dtype, or bfloat16 for float8."""

    @property
    def _kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def _keys(self) -> int:
        return self.keys or self.queries

    @property
    def _value_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def _scale(self) -> float:
        return self.scale or 1 / math.sqrt(self.head_dim)

    @property
    def _out_dtype(self) -> str:
        return self.out_dtype or ("bfloat16" if self._has_scales else self.dtype)

    @property
    def _has_scales(self) -> bool:
        return self.dtype == "float8_e4m3fn"

    @property
    def _own(self) -> int:
        """Return the first query's own key; negative where the first queries have none."""
        return self._keys - self.queries if self.align == "end" else 0

    @property
    def _band(self) -> Band:
        return Band.of(self.queries, self._keys, own=self._own, is_causal=self.causal, window=self.window)

    @property
    def _mask_shape(self) -> tuple[int, ...]:
        """Return the shape of the mask; empty for none."""
        if not self.mask:
            return ()
        extents = {"b": self.batch, "h": self.heads, "q": self.queries, "k": self._keys}
        return tuple(extents[axis] if axis in self.mask_axes else 1 for axis in ("qk" if self.mask_axes == "qk" else "bhqk"))

    def problems(self) -> Iterator[str]:
        if self.heads % self._kv_heads:
            yield f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}; write a kv_heads that divides it"
        if self.layout == "packed" and self._keys != self.queries:
            yield f"layout packed has as many keys as queries, {self.queries}, not {self.keys}; leave out keys"
        if self.layout == "packed" and self._value_dim != self.head_dim:
            yield f"layout packed has values of head_dim {self.head_dim} elements, not {self.value_dim}; leave out value_dim"
        if not self.mask and (self.mask_axes != "qk" or self.mask_dtype):
            yield "mask_axes and mask_dtype describe a mask, but mask is false; write mask = true, or leave them out"
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if not 0 <= value < math.inf:
                yield f"{name} {value} is {'negative' if value < 0 else 'not finite'}; write a finite one above 0"

    def signature(self) -> Signature:
        result = self._arg("O", self.heads, self.queries, self._value_dim, self._out_dtype)
        sums = (Arg("logsumexp", (self.batch, self.heads, self.queries), "float32"),) if self.logsumexp else ()
        return Signature(tuple(self._inputs()), (result, *sums))

    def _inputs(self) -> Iterator[Arg]:
        if self.layout == "packed":
            yield self._arg("QKV", self.heads + 2 * self._kv_heads, self.queries, self.head_dim, self.dtype)
        else:
            yield self._arg("Q", self.heads, self.queries, self.head_dim, self.dtype)
            yield self._arg("K", self._kv_heads, self._keys, self.head_dim, self.dtype)
            yield self._arg("V", self._kv_heads, self._keys, self._value_dim, self.dtype)
        if self._has_scales:
            yield from (Arg(name, (1,), "float32") for name in SCALES)
        if self.alibi:
            yield Arg("slopes", (self.heads,), "float32")
        if self.mask:
            yield Arg("mask", self._mask_shape, self.mask_dtype or self._out_dtype)

    def _arg(self, name: str, heads: int, rows: int, columns: int, dtype: str) -> Arg:
        shape = (heads, rows) if self.layout == "bhsd" else (rows, heads)
        return Arg(name, (self.batch, *shape, columns), dtype)

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.attention import AttentionSpec, attention

        spec = AttentionSpec(
            batch=self.batch,
            heads=self.heads,
            kv_heads=self._kv_heads,
            queries=self.queries,
            keys=self._keys,
            head_dim=self.head_dim,
            value_dim=self._value_dim,
            dtype=self.dtype,
            scale=self._scale,
            layout=self.layout,
            band=self._band,
            mask=self._mask_shape,
            mask_dtype=self.mask_dtype,
            alibi=self._own if self.alibi else None,
            softcap=self.softcap,
            has_logsumexp=self.logsumexp,
            out_dtype=self.out_dtype,
        )
        return attention(spec)

    def reference(self, *inputs: Array) -> Array | Sequence[Array]:
        """Compute in float64, each distinct head once, in blocks of rows: all scores at once may not fit in memory."""
        named = dict(zip((arg.name for arg in self._inputs()), inputs, strict=True))
        q, k, v = self._operands(named)
        out = np.empty((self.batch, self.heads, self.queries, self._value_dim))
        sums = np.empty((self.batch, self.heads, self.queries))
        known: dict[bytes, tuple[int, int]] = {}
        for at in np.ndindex(self.batch, self.heads):
            kv = at[0], at[1] // (self.heads // self._kv_heads)
            head = self._head_of(named, at, q[at], k[kv], v[kv])
            content = hashlib.blake2b(b"".join(np.ascontiguousarray(each).tobytes() for each in head if each is not None)).digest()
            first = known.setdefault(content, at)
            if first == at:
                self._compute(head, out[at], sums[at])
            else:
                out[at], sums[at] = out[first], sums[first]
        if self._has_scales:
            out *= named["v_scale"][0].astype(np.float64)
        return [self._by_head(out), sums] if self.logsumexp else self._by_head(out)

    def _operands(self, named: Mapping[str, Array]) -> tuple[Array, Array, Array]:
        """Return Q, K and V by batch, head, row and element."""
        if self.layout != "packed":
            return self._by_head(named["Q"]), self._by_head(named["K"]), self._by_head(named["V"])
        q, k, v = np.split(self._by_head(named["QKV"]), (self.heads, self.heads + self._kv_heads), axis=1)
        return q, k, v

    def _head_of(self, named: Mapping[str, Array], at: tuple[int, int], q: Array, k: Array, v: Array) -> _Head:
        scale = np.array([self._scale])
        if self._has_scales:
            scale = scale * named["q_scale"].astype(np.float64) * named["k_scale"]
        slope = named["slopes"][at[1] : at[1] + 1] if self.alibi else None
        mask = None
        if self.mask:
            four = named["mask"][(None,) * (4 - named["mask"].ndim)]
            mask = four[at[0] % four.shape[0], at[1] % four.shape[1]]
        return _Head(q, k, v, scale, slope, mask)

    def _by_head(self, array: Array) -> Array:
        """Return the array with its heads before its rows, or the reverse."""
        return array if self.layout == "bhsd" else array.swapaxes(1, 2)

    def _compute(self, head: _Head, out: Array, sums: Array) -> None:
        """Fill a head's results, and the logarithms of its sums."""
        k, v = (each.astype(np.float64) for each in (head.k, head.v))
        # Where all is finite, keys that no row of the block sees add nothing; else NaN and infinities count zero times, which is NaN.
        is_finite = bool(np.isfinite(v).all())
        count = max(1, BLOCK_ELEMENTS // self._keys)
        for start in range(0, self.queries, count):
            rows = range(start, min(start + count, self.queries))
            seen = self._band.keys_of(rows, self._keys) if is_finite else range(self._keys)
            at, columns = slice(rows.start, rows.stop), slice(seen.start, seen.stop)
            scores = self._scores(head, k[columns], rows, seen)
            highest = scores.max(axis=1, keepdims=True, initial=-np.inf)
            highest = np.where(np.isneginf(highest), 0.0, highest)
            powers = np.exp(scores - np.where(np.isposinf(highest), 0.0, highest))
            total = powers.sum(axis=1, keepdims=True)
            out[at] = (powers @ v[columns]) / np.where(total == 0, 1.0, total)
            with np.errstate(divide="ignore"):
                sums[at] = (highest + np.log(total))[:, 0]

    def _scores(self, head: _Head, k: Array, rows: range, keys: range) -> Array:
        """Return the scores of some rows and keys, masked ones minus infinity."""
        scores: Array = head.scale * (head.q[rows.start : rows.stop].astype(np.float64) @ k.T)
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
        if head.slope is not None:
            scores -= head.slope.astype(np.float64) * np.abs(i + self._own - j)
        if head.mask is not None:
            mask = np.broadcast_to(head.mask, (self.queries, self._keys))[rows.start : rows.stop, keys.start : keys.stop]
            scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
        lower, upper = self._band
        if upper is not None:
            scores[j > i + upper] = -np.inf
        if lower is not None:
            scores[j < i + lower] = -np.inf
        return scores

    def pairs(self) -> int:
        """Return how many pairs of a query and a key that it sees one head has; what a mask as an argument hides counts."""
        return self._band.pairs(self.queries, self._keys)

    def flops(self) -> int:
        """Return the operations of both products, unseen pairs left out; those of softmax are not counted, as is usual."""
        return 2 * self.batch * self.heads * self.pairs() * (self.head_dim + self._value_dim)

    def least_bytes(self) -> int:
        """Return the bytes of all arguments but keys, values and parts of the mask that no query sees."""
        unseen = self._keys - len(self._band.keys_of(range(self.queries), self._keys))
        kv = self.batch * self._kv_heads * unseen * (self.head_dim + self._value_dim) * dtype_bytes(self.dtype)
        if not self.mask:
            return super().least_bytes() - kv
        (mask,) = (arg for arg in self._inputs() if arg.name == "mask")
        unseen_pairs = unseen if "q" not in self.mask_axes else self.queries * self._keys - self.pairs()
        heads = math.prod(extent for axis, extent in (("b", self.batch), ("h", self.heads)) if axis in self.mask_axes)
        return super().least_bytes() - kv - heads * unseen_pairs * dtype_bytes(mask.dtype)

    def largest_input(self) -> float:
        """Return a number of which a product of two is a score that float32 holds to 1e-4: powers are those of scores' differences."""
        return 32.0

    def nan_may_vanish(self) -> bool:
        """Say so where keys may be hidden: a kernel may skip them, or multiply their values by zero."""
        return self.mask or not self._band.is_full

    def tolerance(self) -> float:
        """Return the relative error allowed. Powers of float8 are rounded to it, to 1/40 in the mean: six times that of many results."""
        return 0.2 if self._has_scales else super().tolerance()

    def rows_vary(self) -> bool:
        """Say so: results of queries that see few keys, or one high score, are as large as values, others are near zero."""
        return True

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return normal values, so that scores have about unit variance. Heads repeat: see `HEADS_APART`."""
        kv_apart = min(HEADS_APART, self.batch * self._kv_heads)
        group = self.heads // self._kv_heads
        q_apart = kv_apart * min(GROUP_APART, group)
        of_kv = np.arange(self.batch * self._kv_heads) % kv_apart
        of_q = np.add.outer(of_kv, kv_apart * (np.arange(group) % min(GROUP_APART, group))).ravel()
        operands = [
            self._heads(rng, (columns, count), apart, indices)
            for columns, count, apart, indices in (
                (self.head_dim, self.queries, q_apart, of_q),
                (self.head_dim, self._keys, kv_apart, of_kv),
                (self._value_dim, self._keys, kv_apart, of_kv),
            )
        ]
        if self.layout == "packed":
            operands = [np.concatenate(operands, axis=2)]
        return [*operands, *(self._other_input(rng, arg) for arg in list(self._inputs())[len(operands) :])]

    def _heads(self, rng: np.random.Generator, shape: tuple[int, int], apart: int, indices: Array) -> Array:
        """Return an argument whose heads, over the whole batch, are those of so many random ones that `indices` name."""
        columns, rows = shape
        heads = random_array(rng, Arg("heads", (apart, rows, columns), self.dtype))
        return np.ascontiguousarray(self._by_head(heads[indices].reshape(self.batch, -1, rows, columns)))

    def _other_input(self, rng: np.random.Generator, arg: Arg) -> Array:
        if arg.name == "slopes":
            return (2.0 ** rng.uniform(-8, -1, HEADS_APART))[np.arange(self.heads) % HEADS_APART].astype(np.float32)
        if arg.name in SCALES:
            return rng.uniform(0.25, 2.0, arg.shape).astype(np.float32)
        return self._random_mask(rng, arg)

    def _random_mask(self, rng: np.random.Generator, arg: Arg) -> Array:
        """Return a mask that hides every eighth key or so, and from one of several queries all; other numbers are normal."""
        *outer, rows, keys = arg.shape
        distinct = random_array(rng, Arg(arg.name, (min(HEADS_APART, math.prod(outer)), rows, keys), "float32"))
        hidden = distinct > 1.15
        if rows > 1:
            hidden[:, rng.integers(rows)] = True
        else:
            hidden[..., rng.integers(keys)] = False
        values = ~hidden if arg.dtype == "bool" else np.where(hidden, -np.inf, distinct)
        return values[np.arange(math.prod(outer)) % len(values)].reshape(arg.shape).astype(numpy_dtype(arg.dtype))
