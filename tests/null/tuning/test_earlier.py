"""Owns the tests of what earlier searches know: which findings hold for another list of candidates, another tolerance, another reference.

Knows nothing of how anything was measured: records are made by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.fakes import ARCH

from kerneldecl.hardware.arch_file import read_arch
from kerneldecl.model import Candidate, Trial
from kerneldecl.serial import trial_to_json
from kerneldecl.store import keys
from kerneldecl.store.local import Record
from kerneldecl.tuning.earlier import Earlier, Known, is_open, is_settled, judged

BOX = read_arch("test-cpu", ARCH.encode(), "")
TEMPLATES = {"a": "1", "b": "1"}
TIMED: Mapping[str, Any] = {"error": 1e-5, "samples": (2e-6,), "schedule_digest": "s", "code_digest": "c"}
WRONG: Mapping[str, Any] = {"error": 0.5, "failure": "wrong: relative error 0.5 over 0.0001"}


def trial(template: str = "a", **fields: Any) -> Trial:
    return Trial(Candidate.of(template, {}), 1e-6, **fields)


def manifest(**changed: Any) -> str:
    """Return the manifest of a search; `changed` are its computation, generation, reference, templates, candidates or tools."""
    search = {"tolerance": 1e-4, "generation": changed.get("generation", 0), "protocol": "p", "reference": changed.get("reference", "r")}
    what = keys.Candidates({"1.plain": changed.get("candidates", "2 digest")}, changed.get("templates", TEMPLATES))
    toolchain = {"tvm": changed.get("tvm", "1"), "tvm_ffi": "2"}
    return keys.tune_manifest(changed.get("computation", "c" * 64), BOX, search, what, toolchain)


def record(*trials: Trial, **changed: Any) -> Record:
    text = manifest(**changed)
    return Record(keys.key(text), text, {"trials": list(map(trial_to_json, trials)), "winner": trials[0].candidate.to_json()})


def known(*records: Record, **now: Any) -> Known:
    """Return what is known for a search that has another list of candidates."""
    return Earlier(records).of(manifest(**{"candidates": "3 others", **now}))


@pytest.mark.parametrize(
    ("fields", "settled", "is_left_open"),
    [
        (TIMED, True, False),
        (WRONG, True, False),
        ({"error": 1e-6, "failure": "took more than 20 s"}, True, False),
        ({"failure": "the template does not apply"}, True, False),
        ({"error": 1e-6, "failure": "after the race: its process was killed by SIGSEGV"}, True, False),
        ({}, False, True),
        ({"failure": "took more than 20 s"}, False, True),
        ({"failure": "its process was killed by SIGKILL"}, False, True),
        ({"failure": "ToolchainError: linking a.so failed: its process was killed by SIGKILL"}, False, True),
        ({"failure": "its process was killed by SIGSEGV"}, False, False),
        ({"failure": "inputs or reference: ValueError: no"}, False, False),
    ],
)
def test_a_candidate_is_settled_open_or_failed_by_chance(fields: Mapping[str, Any], settled: bool, is_left_open: bool) -> None:
    assert (is_settled(trial(**fields)), is_open(trial(**fields))) == (settled, is_left_open)


def test_an_error_is_judged_by_the_tolerance_of_now() -> None:
    timed = trial(**TIMED)
    assert judged(timed, 1e-5, is_same_reference=True) == timed, "an error as large as the tolerance is within it"
    strict = judged(timed, 9e-6, is_same_reference=True)
    assert strict == replace(timed, samples=(), failure="wrong: relative error 1e-05 over 9e-06")
    assert judged(replace(timed, failure="wrong: by a stricter one"), 1.0, is_same_reference=True) == timed
    assert judged(trial(**WRONG), 1.0, is_same_reference=True) is None, "it is right now, and nobody has timed it"


def test_by_another_reference_a_time_stays_and_a_verdict_does_not() -> None:
    assert judged(trial(**TIMED), 1e-4, is_same_reference=False) == replace(trial(**TIMED), error=None)
    refused = trial(**{**TIMED, "failure": "wrong: by a stricter tolerance"})
    assert judged(refused, 1e-4, is_same_reference=False) == replace(trial(**TIMED), error=None)
    assert judged(trial(**WRONG), 1e-4, is_same_reference=False) is None
    failed = trial(failure="the template does not apply")
    assert judged(failed, 1e-4, is_same_reference=False) == failed, "it was never compared"


def test_what_another_list_has_found_is_known() -> None:
    timed, failed = trial("a", **TIMED), trial("b", failure="the template does not apply")
    assert known(record(timed, failed)).trials(1e-4) == {timed.candidate: timed, failed.candidate: failed}
    assert known(record(timed, trial("b", failure="took more than 20 s"))).trials(1e-4) == {timed.candidate: timed}


@pytest.mark.parametrize(
    ("now", "may_be_of_this_code"),
    [({"computation": "d" * 64}, False), ({"generation": 1}, False), ({"tvm": "2"}, True), ({"templates": {"a": "2"}}, True)],
    ids=str,
)
def test_what_other_kernels_have_found_is_not(now: dict[str, Any], may_be_of_this_code: bool) -> None:
    found = known(record(trial(**TIMED)), **now)
    assert found.trials(1e-4) == {}
    assert found.is_of_other_code == may_be_of_this_code
    assert found.source(trial()) is None
    assert found.winner(trial()) is None


@pytest.mark.parametrize("is_reversed", [False, True])
def test_a_verdict_of_now_goes_before_a_time_without_one_and_that_before_none(is_reversed: bool) -> None:
    here, before = record(trial(**TIMED)), record(trial(**{**TIMED, "samples": (9e-6,)}), reference="old")
    records = [before, here] if is_reversed else [here, before]
    assert known(*records).trials(1e-4) == {trial().candidate: trial(**TIMED)}
    assert known(*records, reference="new").trials(1e-4)[trial().candidate].error is None
    failed = record(trial(failure="the template does not apply"), generation=0, candidates="x")
    several = [failed, before] if is_reversed else [before, failed]
    assert known(*several).trials(1e-4)[trial().candidate].samples == (9e-6,)


def test_of_two_findings_of_equal_worth_the_first_stays() -> None:
    first, second = (record(trial(**{**TIMED, "samples": (secs,)}), candidates=str(secs)) for secs in (1e-6, 2e-6))
    assert known(first, second).trials(1e-4)[trial().candidate].samples == (1e-6,)


def test_code_is_known_by_its_schedule_whatever_template_made_it() -> None:
    made, others = trial(**TIMED), (trial("b"), trial("b", schedule_digest="s"), trial("b", code_digest="d"))
    found = known(record(made, *others), templates={"a": "2", "b": "2"})
    assert [each.candidate for each in found.built] == [made.candidate]
    assert found.is_of_other_code
    assert known(record(made), tvm="2").built == []
    assert known(record(made), tvm="2").is_of_other_code
    assert not known(record(made)).is_of_other_code


def test_the_records_that_have_timed_a_candidate_and_where_it_has_won_are_found() -> None:
    asked = trial("a", **TIMED)
    untimed = record(trial("b", **TIMED), trial("a", failure="the template does not apply"), candidates="1")
    lost = record(trial("b", **TIMED), asked, candidates="2")
    won = record(asked, candidates="3")
    source, winner = known(untimed, lost, won).source(asked), known(untimed, lost, won).winner(asked)
    assert source is not None
    assert source.key == lost.key
    assert winner is not None
    assert winner.key == won.key
    assert known(untimed, lost).winner(asked) is None
    assert known(untimed).source(asked) is None
