"""Owns the rotary embedding of keys that are appended, with their values, to a KV cache as a computation: its canonical TensorIR.

Knows nothing of schedules, targets, or who declares it. One block computes both elements that a turn mixes, and copies the values of
both: each is loaded once, and no lane chooses between halves.
"""

# ruff: noqa: ANN001, ANN202, N812  TVMScript is no Python
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.signature import Arg


@dataclass(frozen=True)
class AppendSpec:
    """Keys and values of `tokens` new tokens of each sequence, and the cache of at most `keys` rows of each that they go to."""

    batch: int
    tokens: int
    heads: int
    size: int
    keys: int
    page_size: int
    """Rows of a page; 0 where the cache is contiguous."""
    tokens_first: bool
    """Whether keys and values are stored as [batch, tokens, heads, size]."""
    rows_first: bool
    """Whether a sequence's (or a page's) rows stand before its heads in the cache."""
    pairs: bool
    dtype: str
    accum: str

    def new(self, batch: Any, head: Any, token: Any, element: Any) -> tuple[Any, ...]:
        """Return where an element of a new key or value is."""
        return (batch, *((token, head) if self.tokens_first else (head, token)), element)

    def cached(self, outer: Any, head: Any, row: Any, element: Any) -> tuple[Any, ...]:
        """Return where an element of the cache is; `outer` is a sequence or a page."""
        return (outer, *((row, head) if self.rows_first else (head, row)), element)

    def elements(self, place: Any) -> tuple[Any, Any]:
        """Return the two elements that one turn mixes."""
        return (place * 2, place * 2 + 1) if self.pairs else (place, place + self.size // 2)

    def place(self, given: Mapping[str, Any], batch: Any, position: Any) -> tuple[Any, Any]:
        """Return where a sequence's row is in the cache: (sequence, row), or the page and the row in it."""
        if not self.page_size:
            return batch, position
        size = T.int64(self.page_size)
        return T.Cast("int64", given["page_table"][batch, position // size]), position % size


@T.inline
def _append(spec, given, at, where):
    """Write both elements that a turn mixes: keys turned, values as they are. `where` is the cache's (outer, row) and the position."""
    b, h, t, i = T.meta_var(at)
    outer, row, position = T.meta_var(where)
    first, second = T.meta_var(spec.elements(i))
    low = T.meta_var(T.Cast(spec.accum, given["K"][spec.new(b, h, t, first)]))
    high = T.meta_var(T.Cast(spec.accum, given["K"][spec.new(b, h, t, second)]))
    cos = T.meta_var([T.Cast(spec.accum, given["COS"][position, place]) for place in (first, second)])
    sin = T.meta_var([T.Cast(spec.accum, given["SIN"][position, place]) for place in (first, second)])
    k_cache, v_cache, v = T.meta_var((given["K_cache"], given["V_cache"], given["V"]))
    k_cache[spec.cached(outer, h, row, first)] = T.Cast(spec.dtype, low * cos[0] - high * sin[0])
    k_cache[spec.cached(outer, h, row, second)] = T.Cast(spec.dtype, high * cos[1] + low * sin[1])
    v_cache[spec.cached(outer, h, row, first)] = v[spec.new(b, h, t, first)]
    v_cache[spec.cached(outer, h, row, second)] = v[spec.new(b, h, t, second)]


def rotary_append(spec: AppendSpec, arguments: Sequence[Arg]) -> Any:
    """Return the computation as a PrimFunc on the rule's arguments. Tokens whose row is before a cache or beyond it are not written."""
    given = {arg.name: tirx.decl_buffer(_extents(arg.shape), arg.dtype, arg.name) for arg in arguments}
    loops = _extents((spec.batch, spec.tokens, spec.heads, spec.size // 2))
    keys, positions = T.int64(spec.keys), given["positions"]

    @T.prim_func(s_tir=True, check_well_formed=False)
    def main():
        for i0, i1, i2, i3 in T.grid(*loops):
            with T.sblock("append"):
                b, t, h, i = T.axis.remap("SSSS", [i0, i1, i2, i3])
                # Which rows is known when it runs.
                T.reads(*[_whole(given[arg.name]) for arg in arguments[:-2]])
                T.writes(*[_whole(given[arg.name]) for arg in arguments[-2:]])
                if (positions[b] >= 0) & (T.Cast("int64", positions[b]) + t < keys):
                    position = T.meta_var(T.Cast("int64", positions[b]) + t)
                    _append(spec, given, (b, h, t, i), (*spec.place(given, b, position), position))

    return tirx.PrimFunc(list(given.values()), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True, "s_tir": True})


def _whole(buffer: Any) -> Any:
    return buffer[tuple(slice(T.int64(0), extent) for extent in buffer.shape)]


def _extents(extents: Sequence[int]) -> tuple[Any, ...]:
    return tuple(T.int64(extent) for extent in extents)
