"""Owns the tests of verdicts: a slower entry is found in noise, and noise alone is no alarm.

Knows nothing of files. Samples are drawn as machines give them: a share of noise, a drift between two measurements, a heavy tail.
"""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest

from kerneldecl.compare.verdict import FAILING, Measured, Verdict, compare, judge, why_changed
from kerneldecl.store.keys import manifest

ENTRIES = 37
RUNS = 20
NOISES = {"a GPU": (0.002, 0.001, 43), "a busy GPU": (0.006, 0.002, 43), "a CPU": (0.012, 0.002, 30)}
"""By machine: sigma of a sample, sigma of the drift between two measurements, samples."""


def measured(draw: random.Random, name: str, secs: float, noise: tuple[float, float, int]) -> Measured:
    """Draw what a measurement of a kernel gives."""
    sigma, drift, count = noise
    level = secs * (1 + draw.gauss(0, drift))
    tail = (draw.expovariate(1) * 5 * sigma if draw.random() < 0.05 else 0.0 for _ in range(count))
    samples = tuple(level * (1 + draw.gauss(0, sigma) + late) for late in tail)
    return Measured(name, "0" * 64, "winner", statistics.median(samples), is_verified=True, samples=samples)


def state(draw: random.Random, noise: tuple[float, float, int], slow: str = "") -> dict[str, Measured]:
    names = [f"entry{index}@gpu" for index in range(ENTRIES)]
    return {name: measured(draw, name, (index + 1) * 1e-6 * (1.05 if name == slow else 1), noise) for index, name in enumerate(names)}


@pytest.mark.parametrize("machine", NOISES)
def test_a_slower_entry_is_found_and_noise_is_no_alarm(machine: str) -> None:
    found = alarms = 0
    for run in range(RUNS):
        draw, slow = random.Random(run), f"entry{run}@gpu"
        before = state(draw, NOISES[machine])
        alarms += sum(each.fails for each in compare(before, state(draw, NOISES[machine])))
        failing = {each.name: each.verdict for each in compare(before, state(draw, NOISES[machine], slow)) if each.fails}
        found += failing == {slow: Verdict.SLOWER}
    assert (found, alarms) == (RUNS, 0)


def test_noise_that_hides_the_budget_is_unsure() -> None:
    draw = random.Random(1)
    noise = (0.15, 0.0, 10)
    before, after = state(draw, noise), state(draw, noise)
    assert {each.verdict for each in compare(before, after)} <= {Verdict.UNSURE, Verdict.SLOWER, Verdict.FASTER}
    assert judge(0.03, 0.05, 0.02) is Verdict.UNSURE
    assert judge(0.03, 0.01, 0.02) is Verdict.SLOWER
    assert judge(-0.03, 0.01, 0.02) is Verdict.FASTER
    assert judge(0.03, 0.01, 0.04) is Verdict.SAME


def test_a_time_is_compared_with_one_of_its_own_protocol() -> None:
    cool, steady, isolated = ((secs * 1e-6,) * 5 for secs in (4, 5, 8))
    before = Measured(
        "a", "0", "w", 4e-6, is_verified=True, samples=cool, timing="cool", timings=(("isolated", isolated), ("steady", steady))
    )
    now = Measured("a", "1", "w", 8e-6, is_verified=True, samples=isolated, timing="isolated")
    (same,) = compare({"a": before}, {"a": now})
    assert (same.verdict, same.change) == (Verdict.SAME, 0.0)
    (slower,) = compare({"a": before}, {"a": dataclasses.replace(now, run_secs=9e-6, samples=(9e-6,) * 5)})
    assert slower.verdict is Verdict.SLOWER
    (unsure,) = compare({"a": dataclasses.replace(before, timings=())}, {"a": now})
    assert (unsure.verdict, unsure.change) == (Verdict.UNSURE, None), "no time is comparable"


def test_what_is_missing_unverified_or_unmeasured_fails() -> None:
    one = Measured("a@gpu", "1", "winner", 1e-6, is_verified=True)
    unverified = dataclasses.replace(one, is_verified=False)
    unmeasured = dataclasses.replace(one, run_secs=None, is_verified=False)
    cases = {
        (one, None): Verdict.MISSING,
        (one, unverified): Verdict.UNVERIFIED,
        (unverified, unverified): Verdict.UNVERIFIED,
        (one, unmeasured): Verdict.UNVERIFIED,
        (None, unmeasured): Verdict.UNVERIFIED,
        (unmeasured, one): Verdict.UNSURE,
        (None, one): Verdict.NEW,
        (one, one): Verdict.SAME,
    }
    for (before, after), expected in cases.items():
        (found,) = compare({"a@gpu": before} if before else {}, {"a@gpu": after} if after else {})
        assert found.verdict is expected
        assert found.fails == (expected in FAILING)


def test_times_without_samples_count_as_noisy() -> None:
    before = Measured("a@gpu", "1", "winner", 1e-6, is_verified=True)
    (found,) = compare({"a@gpu": before}, {"a@gpu": dataclasses.replace(before, run_secs=1.03e-6)})
    assert found.verdict is Verdict.UNSURE
    (found,) = compare({"a@gpu": before}, {"a@gpu": dataclasses.replace(before, run_secs=1.3e-6)})
    assert found.verdict is Verdict.SLOWER


def test_reasons_name_inputs() -> None:
    before = Measured(
        "a@gpu", "1", "winner", 1e-6, is_verified=True, manifest=manifest("tune", {"computation": "x", "search": {"tolerance": 1}})
    )
    after = dataclasses.replace(before, key="2", manifest=manifest("tune", {"computation": "y", "search": {"tolerance": 1}}))
    assert why_changed(before, after) == "computation"
    assert why_changed(before, dataclasses.replace(after, manifest="")) == "other inputs"
    assert why_changed(before, dataclasses.replace(before, run_secs=2e-6)) == "measured again"
    assert not why_changed(before, before)
