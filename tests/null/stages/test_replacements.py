"""Owns the tests that candidates which cannot be built leave their places to the next of their policy's order.

Knows nothing of TVM: a template that does not apply is one that gives nothing.
"""

from __future__ import annotations

import importlib

import pytest
from support.fakes import POLICY, DieRunner
from support.spaces import Space

from kerneldecl.planning.beyond import OUTDATED
from kerneldecl.plugins.find import STANDARD, plugin_names
from kerneldecl.plugins.policy_order import is_tuner, policies_behind
from kerneldecl.tuning.replacements import REPLACED_MOST

NARROW = """\
def apply(mod, params, arch):
    return f"{mod} unrolled {params['unroll']} times" if params["unroll"] >= 4 else None
"""
ANY = """\
def apply(mod, params, arch):
    return f"{mod} unrolled {params['unroll']} times"
"""
OTHER = """\
from kerneldecl.model import Candidate, Proposal

TEMPLATES = ("unrolled", "other")


def propose(space, arch, top_k):
    listed = (("unrolled", 1), ("other", 2), ("other", 4))
    return tuple(Proposal(Candidate.of(name, {"unroll": u}), 1e-6 * u) for name, u in listed[:top_k])
"""

TUNER = """\
from dataclasses import dataclass

from kerneldecl.model import Candidate, Proposal

IS_TUNER = True
TRIALS = 0
TEMPLATES = ("unrolled",)


@dataclass(frozen=True)
class Options:
    first: int = 1

    def problems(self):
        return ()


def configurations(search, options):
    return tuple(Proposal(Candidate.of("unrolled", {"unroll": u}), 1e-6 * u) for u in (1, 2, 4))
"""


@pytest.fixture
def narrow(fakes: Space) -> Space:
    """Return a workspace whose policy lists two candidates first that cannot be built."""
    fakes.edit("workloads.toml", "top_k = 3", "top_k = 1")
    return fakes.write({"templates/unrolled.py": NARROW})


def tuned(space: Space, name: str = "small") -> dict[str, str]:
    """Return the failure of each candidate of an entry, by what it is shown as; the winner is the first."""
    (entry,) = (entry for entry in space.plan().entries if entry.workload.name == name)
    assert entry.tuned is not None
    return {str(trial.candidate): trial.failure for trial in entry.tuned.trials}


def test_the_next_candidates_take_the_places_of_those_that_cannot_be_built(narrow: Space) -> None:
    assert not narrow.build().build.failures
    assert tuned(narrow) == {
        "unrolled(unroll=4)": "",
        "unrolled(unroll=1)": "the template does not apply",
        "unrolled(unroll=2)": "the template does not apply",
    }


def test_as_many_are_built_as_are_asked_for(narrow: Space) -> None:
    narrow.edit("workloads.toml", "top_k = 1", "top_k = 2")
    assert not narrow.build().build.failures
    assert {name for name, failure in tuned(narrow).items() if not failure} == {"unrolled(unroll=4)", "unrolled(unroll=8)"}


def test_nothing_more_is_asked_where_all_can_be_built(narrow: Space) -> None:
    narrow.write({"templates/unrolled.py": ANY})
    built = narrow.build()
    assert built.counts["propose"] == 3  # one of each entry
    assert set(tuned(narrow)) == {"unrolled(unroll=1)"}


def test_what_was_replaced_is_replayed_from_its_record(narrow: Space) -> None:
    narrow.build()
    before = tuned(narrow)
    assert not narrow.plan().misses
    assert not narrow.build(runner=DieRunner()).build.failures
    assert tuned(narrow) == before


def test_another_order_behind_the_list_tunes_again_though_the_list_is_the_same(narrow: Space) -> None:
    narrow.build()
    narrow.edit("policies/plain.py", "(1, 2, 4, 8)", "(1, 8, 4, 2)")
    assert not narrow.build().build.failures
    assert set(tuned(narrow)) == {"unrolled(unroll=1)", "unrolled(unroll=8)"}
    assert not narrow.plan().misses


def test_another_policy_behind_a_list_of_which_all_are_built_tunes_nothing(narrow: Space) -> None:
    narrow.write({"templates/unrolled.py": ANY})
    narrow.build()
    narrow.edit("policies/plain.py", "(1, 2, 4, 8)", "(1, 8, 4, 2)")
    assert narrow.build().counts["sample"] == 0


def test_a_template_that_only_a_replacement_names_is_part_of_what_a_record_depends_on(narrow: Space) -> None:
    narrow.write({"policies/plain.py": OTHER, "templates/other.py": ANY})
    narrow.build()
    assert set(tuned(narrow)) == {"other(unroll=2)", "unrolled(unroll=1)"}
    narrow.write({"templates/other.py": ANY.replace("times", "times again")})
    reasons = {action.reason for action in narrow.plan().misses if action.kind == "tune"}
    assert reasons == {OUTDATED}
    assert narrow.build().counts["sample"] == 3
    assert not narrow.plan().misses


def test_a_policy_of_which_nothing_can_be_built_fails_after_some_candidates(narrow: Space) -> None:
    narrow.write({"policies/plain.py": POLICY.replace("(1, 2, 4, 8)", "tuple(-n for n in range(1000))")})
    failures = narrow.build().build.failures
    assert {reason.split(":")[0] for reason in failures.values()} == {f"none of {1 + REPLACED_MOST} candidates passed"}


def test_a_choice_without_a_measurement_goes_on_to_the_next_candidate_too(narrow: Space) -> None:
    narrow.edit("archs/test-cpu.toml", 'model = ""', 'model = "another"')
    narrow.build()
    assert next(iter(tuned(narrow))) == "unrolled(unroll=4)"


@pytest.mark.parametrize("policy", ['"lists"', '["plain", "lists"]'])
def test_a_tuner_has_no_next_in_place_of_what_cannot_be_built(narrow: Space, policy: str) -> None:
    narrow.write({"policies/lists.py": TUNER})
    narrow.edit("workloads.toml", 'policy = "plain"', f"policy = {policy}")
    assert not narrow.build().build.failures
    assert set(tuned(narrow)) == {"unrolled(unroll=1)", "unrolled(unroll=2)", "unrolled(unroll=4)"}
    assert not narrow.plan().misses


@pytest.mark.parametrize("name", plugin_names("policies", STANDARD))
def test_every_policy_that_is_no_tuner_can_be_asked_for_a_longer_list(name: str) -> None:
    for behind in {each for kind in ("cpu", "cuda") for each in policies_behind(STANDARD, name, kind)}:
        assert hasattr(importlib.import_module(f"kerneldecl.policies.{behind}"), "propose") != is_tuner(STANDARD, behind)
