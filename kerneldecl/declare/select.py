"""Owns how patterns of the command line select entries.

Knows nothing of what is done with the selected ones.

`*` and `?` are wildcards; brackets are literal, since names have them. A pattern is matched against the name, with and
without the expanded attributes: `qkv`, `qkv[m=16]`, `qkv[m=*]`. `rule:`, `tag:`, `policy:` and `arch:` match those instead;
`stale:`, `failed:` and `unmeasured:` select entries in that state, all or those whose name matches what follows. `@` limits the
target. A `-` in front takes entries out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from kerneldecl.diagnostics.messages import nearest, show
from kerneldecl.errors import PatternError
from kerneldecl.model import Policy, uses

STATES = ("stale", "failed", "unmeasured")
"""States that a pattern may ask for: a build would run something; the last build failed it; nobody has measured its winner."""
KINDS = ("rule", "tag", "policy", "arch")


class Entry(Protocol):
    """What patterns are matched against: a workload, or what is listed of one."""

    @property
    def name(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def entry(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def tags(self) -> tuple[str, ...]: ...
    @property
    def policy(self) -> Policy: ...


E = TypeVar("E", bound=Entry)


@dataclass(frozen=True)
class Facts:
    """What patterns may ask besides what stands in a workload."""

    archs: Mapping[str, str] = field(default_factory=dict)
    """Arch of each target."""
    in_state: Callable[[str], Collection[str]] = lambda _: ()
    """Gives the entries in one of the `STATES`."""


def select(workloads: Sequence[E], patterns: Sequence[str], facts: Facts | None = None) -> tuple[E, ...]:
    """Return the workloads that any pattern matches, in their own order; all where there is no pattern, or only such as take out.

    Raise PatternError for the patterns that match nothing; of those for a state, where no entry or target of that name is declared.
    """
    if not patterns:
        return tuple(workloads)
    known = facts or Facts()
    chosen: set[int] = set()
    taken_out: set[int] = set()
    sentences: list[str] = []
    for pattern in patterns:
        matched = _matches(pattern.removeprefix("-"), workloads, known)
        (taken_out if pattern.startswith("-") else chosen).update(matched)
        if not matched and (sentence := _no_match(pattern.removeprefix("-"), workloads, known)):
            sentences.append(sentence)
    if sentences:
        raise PatternError("\n".join(sentences))
    if all(pattern.startswith("-") for pattern in patterns):
        chosen = set(range(len(workloads)))
    return tuple(workloads[position] for position in sorted(chosen - taken_out))


def _matches(pattern: str, workloads: Sequence[Entry], facts: Facts) -> list[int]:
    body, at, target = pattern.rpartition("@")
    kind, wanted = _subject(body if at else pattern)
    is_state = kind in STATES
    subject, on = _regex(wanted or "*" if is_state else wanted), _regex(target if at else "*")
    there = facts.in_state(kind) if is_state else ()
    return [
        position
        for position, workload in enumerate(workloads)
        if on.fullmatch(workload.target)
        and (not is_state or workload.entry in there)
        and any(map(subject.fullmatch, _subjects(kind, workload, facts)))
    ]


def _subject(pattern: str) -> tuple[str, str]:
    """Return what is matched (one of KINDS or STATES; empty: the name) and the pattern for it."""
    kind, colon, wanted = pattern.partition(":")
    return (kind, wanted) if colon and kind in {*KINDS, *STATES} else ("", pattern)


def _subjects(kind: str, workload: Entry, facts: Facts) -> Iterable[str]:
    """Return what of a workload a pattern of this kind is matched against."""
    if kind == "rule":
        return (workload.rule,)
    if kind == "tag":
        return workload.tags
    if kind == "policy":
        return [use.name for use in uses(workload.policy)]
    if kind == "arch":
        return (facts.archs.get(workload.target, ""),)
    return (workload.name, workload.name.partition("[")[0])


def _regex(pattern: str) -> re.Pattern[str]:
    parts = (".*" if part == "*" else "." if part == "?" else re.escape(part) for part in re.split(r"([*?])", pattern))
    return re.compile("".join(parts))


def _no_match(pattern: str, workloads: Sequence[Entry], facts: Facts) -> str:
    """Return why a pattern matches nothing, with the nearest that does; empty where it asks for a state that no such entry is in."""
    kind, wanted = _subject(pattern)
    if kind in STATES:
        name = f"*{wanted}" if not wanted or wanted.startswith("@") else wanted
        return "" if _matches(name, workloads, facts) else _no_match(name, workloads, facts)
    prefix = f"{kind}:" if kind else ""
    name, at, target = wanted.partition("@")
    known = dict.fromkeys(each for workload in workloads for each in _subjects(kind, workload, facts))
    near = nearest(name, known)
    if near == name:
        targets = ", ".join(dict.fromkeys(workload.target for workload in workloads if near in _subjects(kind, workload, facts)))
        return f"no entry matches {show(pattern)}; {prefix}{near} is declared for {targets}"
    near_target = nearest(target, dict.fromkeys(workload.target for workload in workloads)) or target
    hint = f'; did you mean "{prefix}{near}{at}{near_target}"?' if near else "; `kerneldecl query '*'` lists all"
    return f"no entry matches {show(pattern)}{hint}"
