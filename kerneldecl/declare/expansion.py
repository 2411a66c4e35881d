"""Owns expansion: which lists of a `[[workload]]` table stand for several entries, and how those entries are named.

Knows nothing of whether the values are right.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerneldecl.declare.toml_keys import Finding
from kerneldecl.diagnostics.messages import show

MOST_ENTRIES = 100_000
_IN_NAMES = re.compile(r"[A-Za-z0-9_.+/-]*")

Attrs = Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """One direction of expansion: a list of an attribute's values, or `cases`. Each item sets one or more attributes."""

    key: str
    """Key in the table."""
    items: tuple[Attrs, ...]

    def labels(self) -> list[str]:
        """Return what each item adds to an entry's name: `m=16`."""
        return [",".join(f"{name}={label(value)}" for name, value in item.items()) for item in self.items]


def split(table: Attrs, depths: Mapping[str, int]) -> tuple[dict[str, Any], list[Axis]]:
    """Return the attributes that hold one value, and the axes, both in order of the table.

    `depths` are the levels of lists in one value of each attribute: 0 for a scalar.
    """
    fixed: dict[str, Any] = {}
    axes: list[Axis] = []
    for key, value in table.items():
        if key == "cases":
            axes.append(Axis(key, tuple(value)))
        elif key not in depths:
            continue
        elif type(value) is list and _nesting(value) > depths[key]:
            axes.append(Axis(key, tuple({key: item} for item in value)))
        else:
            fixed[key] = value
    return fixed, axes


def combinations(name: str, axes: Sequence[Axis], read: Sequence[Sequence[Attrs]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and attributes of every combination, the last axis fastest. `read` holds the validated items of each axis."""
    if not axes:
        yield name, {}
        return
    for items in itertools.product(*(zip(axis.labels(), values, strict=True) for axis, values in zip(axes, read, strict=True))):
        attrs: dict[str, Any] = {}
        for _, values in items:
            attrs |= values
        yield f"{name}[{','.join(text for text, _ in items)}]", attrs


def count(axes: Sequence[Axis]) -> int:
    """Return how many combinations there are."""
    return math.prod(len(axis.items) for axis in axes)


def size_findings(axes: Sequence[Axis]) -> Iterator[Finding]:
    """Yield an empty axis, and too many combinations; they are counted, not enumerated."""
    for axis in axes:
        if not axis.items:
            yield Finding.of((axis.key,), f"{axis.key} is []; expected a value, or a list of values to expand")
        if len(lengths := _lengths(axis)) > 1:
            several = " and ".join(map(str, lengths))
            sentence = f"{axis.key} lists values of {several} extents; expected values of one length"
            yield Finding.of((axis.key,), sentence, "declare each length in a table of its own")
    if count(axes) > MOST_ENTRIES:
        sizes = " x ".join(f"{len(axis.items)} {axis.key}" for axis in axes)
        yield Finding.of((), f"{sizes} expand to {count(axes)} entries; expected at most {MOST_ENTRIES}")


def _lengths(axis: Axis) -> list[int]:
    """Return how many extents the values of an axis have, where all are lists of integers: shapes of one operator have one rank."""
    values = [value for item in axis.items for value in item.values()] if axis.key != "cases" else []
    are_extents = all(isinstance(value, list) and all(type(extent) is int for extent in value) for value in values)
    return list(dict.fromkeys(map(len, values))) if are_extents else []


def label_findings(name: str, axes: Sequence[Axis]) -> Iterator[Finding]:
    """Yield each item whose name is not unique, or that cannot be part of a name."""
    for axis in axes:
        seen: set[str] = set()
        for text, item in zip(axis.labels(), axis.items, strict=True):
            if text in seen:
                yield Finding.of((axis.key,), f'duplicate name "{name}[{text}]"; {axis.key} lists these values twice')
            seen.add(text)
            for key, value in item.items():
                if not _IN_NAMES.fullmatch(label(value)):
                    sentence = f"{key} is {show(value)}, which cannot be part of a name"
                    yield Finding.of((axis.key,), sentence, "declare it in a table of its own, not in a list")


def label(value: object) -> str:
    """Return a value as part of a name: `16`, `true`, `128x8192`, `bias+relu`; `none` for an empty value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        is_extents = all(type(item) is int for item in value)
        return ("x" if is_extents else "+").join(map(label, value)) or "none"
    return str(value) or "none"


def _nesting(value: object) -> int:
    """Return how many levels of lists surround every item: 1 for `[]`, 2 for `[[1], []]`, 1 for `[1, [2]]`."""
    return 1 + min(map(_nesting, value), default=0) if isinstance(value, list) else 0
