"""Owns the rotary position embedding of new keys, written with their values into a KV cache in place.

Knows nothing of how the tables of cosines and sines come about, nor who reads the cache: rule attention_decode does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array, numpy_dtype, random_array
from kerneldecl.lazy import np
from kerneldecl.model import dtype_bytes
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature, Size

from .shared.precision import accum_dtype


@dataclass(frozen=True, kw_only=True)
class RotaryAppend(Rule):
    """K_cache[p] = K[t] * COS[p] + R * SIN[p], V_cache[p] = V[t], in place, p = positions + t; R is K with halves exchanged (rotary)."""

    batch: Extent
    """Sequences."""
    tokens: Extent = 1
    """New tokens of each sequence. They go to the rows from `positions` on, which is how many rows a sequence has before."""
    heads: Extent
    """Heads of K and V."""
    size: Extent
    """Elements of a head, an even number: columns of the tables."""
    keys: Extent
    """The most rows of a sequence, and rows of the tables. Tokens whose row would be beyond, or before 0, are not written."""
    page_size: Size = 0
    """Rows of a page, of which `keys` is a multiple; 0 for a contiguous cache. Sequences find their pages by `page_table`."""
    pages: Size = 0
    """Pages of the cache; 0 for as many as all sequences of full length need."""
    layout: Literal["bhsd", "bshd"] = "bhsd"
    """Order of the cache's axes: batch or page, head, row, element; or batch or page, row, head, element. As in attention_decode."""
    interleaved: bool = False
    """True where K and V are stored as [batch, tokens, heads, size], as a projection writes them, False as [batch, heads, tokens, size]."""
    pairs: bool = False
    """True turns neighbours, elements 2 i and 2 i + 1, as GPT-J and GLM do; False turns halves, i and i + size / 2, as Llama does."""
    dtype: FloatDtype = "float16"
    """Dtype of all arguments but the integers; 16-bit ones are computed in float32."""

    @property
    def _table_columns(self) -> int:
        return self.keys // self.page_size

    @property
    def _pages(self) -> int:
        return self.pages or self.batch * self._table_columns

    def problems(self) -> Iterator[str]:
        if self.size % 2:
            yield f"size {self.size} has no halves; write an even one"
        if self.tokens > self.keys:
            yield f"tokens {self.tokens} is over keys {self.keys}, the rows of a sequence's cache; write fewer tokens or more keys"
        if self.page_size and self.keys % self.page_size:
            yield f"keys {self.keys} is no multiple of page_size {self.page_size}; write whole pages"
        elif self.page_size and self._pages < self.batch * self._table_columns:
            need = self.batch * self._table_columns
            yield f"pages {self.pages} is too few for {self.batch} sequences of {self.keys} keys; write pages = {need} or more"
        if self.pages and not self.page_size:
            yield f"pages {self.pages} is given without page_size; write page_size as well"

    def signature(self) -> Signature:
        new = (self.batch, *((self.tokens, self.heads) if self.interleaved else (self.heads, self.tokens)), self.size)
        outer, rows = (self._pages, self.page_size) if self.page_size else (self.batch, self.keys)
        cache = (outer, *((rows, self.heads) if self.layout == "bshd" else (self.heads, rows)), self.size)
        tables = (Arg(name, (self.keys, self.size), self.dtype) for name in ("COS", "SIN"))
        paged = (Arg("page_table", (self.batch, self._table_columns), "int32"),) if self.page_size else ()
        inputs = (Arg("K", new, self.dtype), Arg("V", new, self.dtype), *tables, Arg("positions", (self.batch,), "int32"), *paged)
        return Signature(inputs, tuple(Arg(name, cache, self.dtype) for name in ("K_cache", "V_cache")), updated=2)

    def lower(self) -> Any:
        from kerneldecl.compiler.rotary_append import AppendSpec, rotary_append

        spec = AppendSpec(
            batch=self.batch,
            tokens=self.tokens,
            heads=self.heads,
            size=self.size,
            keys=self.keys,
            page_size=self.page_size,
            tokens_first=self.interleaved,
            rows_first=self.layout == "bshd",
            pairs=self.pairs,
            dtype=self.dtype,
            accum=accum_dtype(self.dtype),
        )
        return rotary_append(spec, self.signature().args)

    def reference(self, *inputs: Array) -> tuple[Array, ...]:
        given = dict(zip((arg.name for arg in self.signature().given), inputs, strict=True))
        k, v, cos, sin = (given[name].astype(np.float64) for name in ("K", "V", "COS", "SIN"))
        k, v = (array.swapaxes(1, 2) if self.interleaved else array for array in (k, v))
        caches = [given[name].astype(np.float64) for name in ("K_cache", "V_cache")]
        for batch, token in np.ndindex(self.batch, self.tokens):
            position = int(given["positions"][batch]) + token
            if given["positions"][batch] < 0 or position >= self.keys:
                continue
            outer, row = (
                (given["page_table"][batch, position // self.page_size], position % self.page_size) if self.page_size else (batch, position)
            )
            rows = self._turned(k[batch, :, token], cos[position], sin[position]), v[batch, :, token]
            for cache, values in zip(caches, rows, strict=True):
                cache[(outer, row) if self.layout == "bshd" else (outer, slice(None), row)] = values
        return tuple(caches)

    def _turned(self, x: Array, cos: Array, sin: Array) -> Array:
        low, high = (x[..., ::2], x[..., 1::2]) if self.pairs else np.split(x, 2, axis=-1)
        turned = np.stack([-high, low], axis=-1).reshape(x.shape) if self.pairs else np.concatenate([-high, low], axis=-1)
        return np.asarray(x * cos + turned * sin)

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return random keys, values and caches, tables of random angles, pages in random order; positions at both ends among them."""
        made: dict[str, Array] = {}
        angles = rng.uniform(0, 2 * math.pi, (self.keys, self.size))
        made["COS"], made["SIN"] = (table(angles).astype(numpy_dtype(self.dtype)) for table in (np.cos, np.sin))
        positions = rng.integers(0, self.keys - self.tokens + 1, self.batch)
        positions[:2] = np.array([self.keys - self.tokens, 0])[: self.batch]
        made["positions"] = positions.astype(np.int32)
        if self.page_size:
            order = rng.permutation(self._pages)[: self.batch * self._table_columns]
            made["page_table"] = order.reshape(self.batch, self._table_columns).astype(np.int32)
        return [made[arg.name] if arg.name in made else random_array(rng, arg) for arg in self.signature().given]

    def flops(self) -> int:
        return 3 * self.batch * self.tokens * self.heads * self.size

    def least_bytes(self) -> int:
        """Return the bytes of new keys and values, read and written, and of the tables' rows that they take."""
        rows = self.batch * self.tokens
        return (4 * rows * self.heads + 2 * min(rows, self.keys)) * self.size * dtype_bytes(self.dtype) + 4 * self.batch
