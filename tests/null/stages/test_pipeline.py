"""Owns the tests of entries that are measured while later ones are still lowered.

Knows nothing of kernels: workers answer in process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.fakes import Answer, FakeRunner
from support.spaces import Space

from kerneldecl import flow
from kerneldecl.errors import ToolchainError
from kerneldecl.stages import pipeline, session
from kerneldecl.stages.pipeline import tune_as_proposed

WAIT_SECS = 20.0


@pytest.fixture
def measurable(gpus: Space, monkeypatch: pytest.MonkeyPatch) -> Space:
    """Provide a workspace whose GPU is here, of whose entries each is lowered by itself."""
    monkeypatch.setattr(session, "why_not_measured_here", lambda _: "")
    monkeypatch.setattr(pipeline, "LOWERED_AT_ONCE", 1)
    return gpus


class Waiting(FakeRunner):
    """Lowers the last of three rules when a kernel has been timed, or has failed in some way."""

    def __init__(self, failing: str = "") -> None:
        super().__init__()
        self.failing = failing
        """The action of a measuring process at which it raises an error."""
        self.lowered = 0
        self.is_timed = threading.Event()

    def run_all(self, requests: Sequence[Mapping[str, Any]], limit_secs: float, priority: int = 0) -> Iterator[tuple[int, Answer]]:
        for position, answer in super().run_all(requests, limit_secs, priority):
            request = requests[position]
            self.lowered += request["action"] == "lower"
            if request["action"] == "lower" and self.lowered == 3:
                assert self.is_timed.wait(WAIT_SECS), "nothing is timed before all is lowered"
            yield position, answer

    def measure(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        if request["action"] == self.failing:
            self.is_timed.set()
            raise ToolchainError("it is gone")
        if request["action"] == "sample":
            self.is_timed.set()
        return super().measure(request, limit_secs)


def kept(space: Space) -> dict[str, bytes]:
    cache = space.root / "cache"
    return {str(path.relative_to(cache)): path.read_bytes() for path in [*cache.glob("record/*/*.json"), *cache.glob("blob/*/*")]}


def test_the_first_entries_are_timed_before_the_last_is_lowered(measurable: Space) -> None:
    runner = Waiting()
    built = measurable.build(runner)
    assert not built.build.failures
    assert runner.lowered == 3
    assert built.links == 1


def test_it_keeps_what_the_stages_keep_one_by_one(measurable: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = measurable.copy_of(tmp_path / "other")
    built = measurable.build()
    with monkeypatch.context() as patched:
        patched.setattr(flow, "STAGES", tuple(stage for stage in flow.STAGES if stage is not tune_as_proposed))
        one_by_one = other.build()
    assert {**built.counts, "prepare_next": 0} == {**one_by_one.counts, "prepare_next": 0}
    assert kept(measurable) == kept(other)
    assert measurable.read("workloads.lock") == other.read("workloads.lock")
    assert not measurable.build().build.ran


def test_one_that_cannot_be_lowered_leaves_the_others_alone(measurable: Space) -> None:
    measurable.edit("workloads.toml", "factor = 3.0", "factor = 0.0")
    built = measurable.build()
    assert list(built.build.failures) == ["large@box"]
    assert sum(entry.tuned is not None for entry in built.build.plan.entries) == 2


def test_the_first_failure_ends_a_build_that_does_not_keep_going(measurable: Space) -> None:
    measurable.edit("workloads.toml", "factor = 3.0", "factor = 0.0")
    built = measurable.build(keep_going=False)
    assert built.build.failures
    assert built.links == 0


def test_one_computation_is_tuned_once(measurable: Space) -> None:
    text = measurable.read("workloads.toml")
    measurable.write({"workloads.toml": text + '\n[[workload]]\nname = "twin"\nrule = "scale"\nn = 8\n'})
    built = measurable.build()
    assert not built.build.failures
    assert built.counts["prepare"] == 3


def test_an_error_of_what_measures_ends_the_build(measurable: Space) -> None:
    with pytest.raises(ToolchainError, match="it is gone"):
        measurable.build(Waiting("sample"))


class Refusing(FakeRunner):
    """Its policies have nothing to say."""

    def measure(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        return {"failure": "policy plain: it fails"} if request["action"] == "propose" else super().measure(request, limit_secs)


def test_an_error_of_policies_fails_their_entries(measurable: Space) -> None:
    built = measurable.build(Refusing())
    assert built.build.failures == dict.fromkeys(("small@box", "large@box", "tabled@box"), "policy plain: it fails")
