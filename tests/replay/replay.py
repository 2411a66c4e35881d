"""Owns what is replayed: proposals of all policies on frozen spaces, schedules of frozen candidates, and which those are.

Knows nothing of how it is frozen or compared.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from replay import project
from replay.frozen import Line, Lists, Names
from replay.workloads import Workload

MOST_SCHEDULES = 3
"""Of one workload on one arch."""
EVERYTHING = "every workload"
"""In the place of a workload: which policies are asked."""
SCHEDULES = "schedules"
"""In the place of a policy, for those candidates that have a digest."""
_IDENTIFIER = re.compile(r'"[^"\n]*"|(?<![\w.])[A-Za-z_]\w*')


class Proposed(NamedTuple):
    """A candidate as its policy names it."""

    template: str
    params: dict[str, Any]
    secs: float


Proposals = dict[tuple[str, str], list[Proposed]]
"""By workload and policy, both by their present names."""


def spaces(workloads: list[Workload]) -> dict[str, Any]:
    """Lower all workloads and return their iteration spaces as JSON."""
    return {each.text: project.to_json(project.space_of(project.lowered(each.rule, each.attrs))) for each in workloads}


def proposals(workloads: list[Workload], arch: str, held: Mapping[str, Any]) -> Proposals:
    """Return what each policy for an arch proposes for each of its workloads."""
    found, of = {}, project.arch_named(arch)
    asked = project.asked_policies(of.kind)
    for each in workloads:
        if arch in each.archs and each.text in held:
            space = project.space_from_json(held[each.text])
            for policy in asked:
                found[each.text, policy] = [Proposed(*one) for one in project.proposed(policy, space, of)]
    return found


def proposal_lists(found: Proposals, arch: str, names: Names) -> Lists:
    """Return proposals as they are frozen, and before them which policies are asked."""
    kind = project.arch_named(arch).kind
    asked = {name: project.policies_behind(project.ROOT, name, kind) for name in ("auto", "traced")}
    lists = {(EVERYTHING, name): tuple(Line(names.frozen_policy(policy), "asked") for policy in of) for name, of in asked.items()}
    for (workload, policy), several in found.items():
        if several:
            lines = (Line(names.text_of(one.template, one.params), f"{one.secs:.5e}") for one in several)
            lists[workload, names.frozen_policy(policy)] = tuple(lines)
    return lists


def digests(workloads: list[Workload], arch: str, frozen: Lists, names: Names) -> Lists:
    """Return the digest of what templates now make of the candidates in frozen lists."""
    found: Lists = {}
    for each in workloads:
        if lines := frozen.get((each.text, SCHEDULES)):
            mod = project.lowered(each.rule, each.attrs)
            found[each.text, SCHEDULES] = tuple(Line(line.candidate, _digest(mod, line.candidate, arch, names)) for line in lines)
    return found


def _digest(mod: Any, candidate: str, arch: str, names: Names) -> str:
    """Return a digest, for a function that is traceless with that of its text without names; else what was raised."""
    try:
        made = project.schedule(mod, *names.candidate_of(candidate), project.arch_named(arch))
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what came of it
        return f"raises:{type(error).__name__}"
    if made is None:
        return "none"
    return made.digest[:16] if made.has_trace else f"{made.digest[:16]}/{project.digest(without_names(made.text).encode())[:8]}"


def without_names(text: str) -> str:
    """Return a script with its names numbered as they occur: equal texts are then the same function under other names."""
    numbers: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else numbers.setdefault(match[0], f"v{len(numbers)}")

    return _IDENTIFIER.sub(numbered, text)


def chosen(workloads: list[Workload], lists: Mapping[str, Lists], archs: list[str]) -> dict[str, Lists]:
    """Return the candidates by arch whose schedules are frozen, without digests.

    Of each workload that is the first one, and those with most pairs of parameters' values that none before them had.
    """
    met: set[tuple[str, ...]] = set()
    found: dict[str, Lists] = {arch: {} for arch in archs}
    for each, arch in itertools.product(workloads, archs):
        candidates = list(dict.fromkeys(_candidates(each.text, lists[arch]))) if arch in each.archs else []
        taken: list[str] = []
        while candidates and len(taken) < MOST_SCHEDULES:
            best = max(candidates, key=lambda one: len(_pairs(one) - met)) if taken else candidates[0]
            if taken and _pairs(best) <= met:
                break
            met |= _pairs(best)
            taken.append(best)
            candidates.remove(best)
        if taken:
            found[arch][each.text, SCHEDULES] = tuple(Line(candidate, "?") for candidate in taken)
    return found


def _candidates(workload: str, lists: Lists) -> Iterator[str]:
    return (line.candidate for (of, _), lines in lists.items() if of == workload for line in lines)


def _pairs(candidate: str) -> set[tuple[str, ...]]:
    template, *values = candidate.split()
    placed = [f"{place}:{value}" for place, value in enumerate(values)]
    return {(template, *pair) for pair in itertools.combinations(placed, 2)} | {(template, one) for one in placed} | {(template,)}
