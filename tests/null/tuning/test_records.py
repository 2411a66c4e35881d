"""Owns the tests of the tuning record: what it holds of a search, and whether it is shared or this machine's alone.

Knows nothing of how candidates were found or measured.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.repository import REPOSITORY

from kerneldecl.model import SPECIALIZE, Arch, Candidate, Proposal, Trial, Workload
from kerneldecl.plugins.load import load_arch
from kerneldecl.serial import trial_from_json
from kerneldecl.store.keys import key, manifest
from kerneldecl.store.local import LocalStore, Record
from kerneldecl.store.results import BLOBS, Lowered, Proposed, TuneResult, groups_from_json, groups_to_json
from kerneldecl.tuning import records
from kerneldecl.tuning.loop import Outcome
from kerneldecl.tuning.records import Device, measured_here, write_result
from kerneldecl.tuning.task import Task

H200, CPU = load_arch(REPOSITORY, "h200"), load_arch(REPOSITORY, "x86-64-v3")
LOWERED = {"computation": "c" * 64, "tolerance": 1e-3, "space": {"blocks": [], "inputs": [], "outputs": []}}
MANIFEST = manifest("tune", {"a": 1})
HERE, NOWHERE = Device({"provenance": {"host": "here"}}, is_here=True), Device({}, is_here=False)
FIRST, SECOND = (Candidate.of(name, {}) for name in ("first", "second"))
TIMED: Mapping[str, Any] = {"error": 1e-5, "samples": (2e-6,), "schedule_digest": "s", "code_digest": "d"}


def task_in(folder: Path, arch: Arch = H200, **fields: Any) -> Task:
    listed = groups_to_json([Proposed("plain", [Proposal(each, 1e-5) for each in (FIRST, SECOND)], searches=False)])
    task = Task(
        root=REPOSITORY,
        workload=Workload("w", "box", "elementwise", (), "auto", 20, None, (), 1),
        arch=arch,
        groups=groups_from_json(listed),
        lowered=Lowered(LOWERED),
        tolerance=1e-3,
        protocol="p",
        seed=20,
        reference_digest="reference",
        toolchain={},
        folder=folder,
        cache=folder,
    )
    return dataclasses.replace(task, **fields)


def written(folder: Path, *trials: Trial, device: Device = HERE, **fields: Any) -> tuple[str, Mapping[str, Any]]:
    """Write a record; return which kind it is, and its result."""
    store, task = LocalStore(folder / "store"), task_in(folder, **fields)
    write_result(store, MANIFEST, task, Outcome(list(trials), 0, "plain"), dict.fromkeys(BLOBS, "e" * 64), device)
    found = {
        (kind, is_local): store.read(kind, key(MANIFEST), is_local=is_local) for kind in ("tune", "rank") for is_local in (False, True)
    }
    ((kind, is_local), record), *others = [(place, each) for place, each in found.items() if isinstance(each, Record)]
    assert not others
    assert isinstance(record, Record)
    return f"{'local' if is_local else 'shared'} {kind}", record.result


@pytest.mark.parametrize(
    ("second", "device", "kind"),
    [
        (TIMED, HERE, "shared tune"),
        (TIMED, NOWHERE, "shared tune"),
        ({}, HERE, "shared tune"),
        ({}, NOWHERE, "local rank"),
    ],
    ids=["whole", "whole without the device", "wanting beside the device", "wanting without it"],
)
def test_what_is_whole_is_shared_and_what_is_wanting_is_this_machines(
    tmp_path: Path, second: Mapping[str, Any], device: Device, kind: str
) -> None:
    found, result = written(tmp_path, Trial(FIRST, 1e-5, **TIMED), Trial(SECOND, 1e-5, **second), device=device)
    assert found == kind
    assert (result["measured"], result["wanted"]) == (2 if second else 1, 2)


def test_a_winner_whose_verdict_is_wanting_is_this_machines(tmp_path: Path) -> None:
    """Its reference was edited where no device is."""
    unverified = Trial(FIRST, 1e-5, **{**TIMED, "error": None})
    kind, result = written(tmp_path, unverified, Trial(SECOND, 1e-5, failure="the template does not apply"), device=NOWHERE)
    assert (kind, result["measured"], result["wanted"], result["error"]) == ("local rank", 2, 2, None)


def test_records_of_a_detected_arch_stay_here(tmp_path: Path) -> None:
    arch = dataclasses.replace(CPU, is_detected=True)
    assert written(tmp_path, Trial(FIRST, 1e-5, **TIMED), arch=arch)[0] == "local tune"


def test_a_better_ranking_replaces_the_one_before(tmp_path: Path) -> None:
    assert written(tmp_path, Trial(FIRST, 1e-5), Trial(SECOND, 1e-5), device=NOWHERE)[1]["winner"]["template"] == "first"
    _, result = written(tmp_path, Trial(SECOND, 1e-5, **TIMED), Trial(FIRST, 1e-5), device=NOWHERE)
    assert (result["winner"]["template"], result["is_measured"], result["run_secs"]) == ("second", True, 2e-6)


def test_what_nobody_has_measured_has_the_predicted_time_and_neither_host_nor_date(tmp_path: Path) -> None:
    _, result = written(tmp_path, Trial(FIRST, 1.23456e-5), device=NOWHERE)
    assert (result["is_measured"], result["run_secs"], result["provenance"]) == (False, 1.235e-5, {})


def test_candidates_of_other_lists_are_recorded_and_not_wanted(tmp_path: Path) -> None:
    other, own = Trial(Candidate.of("third", {}), 1e-5, **TIMED), Trial(Candidate.of(SPECIALIZE, {"variant": 0}), 1e-5, **TIMED)
    trials = [Trial(FIRST, 1e-5, **TIMED), Trial(SECOND, 1e-5, **TIMED), other, own]
    _, result = written(tmp_path, *trials, known={each.candidate: each for each in (other, own)})
    assert (result["measured"], result["wanted"]) == (3, 3)
    assert [trial_from_json(each).candidate.template for each in result["trials"]] == ["first", "second", "third", SPECIALIZE]


def test_what_the_machine_has_failed_at_is_not_held_against_a_candidate(tmp_path: Path) -> None:
    failures = ("took more than 20 s", "its process was killed by SIGSEGV")
    trials = [Trial(FIRST, 1e-5, **TIMED), *(Trial(SECOND, 1e-5, failure=failure) for failure in failures)]
    _, result = written(tmp_path, *trials)
    assert [trial_from_json(each).failure for each in result["trials"]] == ["", "", failures[1]]


@pytest.mark.parametrize(
    ("arch", "winner", "said", "recorded"),
    [
        (H200, FIRST, "used", "used"),
        (H200, FIRST, "", None),
        (H200, Candidate.of(SPECIALIZE, {"variant": 0}), "used", None),
        (CPU, FIRST, "used", None),
    ],
    ids=["used", "out of the question", "a kernel of the user's own", "a CPU"],
)
def test_whether_the_winner_uses_tensor_cores_is_told_where_that_is_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: Arch, winner: Candidate, said: str, recorded: str | None
) -> None:
    monkeypatch.setattr(records, "tensor_cores", lambda *_: said)
    _, result = written(tmp_path, Trial(winner, 1e-5, **TIMED), arch=arch)
    assert result.get("tensor_cores") == recorded


def test_the_device_that_measured_is_told() -> None:
    device = measured_here({"provenance": {"gpu": "NVIDIA H200"}, "measured_peaks": {"flops_per_s": 1e15}})
    assert device.is_here
    assert device.fields["measured_peaks"] == {"flops_per_s": 1e15}
    told = device.fields["provenance"]
    assert (told["gpu"], told["host"], told["kernel"]) == ("NVIDIA H200", os.uname().nodename, os.uname().release)
    assert len(told["date"].split("-")) == 3
    assert "host" in measured_here({}).fields["provenance"]


@pytest.mark.parametrize(
    ("is_measured", "measured", "error", "coverage", "is_settled"),
    [(True, 25, 0.0, "", True), (True, 20, 0.0, "20 of 25", False), (True, 25, None, "", False), (False, 0, None, "", False)],
    ids=["settled", "in part", "not verified", "guessed"],
)
def test_a_record_is_settled_where_all_is_measured_and_its_winner_verified(
    is_measured: bool, measured: int, error: float | None, coverage: str, is_settled: bool
) -> None:
    found = TuneResult("key", {"is_measured": is_measured, "measured": measured, "wanted": 25, "error": error})
    assert (found.coverage, found.is_settled) == (coverage, is_settled)
