"""Owns the sorting of rows of up to 32 bits an element on CPUs: by comparing all elements of a row, and digit by digit.

Knows nothing of which rows are sorted how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.cpu_row_sort import DIGIT_BITS, digit_shifts, group_count
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
    """Sort words of all keys and their places."""
    extent = spec.shape[-1]
    keys, words = _keys(spec, args, row, extent), _Words(spec)
    with loop(extent) as at:
        words.put(at, keys[at], at)
    words.sort(extent)
    with loop(spec.count) as at:
        store(spec, args, row, at, words.place(at))


def selected(spec: TopSpec, args: SortArgs, row: Any, *, lanes: int) -> None:
    """Sort what is no larger than a bound: of the least keys of groups of elements, the one that as many reach as there are results."""
    extent, groups = spec.shape[-1], group_count(spec.sizes)
    keys, words = _keys(spec, args, row, extent), _Words(spec)
    least = T.alloc_buffer((groups,), "int32")
    with loop(groups // lanes) as vector:
        first = T.bind(vector * lanes)
        store_vector(least, (first,), elements(keys, (first,), lanes))
        with loop(extent // groups - 1) as member:
            its = elements(keys, ((member + 1) * groups + first,), lanes)
            store_vector(least, (first,), tirx.min(elements(least, (first,), lanes), its))
    with loop(groups) as at:
        words.put(at, least[at], at)
    words.sort(groups)
    bound, count = T.alloc_buffer((1,), "int32"), T.alloc_buffer((1,), "int64")
    T.buffer_store(bound, words.key(T.int64(spec.count - 1)), [0])
    T.buffer_store(count, T.int64(0), [0])
    with loop(extent) as at, T.If(keys[at] <= bound[0]), T.Then():
        words.put(count[0], keys[at], at)
        T.buffer_store(count, count[0] + 1, [0])
    words.sort(T.bind(count[0]))
    with loop(spec.count) as at:
        store(spec, args, row, at, words.place(at))


class _Words:
    """Words of a key and a place, of which a row's elements fill a half at most: a pass sorts by a digit, from one half to the other."""

    def __init__(self, spec: TopSpec) -> None:
        self._capacity, self._shifts = spec.shape[-1], digit_shifts(spec.dtype)
        self._words = T.alloc_buffer((2 * self._capacity,), "int64")
        self._begins = T.alloc_buffer((_DIGITS,), "int64")

    def put(self, at: Any, key: Any, place: Any) -> None:
        T.buffer_store(self._words, (key.astype("int64") << _PLACE_BITS) | place, [at])

    def key(self, at: Any) -> Any:
        """Return a sorted word's key."""
        return (self._words[self._half(len(self._shifts)) + at] >> _PLACE_BITS).astype("int32")

    def place(self, at: Any) -> Any:
        """Return a sorted word's place."""
        return self._words[self._half(len(self._shifts)) + at].astype("int32")

    def sort(self, count: Any) -> None:
        """Sort the first words by their digits, the lowest first: each pass keeps the order of equal digits."""
        words, begins = self._words, self._begins
        total, its = T.alloc_buffer((1,), "int64"), T.alloc_buffer((1,), "int64")
        for number, shift in enumerate(self._shifts):
            source, target = self._half(number), self._half(number + 1)
            with loop(_DIGITS) as digit:
                T.buffer_store(begins, T.int64(0), [digit])
            with loop(count) as at:
                digit = T.bind(_digit(words[source + at] >> _PLACE_BITS, shift))
                T.buffer_store(begins, begins[digit] + 1, [digit])
            T.buffer_store(total, T.int64(target), [0])
            with loop(_DIGITS) as digit:
                T.buffer_store(its, begins[digit], [0])
                T.buffer_store(begins, total[0], [digit])
                T.buffer_store(total, total[0] + its[0], [0])
            with loop(count) as at:
                word = T.bind(words[source + at])
                digit = T.bind(_digit(word >> _PLACE_BITS, shift))
                T.buffer_store(words, word, [begins[digit]])
                T.buffer_store(begins, begins[digit] + 1, [digit])

    def _half(self, passes: int) -> int:
        return passes % 2 * self._capacity


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
