"""Owns how entries for a model's functions are added to the text of workloads.toml, next to those that people wrote.

Knows nothing of models or of where functions come from; reads and writes no file.

Text is appended and marked, never rewritten: names, comments and settings belong to their authors. How often a model calls
an entry is a tag of the entry: `mlp.calls-2`. Existing entries change only in such tags, and in marks of those that the
model no longer calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kerneldecl.model import Value

HEADER = """\
# Entries that `kerneldecl extract` wrote are yours to edit; it finds them again by their attributes.
edition = 1

[artifact]
name = {name}
version = "0.1.0"

[target.host]
arch = "host"                     # this machine's CPU
"""
_ANY_CALLS = re.compile(r".+\.calls-\d+")
_TAGS = re.compile(r"^(\s*tags\s*=\s*\[[^]#]*[^]#,\s])(\s*,?\s*\].*)$", re.DOTALL)
"""A line with all of an entry's tags: up to the last one, and what follows it."""
_SHOWN = 3
"""Other places that the comment of an entry lists."""
_UNUSED = "# Unused: no longer called by {model}."


class MarkedRows(NamedTuple):
    """Rows that are known when kernels are called, and the number that stands for them in attributes."""

    marker: int
    tuned: tuple[int, ...]
    upto: int

    def placed(self, value: Any, of: Any) -> Any:
        """Return a value with something in place of the marker."""
        if isinstance(value, tuple):
            return tuple(self.placed(item, of) for item in value)
        return of if value == self.marker and type(value) is int else value


@dataclass(frozen=True)
class Function:
    """A function of the model."""

    name: str
    rule: str
    attrs: tuple[tuple[str, Value], ...]
    """Attributes to declare, without those that have the rule's default."""
    identity: tuple[tuple[str, Value], ...]
    """Attributes by which an entry is recognised as this function's, whatever its other ones."""
    calls: int
    places: tuple[str, ...] = ()
    """Other places in the model that call it; the name is that of the first."""
    targets: tuple[str, ...] = ()
    """Targets that it is for; none for all."""
    rows: MarkedRows | None = None

    def is_of(self, table: Table) -> bool:
        return any(self.is_computed_by(rule, attrs) for rule, attrs in table.workloads)

    def is_computed_by(self, rule: str, attrs: tuple[tuple[str, Value], ...]) -> bool:
        rows = self.rows
        identity = {(key, rows.placed(value, rows.tuned[-1])) for key, value in self.identity} if rows else {*self.identity}
        return rule == self.rule and identity <= {*attrs}


@dataclass(frozen=True)
class Table:
    """An existing `[[workload]]` table."""

    line: int
    """Line of its header, counted from 1."""
    name: str
    tags: tuple[str, ...]
    workloads: tuple[tuple[str, tuple[tuple[str, Value], ...]], ...]
    """Rule and all attributes of each workload that it expands to."""


@dataclass(frozen=True)
class Merged:
    """The new text, and the names of entries: added, existing, existing with another count, no longer called."""

    text: str
    new: tuple[str, ...]
    known: tuple[str, ...]
    changed: tuple[str, ...]
    unused: tuple[str, ...]


def merge(text: str, tables: Sequence[Table], functions: Iterable[Function], model: str) -> Merged:
    """Return the text with an entry for each function of the model; `tables` are those of the text, in order."""
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)  # as TOML counts lines: splitlines() splits at more characters
    names = {table.name for table in tables}
    found: dict[int, int] = {}
    """Calls by position of the table."""
    appended: list[str] = []
    new: list[str] = []
    for function in functions:
        position = next((i for i, table in enumerate(tables) if function.is_of(table)), None)
        if position is not None:
            found[position] = found.get(position, 0) + function.calls
            continue
        new.append(_unique(function.name, names))
        names.add(new[-1])
        appended.append(_entry(new[-1], function, model))
    changed, unused = _update(lines, tables, found, model)
    known = tuple(tables[position].name for position in sorted(found))
    body = "".join(lines)
    end = "" if body.endswith("\n") or not body else "\n"
    return Merged(text="".join([body, end, *appended]), new=tuple(new), known=known, changed=changed, unused=unused)


