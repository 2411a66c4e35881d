"""Owns the sorting of rows of up to 32 bits an element on CPUs: by comparing all elements of a row, and digit by digit.

Knows nothing of which rows are sorted how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.cpu_row_sort import DIGIT_BITS, digit_shifts
from kerneldecl.compiler.row_sort import TopSpec, order_key
from kerneldecl.templates.cpu.vectors import elements, loop
from kerneldecl.templates.cpu.vectors import store as store_vector

_LARGEST = 2**31 - 1
_DIGITS = 1 << DIGIT_BITS
_PLACE_BITS = 32
_TOGETHER = 8
"""Elements with which a vector is compared between a load of its counts and their store, which take as long as some comparisons."""


class SortArgs(NamedTuple):
    """The arguments, each with one dimension."""

    x: Any
    values: Any
    indices: Any


def store(spec: TopSpec, args: SortArgs, row: Any, at: Any, place: Any) -> None:
    """Store a row's result `at`, the element of a place in the row."""
    place = T.bind(place)
    T.buffer_store(args.values, args.x[row * spec.shape[-1] + place.astype("int64")], [row * spec.count + at])
    T.buffer_store(args.indices, place.astype(spec.index_dtype), [row * spec.count + at])


def counted(spec: TopSpec, args: SortArgs, row: Any, *, lanes: int) -> None:
    """Count for each element those that come before it: smaller ones, and equal ones in front."""
    extent = spec.shape[-1]
    padded, together = -(-extent // lanes) * lanes, min(_TOGETHER, lanes)
    keys = _keys(spec, args, row, padded)
    # No element comes behind a largest one that follows it.
    for at in range(extent, padded):
        T.buffer_store(keys, T.int32(_LARGEST), [at])
    before = T.alloc_buffer((lanes,), "int32")
    lane = tirx.Ramp(T.int32(0), T.int32(1), lanes)
    with loop(padded // lanes) as vector:
        first = T.bind(vector * lanes)

        def count(others: range, begin: Any, comes_first: Callable[[Any, Any, int], Any]) -> None:
            mine, added = elements(keys, (first,), lanes), elements(before, (0,), lanes)
            for other in others:
                its = tirx.Broadcast(keys[begin + other], lanes)
                added = added + tirx.Select(comes_first(its, mine, other), _spread(1, lanes), _spread(0, lanes))
            store_vector(before, (0,), added)

        store_vector(before, (0,), _spread(0, lanes))
        with loop(first // together) as group:
            count(range(together), group * together, lambda its, mine, _: its <= mine)
        # Of its own vector, equal elements come before those of later lanes.
        count(range(lanes), first, lambda its, mine, other: tirx.Select(lane > _spread(other, lanes), its <= mine, its < mine))
        with loop((padded - lanes - first) // together) as group:
            count(range(together), first + lanes + group * together, lambda its, mine, _: its < mine)
        with loop(tirx.min(T.int64(lanes), extent - first)) as at:
            place = T.bind(before[at])
            with T.If(place < spec.count), T.Then():
                store(spec, args, row, place.astype("int64"), (first + at).astype("int32"))


def radix_sorted(spec: TopSpec, args: SortArgs, row: Any) -> None:
    """Sort words of a key and its place by the key's digits, the lowest first: each pass keeps the order of equal digits."""
    extent, shifts = spec.shape[-1], digit_shifts(spec.dtype)
    keys = _keys(spec, args, row, extent)
    words, begins = T.alloc_buffer((2 * extent,), "int64"), T.alloc_buffer((len(shifts) * _DIGITS,), "int32")
    with loop(len(shifts) * _DIGITS) as at:
        T.buffer_store(begins, T.int32(0), [at])
    with loop(extent) as at:
        T.buffer_store(words, (keys[at].astype("int64") << _PLACE_BITS) | at, [at])
        for number, shift in enumerate(shifts):
            count = T.bind(number * _DIGITS + _digit(keys[at].astype("int64"), shift))
            T.buffer_store(begins, begins[count] + 1, [count])
    for number, shift in enumerate(shifts):
        source, target = number % 2 * extent, (number + 1) % 2 * extent
        total, its = T.alloc_buffer((1,), "int32"), T.alloc_buffer((1,), "int32")
        T.buffer_store(total, T.int32(target), [0])
        with loop(_DIGITS) as digit:
            T.buffer_store(its, begins[number * _DIGITS + digit], [0])
            T.buffer_store(begins, total[0], [number * _DIGITS + digit])
            T.buffer_store(total, total[0] + its[0], [0])
        with loop(extent) as at:
            word = T.bind(words[source + at])
            begin = T.bind(number * _DIGITS + _digit(word >> _PLACE_BITS, shift))
            T.buffer_store(words, word, [begins[begin]])
            T.buffer_store(begins, begins[begin] + 1, [begin])
    with loop(spec.count) as at:
        store(spec, args, row, at, words[len(shifts) % 2 * extent + at].astype("int32"))


def _keys(spec: TopSpec, args: SortArgs, row: Any, count: int) -> Any:
    """Return a buffer of so many words, which begins with the keys of a row."""
    keys = T.alloc_buffer((count,), "int32")
    with loop(spec.shape[-1]) as at:
        T.buffer_store(keys, order_key(spec, args.x[row * spec.shape[-1] + at]).astype("int32"), [at])
    return keys


def _digit(key: Any, shift: int) -> Any:
    """Return the digit of a key that begins at a bit, in the order of signed numbers."""
    digit = (key >> shift) & (_DIGITS - 1)
    bits = min(DIGIT_BITS, 32 - shift)
    return digit if shift + DIGIT_BITS < 32 else (digit & ((1 << bits) - 1)) ^ (1 << (bits - 1))


def _spread(value: int, lanes: int) -> Any:
    return tirx.Broadcast(T.int32(value), lanes)
