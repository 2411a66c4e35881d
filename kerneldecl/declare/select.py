"""Owns how patterns of the command line select entries.

Knows nothing of what is done with the selected ones.

`*` and `?` are wildcards; brackets are literal, since names have them. A pattern is matched against the name, with and
without the expanded attributes: `qkv`, `qkv[m=16]`, `qkv[m=*]`. `rule:` and `tag:` match those instead; `@` limits the target.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kerneldecl.diagnostics.messages import nearest, show
from kerneldecl.errors import PatternError
from kerneldecl.model import Workload


def select(workloads: Sequence[Workload], patterns: Sequence[str]) -> tuple[Workload, ...]:
    """Return the workloads that any pattern matches, in their own order; all where there is no pattern.

    Raise PatternError for the patterns that match nothing.
    """
    if not patterns:
        return tuple(workloads)
    chosen: set[int] = set()
    sentences: list[str] = []
    for pattern in patterns:
        matched = _matches(pattern, workloads)
        chosen.update(matched)
        if not matched:
            sentences.append(_no_match(pattern, workloads))
    if sentences:
        raise PatternError("\n".join(sentences))
    return tuple(workloads[position] for position in sorted(chosen))


def _matches(pattern: str, workloads: Sequence[Workload]) -> list[int]:
    body, at, target = pattern.rpartition("@")
    kind, wanted = _subject(body if at else pattern)
    subject, on = _regex(wanted), _regex(target if at else "*")
    return [
        position
        for position, workload in enumerate(workloads)
        if on.fullmatch(workload.target) and any(map(subject.fullmatch, _subjects(kind, workload)))
    ]


def _subject(pattern: str) -> tuple[str, str]:
    """Return what is matched (`rule`, `tag` or, empty, the name) and the pattern for it."""
    kind, colon, wanted = pattern.partition(":")
    return (kind, wanted) if colon and kind in {"rule", "tag"} else ("", pattern)


def _subjects(kind: str, workload: Workload) -> Iterable[str]:
    """Return what of a workload a pattern of this kind is matched against."""
    if kind == "rule":
        return (workload.rule,)
    return workload.tags if kind == "tag" else (workload.name, workload.name.partition("[")[0])


def _regex(pattern: str) -> re.Pattern[str]:
    parts = (".*" if part == "*" else "." if part == "?" else re.escape(part) for part in re.split(r"([*?])", pattern))
    return re.compile("".join(parts))


def _no_match(pattern: str, workloads: Sequence[Workload]) -> str:
    kind, wanted = _subject(pattern)
    prefix = f"{kind}:" if kind else ""
    name, at, target = wanted.partition("@")
    known = dict.fromkeys(each for workload in workloads for each in _subjects(kind, workload))
    near = nearest(name, known)
    if near == name:
        targets = ", ".join(dict.fromkeys(workload.target for workload in workloads if near in _subjects(kind, workload)))
        return f"no entry matches {show(pattern)}; {prefix}{near} is declared for {targets}"
    near_target = nearest(target, dict.fromkeys(workload.target for workload in workloads)) or target
    hint = f'; did you mean "{prefix}{near}{at}{near_target}"?' if near else ""
    return f"no entry matches {show(pattern)}{hint}"
