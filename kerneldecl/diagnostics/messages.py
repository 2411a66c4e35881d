"""Owns the wording of mistakes: values as the user wrote them, lists of expected names, the nearest valid name.

Knows nothing of the workspace file's structure or of line numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from kerneldecl.errors import printable

_LEAST_RATIO = 0.5
"""Lowest similarity of a suggestion, that of "nq" and "nn"; below it suggestions are noise."""
_LONGEST_VALUE = 80
_MOST_NAMES = 12
"""Names that a message lists where a command lists them as well."""
_LISTED_BY = {"rule": "rules", "policy": "policies", "template": "templates", "arch": "archs"}
"""The command that lists what may be declared of a kind."""


def show(value: object) -> str:
    """Return a TOML value as the user would write it, cut to a line's length."""
    text = printable(_show(value))
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def _show(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_show, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_show(item)}' for key, item in value.items())}}}"
    return str(value)


def unknown(kind: str, got: object, known: Iterable[str], *, where: str = "", also: Iterable[str] = ()) -> tuple[str, str]:
    """Return message and hint for a name that is not in `known`; the hint may suggest a name in `known` or `also`."""
    names = tuple(known)
    expected = f"one of {', '.join(names)}" if len(names) > 1 else "".join(names) or "none, for there is none"
    if kind in _LISTED_BY and len(names) > _MOST_NAMES:
        expected = f"one of the {len(names)} that `kerneldecl {_LISTED_BY[kind]}` lists"
    near = nearest(got, (*names, *also)) if isinstance(got, str) else None
    place = f" {where}" if where else ""
    return f"unknown {kind} {show(got)}{place}; expected {expected}", f'did you mean "{near}"?' if near else ""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to `word`, the first of equals; None if no name is similar enough."""
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(None, b=word.lower())
    best, best_ratio = None, 0.0
    for name in names:
        matcher.set_seq1(name.lower())
        if matcher.real_quick_ratio() <= best_ratio or matcher.quick_ratio() <= best_ratio:
            continue
        ratio = matcher.ratio()
        if ratio >= _LEAST_RATIO and ratio > best_ratio:
            best, best_ratio = name, ratio
    return best
