"""Reference data: made once, ahead of need after `prepare_next`, resident for one workload at a time."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kerneldecl.runners import reference_data
from kerneldecl.runners.reference_data import ReferenceData, ResidentData, WorkloadSpec
from kerneldecl.signature import Signature


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Return the rules whose data was made, and whether by the main thread; the data of rule "bad" cannot be made."""
    done: list[tuple[str, bool]] = []

    def make(spec: WorkloadSpec) -> ReferenceData:
        done.append((spec["rule"], threading.current_thread() is threading.main_thread()))
        if spec["rule"] == "bad":
            raise ValueError("no reference")
        return ReferenceData(Signature((), ()), (np.array([spec["rule"]]),), ())

    monkeypatch.setattr(reference_data, "make_reference_data", make)
    return done


def names(data: ReferenceData) -> list[str]:
    return [str(array[0]) for array in data.inputs]


def test_next_data_is_made_once_in_another_thread(made: list[tuple[str, bool]]) -> None:
    resident = ResidentData(names)
    assert resident.of({"rule": "first"}) == ["first"]
    resident.prepare_next({"rule": "second"})
    resident.prepare_next({"rule": "second"})
    assert resident.of({"rule": "first"}) == ["first"]
    assert resident.of({"rule": "second"}) == ["second"]
    resident.prepare_next({"rule": "second"})
    assert made == [("first", True), ("second", False)]


def test_data_that_was_not_prepared_is_made_when_it_is_needed(made: list[tuple[str, bool]]) -> None:
    resident = ResidentData(names)
    resident.prepare_next({"rule": "second"})
    assert resident.of({"rule": "third"}) == ["third"]
    assert ("third", True) in made


def test_a_failure_to_make_the_next_data_is_raised_when_it_is_needed(made: list[tuple[str, bool]]) -> None:
    resident = ResidentData(names)
    resident.prepare_next({"rule": "bad"})
    with pytest.raises(ValueError, match="no reference"):
        resident.of({"rule": "bad"})
    assert made == [("bad", False)]


def test_the_data_before_is_released_first(made: list[tuple[str, bool]]) -> None:
    closed: list[list[str]] = []
    resident = ResidentData(names, closed.append)
    resident.of({"rule": "first"})
    resident.prepare_next({"rule": "second"})
    assert not closed
    resident.of({"rule": "second"})
    assert closed == [["first"]]
    assert len(made) == 2
