"""Cases: made once, before they are needed where they are foreseen, and one at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kerneldecl.model import Signature
from kerneldecl.runners import reference_data
from kerneldecl.runners.reference_data import AtHand, Case


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Return which cases have been made, and whether by the thread that asks; a bad one cannot be."""
    done: list[tuple[str, bool]] = []

    def make(described: Mapping[str, Any]) -> Case:
        done.append((described["rule"], threading.current_thread() is threading.main_thread()))
        if described["rule"] == "bad":
            raise ValueError("no reference")
        return Case(Signature((), ()), (np.array([described["rule"]]),), ())

    monkeypatch.setattr(reference_data, "make_case", make)
    return done


def names(case: Case) -> list[str]:
    return [str(array[0]) for array in case.inputs]


def test_foreseen_case_is_made_beside_and_once(made: list[tuple[str, bool]]) -> None:
    at_hand = AtHand(names)
    assert at_hand.of({"rule": "first"}) == ["first"]
    at_hand.foresee({"rule": "second"})
    at_hand.foresee({"rule": "second"})
    assert at_hand.of({"rule": "first"}) == ["first"]
    assert at_hand.of({"rule": "second"}) == ["second"]
    at_hand.foresee({"rule": "second"})
    assert made == [("first", True), ("second", False)]


def test_case_that_nobody_foresaw_is_made_when_it_is_asked_for(made: list[tuple[str, bool]]) -> None:
    at_hand = AtHand(names)
    at_hand.foresee({"rule": "second"})
    assert at_hand.of({"rule": "third"}) == ["third"]
    assert ("third", True) in made


def test_what_is_wrong_with_a_foreseen_case_is_told_to_who_asks(made: list[tuple[str, bool]]) -> None:
    at_hand = AtHand(names)
    at_hand.foresee({"rule": "bad"})
    with pytest.raises(ValueError, match="no reference"):
        at_hand.of({"rule": "bad"})
    assert made == [("bad", False)]


def test_the_case_before_is_given_back_first(made: list[tuple[str, bool]]) -> None:
    closed: list[list[str]] = []
    at_hand = AtHand(names, closed.append)
    at_hand.of({"rule": "first"})
    at_hand.foresee({"rule": "second"})
    assert not closed
    at_hand.of({"rule": "second"})
    assert closed == [["first"]]
    assert len(made) == 2
