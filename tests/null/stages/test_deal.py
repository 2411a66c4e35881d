"""Owns the tests of seconds that all entries share: which search has the next batch, and when they end.

Knows nothing of candidates: a batch is a time that is written down, and takes a second of a clock that is wound by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from support.cpus import AVX512, runnable

from kerneldecl.model import Workload
from kerneldecl.stages import deal as module
from kerneldecl.stages.deal import deal
from kerneldecl.tuning.budget import Ending

LEAST_SECS = 1e-6


@dataclass(frozen=True)
class Asked:
    """Stands for a task."""

    times: Sequence[float | None]
    """What each batch finds: a time, or nothing that is right."""
    ended_by: Callable[[], Ending | None] | None = None


@dataclass
class World:
    """A clock, and what was run on it."""

    secs: float = 0.0
    ran: list[str] = field(default_factory=list)
    is_interrupted: bool = False
    is_over: bool = False

    def dealt(self, seconds: float, **entries: tuple[int, Sequence[float | None]]) -> dict[str, int]:
        """Return how many batches each entry had; each is given with its calls and what its batches find."""
        waiting: Any = [(_entry(name, calls), Asked(times)) for name, (calls, times) in entries.items()]
        session: Any = SimpleNamespace(is_over=False, is_interrupted=self.is_interrupted, report=lambda _: None, runner=None)
        session.workspace = SimpleNamespace(store=None)
        ended = {entry.entry: outcome for entry, _, outcome in deal(session, waiting, seconds, lambda: self.secs)}
        assert all(count == self.ran.count(name) for name, count in ended.items())  # type: ignore[comparison-overlap]  # of the fake
        return {name: self.ran.count(name) for name in ended}


def _entry(name: str, calls: int) -> Any:
    workload = Workload(name, "", "matmul", (), "auto", 20, None, (f"model.calls-{calls}",), 1)
    return SimpleNamespace(entry=name, workload=workload, arch=runnable(AVX512))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    def reporter(_: Any, entry: Any) -> Any:
        return lambda doing, *_: made.ran.append(entry.entry) if doing == "timed" else None

    def tuning(task: Asked, _runner: Any, _store: Any, on_progress: Any) -> Iterator[None]:
        done = 0
        assert task.ended_by is not None
        for secs in task.times:
            if task.ended_by():
                break
            made.secs += 1
            done += 1
            on_progress("timed", 1, 1, secs)
            yield
        return done  # type: ignore[return-value]  # stands for the outcome

    monkeypatch.setattr(module, "reporter", reporter)
    monkeypatch.setattr(module, "tuning", tuning)
    monkeypatch.setattr(module, "least_secs", lambda _: LEAST_SECS)
    return made


def test_what_models_call_more_often_is_searched_longer(world: World) -> None:
    same = [1e-4] * 100
    batches = world.dealt(24, often=(10, same), seldom=(1, same))
    assert batches["often"] > 5 * batches["seldom"]
    assert batches["often"] + batches["seldom"] == 24


def test_an_entry_at_the_peak_has_its_first_batch_alone(world: World) -> None:
    assert world.dealt(10, perfect=(100, [LEAST_SECS] * 50), slow=(1, [1e-4] * 50)) == {"perfect": 1, "slow": 9}


def test_what_still_improves_goes_before_what_has_stood_still(world: World) -> None:
    improving = [1e-4 * 0.8**batch for batch in range(50)]
    batches = world.dealt(20, improving=(1, improving), still=(1, [0.8e-4] * 50))
    assert world.ran[:3] == ["improving", "still", "improving"]
    assert batches["improving"] > 4


def test_every_entry_has_a_batch_though_time_is_over_before(world: World) -> None:
    assert world.dealt(0.5, first=(1, [1e-4] * 9), second=(1, [1e-4] * 9), third=(1, [1e-4] * 9)) == {"first": 1, "second": 1, "third": 1}


def test_a_search_without_a_right_candidate_goes_on_until_it_has_one(world: World) -> None:
    assert world.dealt(2, wrong=(1, [None, None, None, 1e-4, 1e-4]), right=(1, [1e-4] * 9)) == {"wrong": 4, "right": 1}


def test_searches_that_have_no_more_end_before_the_time(world: World) -> None:
    assert world.dealt(1000, short=(1, [1e-4] * 2), long=(1, [1e-4] * 5)) == {"short": 2, "long": 5}
    assert world.secs == 7


def test_an_interrupted_build_begins_nothing(world: World) -> None:
    world.is_interrupted = True
    assert world.dealt(10, first=(1, [1e-4] * 9)) == {}
    assert not world.ran
