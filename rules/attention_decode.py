"""Owns attention of few queries against a KV cache, contiguous or in pages, with lengths known at run time.

Knows nothing of tiles, targets or how it is scheduled. Nothing of a cache is read beyond a sequence's length: rows of
the cache and entries of the page table there may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array, random_array
from kerneldecl.lazy import np
from kerneldecl.model import dtype_bytes
from kerneldecl.rule import Arg, Extent, Rule, Signature, Size

MOST_QUERIES = 16


@dataclass(frozen=True, kw_only=True)
class AttentionDecode(Rule):
    """O = softmax(scale Q K^T) V for the last tokens of sequences in a KV cache; each sees the keys up to its own, none give zeros."""

    batch: Extent
    """Sequences."""
    heads: Extent
    """Heads of Q and O."""
    kv_heads: Size = 0
    """Heads of K and V, each shared by a group of heads of Q (GQA); 0 for as many as Q has."""
    queries: Extent = 1
    """The last tokens of each sequence, rows of Q and O in each head: 1 to 16."""
    keys: Extent
    """The most keys of a sequence; `lengths` says at run time how many there are."""
    head_dim: Extent
    """Elements of a row of Q and K."""
    value_dim: Size = 0
    """Elements of a row of V and O; 0 for as many as Q has."""
    latent: bool = False
    """Whether there is one cache, K, whose rows begin with those of V, as in multi-head latent attention."""
    page_size: Size = 0
    """Keys of a page, of which `keys` is a multiple; 0 for a contiguous cache. Sequences find their pages by `page_table`."""
    pages: Size = 0
    """Pages of the cache; 0 for as many as all sequences of full length need."""
    layout: Literal["bhsd", "bshd"] = "bhsd"
    """Order of axes: batch or page, head, row, element; or batch or page, row, head, element."""
    scale: float = 0.0
    """What scores are multiplied by; 0 for 1 / sqrt(head_dim)."""
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    """Dtype of Q, K, V and O; scores and sums are float32."""

    @property
    def _kv_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def _value_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def _table_columns(self) -> int:
        return self.keys // self.page_size

    @property
    def _pages(self) -> int:
        return self.pages or self.batch * self._table_columns

    @property
    def _scale(self) -> float:
        return self.scale or 1 / math.sqrt(self.head_dim)

    def problems(self) -> Iterator[str]:
        if self.heads % self._kv_heads:
            yield f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}; write a kv_heads that divides it"
        if self.queries > MOST_QUERIES:
            yield f"queries {self.queries} is over {MOST_QUERIES}; rule attention takes more"
        if self.scale < 0:
            yield f"scale {self.scale} is negative; write a positive one"
        if self.latent and self._value_dim > self.head_dim:
            yield f"value_dim {self.value_dim} is over head_dim {self.head_dim}: values are the first of the keys' elements; write fewer"
        if self.page_size and self.keys % self.page_size:
            yield f"keys {self.keys} is no multiple of page_size {self.page_size}; write whole pages"
        elif self.page_size and self.pages and self.pages < self._table_columns:
            yield f"pages {self.pages} is too few for one sequence of {self.keys} keys; write pages = {self._table_columns} or more"
        if self.pages and not self.page_size:
            yield f"pages {self.pages} is given without page_size; write page_size as well"

    def signature(self) -> Signature:
        q, o = (Arg(name, self._shape(columns), self.dtype) for name, columns in (("Q", self.head_dim), ("O", self._value_dim)))
        k, v = (Arg(name, self._cache(columns), self.dtype) for name, columns in (("K", self.head_dim), ("V", self._value_dim)))
        table = (Arg("page_table", (self.batch, self._table_columns), "int32"),) if self.page_size else ()
        return Signature((q, k, *(() if self.latent else (v,)), *table, Arg("lengths", (self.batch,), "int32")), (o,))

    def _shape(self, columns: int) -> tuple[int, ...]:
        rows = (self.heads, self.queries) if self.layout == "bhsd" else (self.queries, self.heads)
        return (self.batch, *rows, columns)

    def _cache(self, columns: int) -> tuple[int, ...]:
        outer, rows = (self._pages, self.page_size) if self.page_size else (self.batch, self.keys)
        return (outer, *((self._kv_heads, rows) if self.layout == "bhsd" else (rows, self._kv_heads)), columns)

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.attention_decode import DecodeSpec, attention_decode

        spec = DecodeSpec(
            batch=self.batch,
            heads=self.heads,
            kv_heads=self._kv_heads,
            queries=self.queries,
            keys=self.keys,
            head_dim=self.head_dim,
            value_dim=self._value_dim,
            dtype=self.dtype,
            scale=self._scale,
            layout=self.layout,
            page_size=self.page_size,
            pages=self._pages if self.page_size else 0,
            is_latent=self.latent,
        )
        return attention_decode(spec)

    def reference(self, *inputs: Array) -> Array:
        """Compute in float64, one sequence and head after another."""
        q, k, *others = inputs
        v = k if self.latent else others[0]
        lengths, table = inputs[-1], inputs[-2] if self.page_size else None
        q, k, v = (each if self.layout == "bhsd" else each.swapaxes(1, 2) for each in (q, k, v))
        group = self.heads // self._kv_heads
        out = np.zeros((self.batch, self.heads, self.queries, self._value_dim))
        for b, h in np.ndindex(self.batch, self._kv_heads):
            length = int(lengths[b])
            keys, values = (
                self._rows(each[..., :columns], table, b, h, length) for each, columns in ((k, self.head_dim), (v, self._value_dim))
            )
            heads = slice(h * group, (h + 1) * group)
            out[b, heads] = self._attend(q[b, heads].astype(np.float64), keys, values)
        return out if self.layout == "bhsd" else out.swapaxes(1, 2)

    def _rows(self, cache: Array, table: Array | None, batch: int, head: int, length: int) -> Array:
        """Return a sequence's rows of one head."""
        if table is None:
            return cache[batch, head, :length].astype(np.float64)
        pages = table[batch, : -(-length // self.page_size)]
        return cache[pages, head].reshape(-1, cache.shape[-1])[:length].astype(np.float64)

    def _attend(self, q: Array, k: Array, v: Array) -> Array:
        """Return the results of all queries, [heads, queries, head_dim], of a sequence that have these keys and values."""
        scores = self._scale * (q @ k.T)
        scores[:, np.arange(len(k)) > np.arange(self.queries)[:, None] + len(k) - self.queries] = -np.inf
        highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        powers = np.exp(scores - np.where(np.isfinite(highest), highest, 0.0))
        total = powers.sum(axis=-1, keepdims=True)
        return np.asarray((powers @ v) / np.where(total == 0, 1.0, total))

    def flops(self) -> int:
        """Return the operations of both products for sequences of full length; those of softmax are not counted, as is usual."""
        pairs = sum(max(0, self.keys - row) for row in range(self.queries))
        return 2 * self.batch * self.heads * pairs * (self.head_dim + self._value_dim)

    def least_bytes(self) -> int:
        """Return the bytes that sequences of full length need; the cache may have pages that are not theirs."""
        columns = self.head_dim + (0 if self.latent else self._value_dim)
        cache = self.batch * self._kv_heads * self.keys * columns
        results = self.batch * self.heads * self.queries * (self.head_dim + self._value_dim)
        table = self.batch * self._table_columns if self.page_size else 0
        return (cache + results) * dtype_bytes(self.dtype) + 4 * (table + self.batch)

    def largest_input(self) -> float:
        """Return a number of which a product of two is a score that float32 holds to 1e-4: powers are those of scores' differences."""
        return 32.0

    def nan_may_vanish(self) -> bool:
        """Say so where some queries do not see the last keys: a kernel may skip them, or multiply their values by zero."""
        return self.queries > 1

    def rows_vary(self) -> bool:
        """Say so: results of short sequences are as large as values, those of long ones are near zero."""
        return True

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return normal values, random lengths among which are the most and one, and pages in random order, none of two sequences."""
        signature = self.signature()
        floats = [random_array(rng, arg) for arg in signature.inputs if arg.dtype != "int32"]
        lengths = rng.integers(1, self.keys, self.batch, np.int32, endpoint=True)
        lengths[rng.permutation(self.batch)[:2]] = (self.keys, 1)[: self.batch]
        if not self.page_size:
            return [*floats, lengths]
        drawn = rng.permutation(self._pages) if self._pages >= self.batch * self._table_columns else self._shared_pages(rng)
        table = drawn[: self.batch * self._table_columns].reshape(self.batch, -1).astype(np.int32)
        return [*floats, table, lengths]

    def _shared_pages(self, rng: np.random.Generator) -> Array:
        """Return pages for all sequences where there are fewer than they need: some are shared, as those of common prompts are."""
        return np.concatenate([rng.permutation(self._pages)[: self._table_columns] for _ in range(self.batch)])
