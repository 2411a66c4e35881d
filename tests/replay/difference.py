"""Owns how two sets of frozen lists differ, for people: what came, went, moved, and whose outcome is another one.

Knows nothing of where lists come from.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replay.frozen import Line, Lists, Names

LINES_OF_A_LIST, LINES = 5, 60
"""Shown at most, of one list and in all."""
RENEW = "python tests/replay/renew.py writes what is now right, with --show it shows what differs"


@dataclass(frozen=True)
class Change:
    """What differs about one candidate of a list."""

    kind: str
    """went, came, moved, or what became of its outcome."""
    text: str


def changes(old: Sequence[Line], new: Sequence[Line], spelled: Callable[[str], str]) -> Iterator[Change]:
    """Yield what differs between two lists, candidates that came or went first."""
    before, after = ({line.candidate: (place, line.outcome) for place, line in enumerate(lines, 1)} for lines in (old, new))
    for candidate in (each for each in before if each not in after):
        yield Change("went", f"went   {before[candidate][0]:3}. {spelled(candidate)} {before[candidate][1]}")
    for candidate in (each for each in after if each not in before):
        yield Change("came", f"came   {after[candidate][0]:3}. {spelled(candidate)} {after[candidate][1]}")
    for candidate, (place, outcome) in before.items():
        if candidate in after and after[candidate][1] != outcome:
            kind, text = _outcome(outcome, after[candidate][1])
            yield Change(kind, f"{kind} {place:3}. {spelled(candidate)} {text}")
    common = [each for each in before if each in after], [each for each in after if each in before]
    for candidate in _moved(*common):
        yield Change("moved", f"moved  {before[candidate][0]:3}. -> {after[candidate][0]}. {spelled(candidate)}")


def _outcome(old: str, new: str) -> tuple[str, str]:
    try:
        return "predicted", f"{old} -> {new} ({100 * (float(new) / float(old) - 1):+.3g} %)"
    except ValueError:
        pass  # digests
    is_renamed = "/" in old and old.partition("/")[2] == new.partition("/")[2]
    return "renamed" if is_renamed else "code", f"{old} -> {new}{' (names inside alone)' * is_renamed}"


def _moved(old: list[str], new: list[str]) -> Iterator[str]:
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, start, end, *_ in matcher.get_opcodes():
        if tag in {"delete", "replace"}:
            yield from old[start:end]


def difference(old: Lists, new: Lists, names: Names, arch: str) -> tuple[list[str], Counter[str]]:
    """Return what differs as lines of text, and how often each kind of change occurs; nothing if nothing does."""
    lines: list[str] = []
    counted: Counter[str] = Counter()
    for key in dict.fromkeys((*old, *new)):
        if found := list(changes(old.get(key, ()), new.get(key, ()), names.spelled)):
            counted["lists"] += 1
            counted.update(change.kind for change in found)
            lines.append(f"{key[0]} @ {arch}, {key[1]}:")
            lines += [f"  {change.text}" for change in found[:LINES_OF_A_LIST]]
            lines += [f"  … {len(found) - LINES_OF_A_LIST} more"] * (len(found) > LINES_OF_A_LIST)
    return lines, counted


def report(lines: Sequence[str], counted: Mapping[str, int], total: int) -> str:
    """Return the difference for a screen, with a summary; empty where there is none."""
    if not lines:
        return ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in counted.items() if kind != "lists")
    shown = [*lines[:LINES], *([f"… {len(lines) - LINES} more lines"] if len(lines) > LINES else [])]
    return "\n".join([*shown, f"{counted['lists']} of {total} lists differ: {kinds}", RENEW])


def space_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return which iteration spaces differ and in what; empty where none does."""
    differing = [text for text in dict.fromkeys((*old, *new)) if old.get(text) != new.get(text)]
    lines = [f"{text}: {next(_places(old.get(text), new.get(text), 'space'))}" for text in differing]
    return "\n".join([*lines[:LINES], f"{len(lines)} of {len(old.keys() | new.keys())} spaces differ", RENEW]) if lines else ""


def _places(old: Any, new: Any, place: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for name in old:
            yield from _places(old[name], new[name], f"{place}.{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for at, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _places(one, other, f"{place}[{at}]")
    elif old != new:
        yield f"{place} was {str(old)[:100]}, is {str(new)[:100]}"
