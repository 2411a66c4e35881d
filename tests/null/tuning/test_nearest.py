"""Owns the tests of which recorded configurations are nearest to a computation.

Knows nothing of search spaces: records are made up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.cpus import AVX512, runnable
from support.iter_spaces import matmul

from kerneldecl.model import Arch, Candidate, IterSpace, Trial
from kerneldecl.serial import to_json, trial_to_json
from kerneldecl.store.keys import manifest
from kerneldecl.store.local import Record
from kerneldecl.store.results import Lowered
from kerneldecl.tuning.nearest import MOST, Nearest, form

HERE = replace(runnable(AVX512), model="this CPU")
THERE = replace(HERE, model="that CPU")


def lowered(name: str, space: IterSpace) -> Lowered:
    shapes = [{"name": "a", "shape": [axis.extent for axis in space.blocks[0].axes], "dtype": "float32"}]
    return Lowered({"computation": name, "space": to_json(space), "signature": {"inputs": shapes, "outputs": shapes}})


def tuned(name: str, arch: Arch, *fastest: int, trials: Any = None) -> Record:
    """Return a tuning whose candidates are told by their `tile`, the winner first."""
    timed = [Trial(Candidate.of("tiled", {"tile": tile}), 1e-6, samples=(1e-6 * (1 + at),)) for at, tile in enumerate(fastest)]
    listed = [trial_to_json(trial) for trial in timed] if trials is None else trials
    result = {"computation": name, "winner": timed[0].candidate.to_json(), "is_measured": True, "trials": listed}
    return Record(f"{name} on {arch.model}", manifest("tune", {"arch": {"kind": arch.kind, "model": arch.model}}), result)


def tiles(found: Any) -> list[Any]:
    return [dict(known.candidate.params)["tile"] for known in found]


COMPUTATIONS = {
    "own": matmul((64, 64, 64), dtype="float32"),
    "twice": matmul((128, 64, 64), dtype="float32"),
    "far": matmul((1024, 1024, 64), dtype="float32"),
    "half": matmul((128, 64, 64), dtype="float16"),
}
LOWERED = {name: lowered(name, space) for name, space in COMPUTATIONS.items()}
RECORDS = [Record(name, "", found.json) for name, found in LOWERED.items()]


def test_the_best_of_the_nearest_come_first_then_the_second_best() -> None:
    nearest = Nearest([tuned("far", HERE, 8, 9), tuned("twice", HERE, 4, 5, 6)], RECORDS)
    assert tiles(nearest.of(LOWERED["own"], HERE)) == [4, 8, 5, 9, 6]


def test_another_device_is_as_far_as_a_size_eight_times_as_large() -> None:
    nearest = Nearest([tuned("twice", THERE, 1), tuned("far", HERE, 2), tuned("twice", HERE, 3)], RECORDS)
    assert tiles(nearest.of(LOWERED["own"], HERE)) == [3, 1, 2]


def test_a_computations_own_measurements_are_no_news_but_those_of_another_device_are() -> None:
    nearest = Nearest([tuned("own", HERE, 1), tuned("own", THERE, 2)], RECORDS)
    assert tiles(nearest.of(LOWERED["own"], HERE)) == [2]


def test_another_dtype_or_kind_of_device_is_not_alike() -> None:
    gpu = replace(HERE, kind="cuda", cpu=None, gpu=object())  # type: ignore[arg-type]  # its figures are not read
    nearest = Nearest([tuned("half", HERE, 1), tuned("twice", gpu, 2)], RECORDS)
    assert nearest.of(LOWERED["own"], HERE) == ()


def test_the_source_tells_record_arguments_and_device() -> None:
    (known,) = Nearest([tuned("twice", THERE, 4)], RECORDS).of(LOWERED["own"], HERE)
    assert known.source == {"record": "twice on that CPU", "arguments": "float32 128x64x64 -> 128x64x64", "model": "that CPU"}


def test_what_was_not_measured_or_is_damaged_or_has_no_computation_gives_nothing() -> None:
    unmeasured = tuned("twice", HERE, 1)
    unmeasured = unmeasured._replace(result={**unmeasured.result, "is_measured": False})
    damaged, unknown = tuned("far", HERE, 2, trials=[{"candidate": 3}]), tuned("nobody knows", HERE, 3)
    assert Nearest([unmeasured, damaged, unknown], RECORDS).of(LOWERED["own"], HERE) == ()


def test_the_order_of_records_does_not_matter_and_there_are_not_too_many() -> None:
    records = [tuned("twice", HERE, *range(100)), tuned("far", HERE, *range(200, 300)), tuned("own", THERE, 7)]
    found = Nearest(records, RECORDS).of(LOWERED["own"], HERE)
    assert found == Nearest(records[::-1], RECORDS).of(LOWERED["own"], HERE)
    assert len(found) == MOST


def test_a_form_is_all_but_extents() -> None:
    assert form(COMPUTATIONS["own"]) == form(COMPUTATIONS["far"])
    assert form(COMPUTATIONS["own"]) != form(COMPUTATIONS["half"])
