"""Owns scaled dot-product attention: softmax(scale Q K^T + mask) V for each head.

Knows nothing of tiles, targets or how it is scheduled.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kerneldecl.arrays import Array, random_array
from kerneldecl.rule import Arg, Extent, Rule, Signature, Size

HEADS_APART = 3
"""Heads of keys, over the whole batch, that differ; others repeat them, so that a reference computes fewer. No power of two: a head that is
off by one or by a group of heads differs."""
GROUP_APART = 2
"""Heads of queries that differ among those with the same keys."""
BLOCK_ELEMENTS = 1 << 23
"""Scores that the reference has in memory at once."""


@dataclass(frozen=True, kw_only=True)
class Attention(Rule):
    """O = softmax(scale Q K^T + mask) V for each head; rows of which all keys are masked are zero."""

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
    layout: Literal["bhsd", "bshd"] = "bhsd"
    """Order of axes of all arguments: batch, head, row, element; or batch, row, head, element."""
    causal: bool = False
    """Whether a query sees only keys up to its own; the last query sees all keys."""
    mask: bool = False
    """Whether a mask [queries, keys] is added to all heads' scores."""
    scale: float = 0.0
    """What scores are multiplied by; 0 for 1 / sqrt(head_dim)."""
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Dtype of all arguments; scores and sums are float32."""

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

    def problems(self) -> Iterator[str]:
        if self.heads % self._kv_heads:
            yield f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}"
        if self.scale < 0:
            yield f"scale {self.scale} is negative"

    def signature(self) -> Signature:
        q, o = (self._arg(name, self.heads, self.queries, columns) for name, columns in (("Q", self.head_dim), ("O", self._value_dim)))
        k, v = (self._arg(name, self._kv_heads, self._keys, columns) for name, columns in (("K", self.head_dim), ("V", self._value_dim)))
        masks = (Arg("mask", (self.queries, self._keys), self.dtype),) if self.mask else ()
        return Signature((q, k, v, *masks), (o,))

    def _arg(self, name: str, heads: int, rows: int, columns: int) -> Arg:
        shape = (heads, rows) if self.layout == "bhsd" else (rows, heads)
        return Arg(name, (self.batch, *shape, columns), self.dtype)

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
            is_causal=self.causal,
            has_mask=self.mask,
        )
        return attention(spec)

    def reference(self, *inputs: Array) -> Array:
        """Compute in float64, each distinct head once, in blocks of rows: all scores at once may not fit in memory."""
        q, k, v = (self._by_head(each) for each in inputs[:3])
        mask = inputs[3].astype(np.float64) if self.mask else None
        out = np.empty((self.batch, self.heads, self.queries, self._value_dim))
        known: dict[bytes, tuple[int, int]] = {}
        for at in np.ndindex(self.batch, self.heads):
            batch, head = at
            kv = batch, head // (self.heads // self._kv_heads)
            content = hashlib.blake2b(b"".join(np.ascontiguousarray(each).tobytes() for each in (q[at], k[kv], v[kv]))).digest()
            first = known.setdefault(content, (batch, head))
            out[at] = out[first] if first != at else self._head(q[at], k[kv], v[kv], mask)
        return self._by_head(out)

    def _by_head(self, array: Array) -> Array:
        """Return the array with its heads before its rows, or the reverse."""
        return array if self.layout == "bhsd" else array.swapaxes(1, 2)

    def _head(self, q: Array, k: Array, v: Array, mask: Array | None) -> Array:
        q, k, v = (each.astype(np.float64) for each in (q, k, v))
        out = np.empty((self.queries, self._value_dim))
        count = max(1, BLOCK_ELEMENTS // self._keys)
        for start in range(0, self.queries, count):
            rows = slice(start, min(start + count, self.queries))
            scores = self._scale * (q[rows] @ k.T)
            if mask is not None:
                scores += mask[rows]
            if self.causal:
                scores[np.arange(self._keys) > np.arange(rows.start, rows.stop)[:, None] + self._keys - self.queries] = -np.inf
            highest = scores.max(axis=1, keepdims=True)
            scores -= np.where(np.isfinite(highest), highest, 0.0)
            powers = np.exp(scores, out=scores)
            total = powers.sum(axis=1, keepdims=True)
            out[rows] = (powers @ v) / np.where(total > 0, total, 1.0)
        return out

    def pairs(self) -> int:
        """Return how many pairs of a query and a key that it sees one head has."""
        if not self.causal:
            return self.queries * self._keys
        first = self._keys - self.queries + 1
        return sum(max(0, first + row) for row in range(self.queries)) if first < 1 else self.queries * (first + self._keys) // 2

    def flops(self) -> int:
        """Return the operations of both products, masked pairs left out; those of softmax are not counted, as is usual."""
        return 2 * self.batch * self.heads * self.pairs() * (self.head_dim + self._value_dim)

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return normal values, so that scores have about unit variance. Heads repeat: see `HEADS_APART`."""
        kv_apart = min(HEADS_APART, self.batch * self._kv_heads)
        group = self.heads // self._kv_heads
        q_apart = kv_apart * min(GROUP_APART, group)
        of_kv = np.arange(self.batch * self._kv_heads) % kv_apart
        of_q = np.add.outer(of_kv, kv_apart * (np.arange(group) % min(GROUP_APART, group))).ravel()
        q, k, v = (
            self._heads(rng, columns, count, apart, indices)
            for columns, count, apart, indices in (
                (self.head_dim, self.queries, q_apart, of_q),
                (self.head_dim, self._keys, kv_apart, of_kv),
                (self._value_dim, self._keys, kv_apart, of_kv),
            )
        )
        return [q, k, v, *(random_array(rng, arg) for arg in self.signature().inputs[3:])]

    def _heads(self, rng: np.random.Generator, columns: int, rows: int, apart: int, indices: Array) -> Array:
        """Return an argument whose heads, over the whole batch, are those of so many random ones that `indices` name."""
        heads = random_array(rng, Arg("heads", (apart, rows, columns), self.dtype))
        return np.ascontiguousarray(self._by_head(heads[indices].reshape(self.batch, -1, rows, columns)))
