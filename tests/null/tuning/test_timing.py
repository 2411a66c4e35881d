"""Owns the tests of what protocols are called in keys, and of which a timing stands for.

Knows nothing of devices.
"""

from __future__ import annotations

import pytest

from kerneldecl.timing import PROTOCOLS, TIMINGS, measuring, raced, timing_in_words, timing_of


def test_the_keys_of_what_was_measured_before_stay() -> None:
    assert (measuring("cpu"), measuring("cuda")) == ("cpu-warm-2", "cuda-graph-cold-3")


def test_a_timing_has_a_key_of_its_own_where_the_outcome_is_its_own() -> None:
    assert len({measuring("cuda", timing) for timing in TIMINGS}) == len(TIMINGS)
    assert measuring("cpu", "cool") == measuring("cpu", "steady")
    assert len({measuring("cpu", timing) for timing in TIMINGS}) == len(TIMINGS) - 1


@pytest.mark.parametrize("kind", PROTOCOLS)
@pytest.mark.parametrize("timing", TIMINGS)
def test_a_race_is_run_under_protocols_of_its_device(kind: str, timing: str) -> None:
    assert set(raced(kind, timing)) <= set(PROTOCOLS[kind])
    assert timing_of(kind, measuring(kind, timing)) == timing_in_words(kind, timing)


def test_a_key_of_another_version_tells_no_timing() -> None:
    assert timing_of("cuda", "cuda-graph-cold-2") == ""
    assert timing_of("", "cpu-warm-2") == ""