def tag_word(name: str) -> str:
    """Return a model's name as part of a tag: letters, digits, _, - and ."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-") or "model"


def _update(lines: list[str], tables: Sequence[Table], found: Mapping[int, int], model: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Update counts and marks in the lines, from the last table to the first; return the names of changed and unused entries."""
    changed: list[str] = []
    unused: list[str] = []
    mark = _UNUSED.format(model=model) + "\n"
    ends = [table.line - 1 for table in tables[1:]] + [len(lines)]
    for position in reversed(range(len(tables))):
        table, calls = tables[position], _calls(tables[position].tags, model)
        if calls is None:
            if position in found and _add_tags(lines, table, ends[position], [model, _calls_tag(model, found[position])]):
                changed.append(table.name)
            continue
        start = table.line - 1
        is_marked = start > 0 and lines[start - 1] == mark
        if position not in found:
            unused.append(table.name)
            lines[start:start] = [] if is_marked else [mark]
            continue
        if calls != found[position]:
            changed.append(table.name)
            old, now = (json.dumps(_calls_tag(model, count)) for count in (calls, found[position]))
            lines[start : ends[position]] = [line.replace(old, now) for line in lines[start : ends[position]]]
        if is_marked:
            del lines[start - 1]
    return tuple(reversed(changed)), tuple(reversed(unused))


def _add_tags(lines: list[str], table: Table, end: int, tags: Sequence[str]) -> bool:
    """Add tags to an entry that another model's extraction wrote; keep an entry that a person wrote."""
    if not any(map(_ANY_CALLS.fullmatch, table.tags)):
        return False
    added = "".join(f", {json.dumps(tag)}" for tag in tags if tag not in table.tags)
    for i in range(table.line - 1, end):
        lines[i], count = _TAGS.subn(lambda match: match[1] + added + match[2], lines[i])
        if count:
            return True
    return False


def _calls_tag(model: str, calls: int) -> str:
    return f"{model}.calls-{calls}"


def _calls(tags: Iterable[str], model: str) -> int | None:
    """Return how often the model calls an entry, from its tags; None for an entry without such a tag."""
    counts = (re.fullmatch(rf"{re.escape(model)}\.calls-(\d+)", tag) for tag in tags)
    return next((int(count[1]) for count in counts if count), None)


def _unique(name: str, names: Collection[str]) -> str:
    """Return the name, with a number where it is not unique."""
    number = 1
    while (unique := name if number == 1 else f"{name}_{number}") in names:
        number += 1
    return unique


def _entry(name: str, function: Function, model: str) -> str:
    pairs: list[tuple[str, Any]] = [("name", name), ("rule", function.rule), *function.attrs]
    if function.targets:
        pairs.append(("targets", list(function.targets)))
    pairs.append(("tags", [model, _calls_tag(model, function.calls)]))
    # JSON of strings, numbers, booleans and lists is TOML as well.
    return "".join(["\n", _also(function.places), "[[workload]]\n", *(f"{key} = {_toml(value, function.rows)}\n" for key, value in pairs)])


def _toml(value: Any, rows: MarkedRows | None) -> str:
    """Return a value as TOML, a table in place of the number that marks rows."""
    if rows and type(value) is int and value == rows.marker:
        return f"{{ upto = {rows.upto}, tuned = {json.dumps(rows.tuned)} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item, rows) for item in value)}]"
    return json.dumps(value)


def _also(places: Sequence[str]) -> str:
    """Return a comment that lists the other places that call a function, up to a few."""
    rest = f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    return f"# Also {', '.join(places[:_SHOWN])}{rest}\n" if places else ""
