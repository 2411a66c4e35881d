"""Owns the tests of values that are read from JSON: what does not have its type is found, with its place.

Knows nothing of records.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.repository import REPOSITORY

from kerneldecl.model import Candidate, IterSpace, Trial
from kerneldecl.serial import misfit
from kerneldecl.store.local import LocalStore
from kerneldecl.store.results import Lowered

TRIAL = Trial(
    Candidate.of("tiles", {"size": 8, "shape": (1, 2)}), 1e-6, samples=(1e-6, 2, 3e-6), timings=(("steady", (1e-6,)),), error=None
)


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({}, ""),
        ({"samples": (1e-6, "2", True)}, "trial.samples[1]"),
        ({"samples": (1e-6, True)}, "trial.samples[1]"),
        ({"samples": [1e-6]}, "trial.samples"),
        ({"timings": (("steady", (1e-6,)), ("cool", (None,)))}, "trial.timings[1][1][0]"),
        ({"timings": (("steady",),)}, "trial.timings[0]"),
        ({"error": 1}, ""),
        ({"error": "small"}, "trial.error"),
        ({"registers": 1.0}, "trial.registers"),
        ({"candidate": Candidate("tiles", (("size", None),))}, "trial.candidate.params[0][1]"),
        ({"candidate": "tiles"}, "trial.candidate"),
    ],
)
def test_what_has_another_type_is_found_with_its_place(changed: dict[str, Any], place: str) -> None:
    assert misfit(replace(TRIAL, **changed), Trial, "trial") == place


def test_the_dtype_of_a_computation_is_that_of_its_iteration_space() -> None:
    found = [Lowered(record.result) for record in LocalStore(REPOSITORY / "cache").all("lower", is_local=False)]
    assert found
    assert [each.dtype for each in found] == [each.space.dtype for each in found]
    assert all(misfit(each.space, IterSpace, "space") == "" for each in found)
