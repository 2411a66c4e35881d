"""Owns the comparison of what policies and templates make now with what is frozen: see the package's docstring.

Knows nothing of which of both is right.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from replay import project, replay
from replay.difference import RENEW, difference, report, space_difference
from replay.frozen import Line, Lists, Names, read_lists, read_names, read_spaces
from replay.renaming import names_difference, with_renamed
from replay.workloads import Workload, read_workloads

WORKLOADS = read_workloads()
QUICK = ("h200", "server")
FEW = 2
"""Workloads of each policy whose proposals are compared by default."""
ARCHS = list(dict.fromkeys(arch for each in WORKLOADS for arch in each.archs))
NOT_FROZEN_POLICIES = {
    "auto": "names other policies; which ones and in which order is frozen before all workloads",
    "traced": "same",
    "default": "proposes the same candidate, without parameters, for everything",
    **dict.fromkeys(project.tuner_names(), "proposes what it is told about measurements; the spaces that it searches are other policies'"),
}
"""Policies that propose nothing of their own, each with what is frozen instead."""
NOT_FROZEN_TEMPLATES = {
    "trace": "its parameter is a schedule of MetaSchedule's",
    "tvm_default": "schedules as TVM does",
    "cpu_matmul_quantized_bf16": "no arch here has AVX512-BF16: tests/tvm/templates/test_cpu_matmul_quantized.py has",
    **dict.fromkeys(
        ("library_attention", "library_conv2d", "library_matmul"),
        "calls a vendor's library with what tests/tvm/templates/test_library.py expects",
    ),
}


def compare(arch: str, frozen: Lists, now: Lists, names: Names, renamed: Sequence[str] = ()) -> None:
    lines, counted = difference(frozen, now, names, arch)
    if text := report([*renamed, *lines], counted, len(frozen)):
        pytest.fail(text, pytrace=False)


def candidates(kind: str) -> list[tuple[str, Line]]:
    """Return each frozen candidate of a kind with its policy."""
    several = [pair for arch in ARCHS for pair in read_lists(kind, arch).items()]
    return [(policy, line) for (workload, policy), lines in several if workload != replay.EVERYTHING for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_policies_propose_what_is_frozen(arch: str) -> None:
    compare_proposals(arch, read_lists("proposals", arch), WORKLOADS)


@pytest.mark.parametrize("arch", QUICK)
def test_policies_propose_what_is_frozen_for_the_first_workloads_of_each(arch: str) -> None:
    frozen = read_lists("proposals", arch)
    few = first_of_each_policy(frozen)
    kept = {key: lines for key, lines in frozen.items() if key[0] in {*few, replay.EVERYTHING}}
    compare_proposals(arch, kept, [each for each in WORKLOADS if each.text in few])


def compare_proposals(arch: str, frozen: Lists, workloads: list[Workload]) -> None:
    names, found = read_names(), replay.proposals(workloads, arch, read_spaces())
    renamed = with_renamed(names, [found], frozen)
    compare(arch, frozen, replay.proposal_lists(found, arch, renamed), renamed, list(names_difference(names, renamed)))


def first_of_each_policy(lists: Iterable[tuple[str, str]]) -> set[str]:
    """Return the workloads before which one of their policies occurs in fewer than so many."""
    met: Counter[str] = Counter()
    policies: dict[str, list[str]] = {}
    for workload, policy in lists:
        policies.setdefault(workload, []).append(policy)
    del policies[replay.EVERYTHING]
    found = set()
    for workload, several in policies.items():
        if any(met[policy] < FEW for policy in several):
            found.add(workload)
        met.update(several)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_templates_make_the_frozen_schedules(arch: str) -> None:
    names, frozen = read_names(), read_lists("schedules", arch)
    compare(arch, frozen, replay.digests(WORKLOADS, arch, frozen, names), names)


@pytest.mark.parametrize("arch", QUICK)
def test_templates_make_the_first_schedule_that_is_frozen_of_each(arch: str) -> None:
    """Of a template whose text was reworded, a comment in CUDA included, this tells at once: all schedules take minutes."""
    names, frozen = read_names(), first_of_each_template(read_lists("schedules", arch))
    compare(arch, frozen, replay.digests(WORKLOADS, arch, frozen, names), names)


def first_of_each_template(lists: Lists) -> Lists:
    """Return lists of the candidates alone before which their template does not occur."""
    met: set[str] = set()
    found: dict[tuple[str, str], tuple[Line, ...]] = {}
    for key, lines in lists.items():
        first = {line.candidate.split()[0]: line for line in reversed(lines)}
        if kept := tuple(line for template, line in first.items() if template not in met):
            found[key] = kept
        met |= first.keys()
    return found


def test_rules_are_lowered_to_the_frozen_spaces() -> None:
    now = json.loads(json.dumps(replay.spaces(WORKLOADS)))
    if text := space_difference(read_spaces(), now):
        pytest.fail(text, pytrace=False)


def test_every_workload_has_a_frozen_space_proposals_and_a_schedule() -> None:
    assert read_spaces().keys() == {each.text for each in WORKLOADS}, RENEW
    for arch in ARCHS:
        wanted = {each.text for each in WORKLOADS if arch in each.archs}
        assert {workload for workload, _ in read_lists("proposals", arch)} == {*wanted, replay.EVERYTHING}, RENEW
        assert {workload for workload, _ in read_lists("schedules", arch)} == wanted, RENEW


def test_every_policy_occurs_in_the_frozen_proposals() -> None:
    names = read_names()
    proposing = {names.policies.get(policy, policy) for policy, _ in candidates("proposals")}
    assert set(project.policy_names()) - proposing == NOT_FROZEN_POLICIES.keys()


@pytest.mark.parametrize("kind", ["proposals", "schedules"])
def test_every_template_occurs_among_the_frozen_candidates(kind: str) -> None:
    names = read_names()
    used = {names.templates.get(frozen, frozen) for frozen in (line.candidate.split()[0] for _, line in candidates(kind))}
    assert set(project.template_names()) - used == NOT_FROZEN_TEMPLATES.keys()


def test_no_frozen_schedule_stands_for_an_exception() -> None:
    assert not [line for _, line in candidates("schedules") if line.outcome.startswith("raises:")]
