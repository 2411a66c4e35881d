"""Owns the tests of the order of requests, the choice of workers, and the requests that wait when a runner ends.

Knows nothing of processes: workers are fakes.
"""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from kerneldecl.limits import Limits
from kerneldecl.runners import local
from kerneldecl.runners.events import Printed, Ran
from kerneldecl.runners.local import LocalRunner, in_order
from kerneldecl.runners.process import Answer


class HeldWorker:
    """A fake worker: it blocks until `go` is set, and answers with the number of its earlier answers."""

    pid = 7

    def __init__(self, environment: Mapping[str, str], *modules: str, **limits: int) -> None:
        self.environment, self.modules, self.limits = environment, modules, limits
        self.is_started = threading.Event()
        self.go = threading.Event()
        self._is_stopped = False
        self._answered = 0
        self.is_asked = False

    def start(self) -> None:
        self.is_started.set()

    def call(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        self.is_asked = True
        is_set = self.go.wait(limit_secs)
        self.is_asked = False
        assert is_set
        if self._is_stopped:
            return {"failure": "interrupted"}
        if request["name"] == "bad":
            raise OSError("no process can be started")
        self._answered += 1
        return {"place": self._answered - 1}

    def stop(self) -> None:
        self._is_stopped = True
        self.go.set()


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> LocalRunner:
    """Return a runner of one held worker."""
    monkeypatch.setattr(local, "Worker", HeldWorker)
    return LocalRunner(1, 1)


def go(runner: LocalRunner) -> None:
    for worker in runner._builders:
        worker.go.set()  # type: ignore[attr-defined]  # it is a HeldWorker


def named(*names: str) -> list[dict[str, str]]:
    return [{"name": name} for name in names]


def places(answers: Iterator[tuple[int, Answer]], count: int) -> list[int]:
    return [answer["place"] for answer in in_order(answers, count)]


def test_waiting_requests_are_answered_by_priority(runner: LocalRunner) -> None:
    with runner:
        first = runner.run_all(named("has begun"), 60)
        later = runner.run_all(named("c", "d"), 60, priority=2)
        sooner = runner.run_all(named("a", "b"), 60, priority=1)
        now = runner.run_all(named("describe"), 60)
        go(runner)
        assert (places(first, 1), places(now, 1), places(sooner, 2), places(later, 2)) == ([0], [1], [2, 3], [4, 5])


def test_what_waits_when_a_runner_ends_is_interrupted(runner: LocalRunner) -> None:
    with runner:
        answers = runner.run_all(named("a", "b", "c"), 60)
    assert in_order(answers, 3) == [{"failure": "interrupted"}] * 3


def test_what_a_worker_raises_is_raised_where_answers_are_awaited(runner: LocalRunner) -> None:
    with runner:
        answers = runner.run_all(named("bad"), 60)
        go(runner)
        with pytest.raises(OSError, match="no process can be started"):
            next(answers)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Have interrupts raise KeyboardInterrupt, which they do not if a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_that_does_not_wake_the_waiting_thread_is_noticed(runner: LocalRunner) -> None:
    with runner:
        (worker,) = runner._builders
        answers = runner.run_all(named("a"), 5)
        threading.Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            next(answers)
        assert worker.is_asked  # type: ignore[attr-defined]
        assert not worker.go.is_set()  # type: ignore[attr-defined]


def test_requests_go_to_workers_that_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "Worker", HeldWorker)
    with LocalRunner(4, 1) as runner:
        workers: list[HeldWorker] = runner._builders  # type: ignore[assignment]
        runner.start(2)
        assert all(worker.is_started.wait(60) for worker in workers[:2])
        assert not any(worker.is_started.is_set() for worker in workers[2:])
        go(runner)
        for _ in range(3):
            in_order(runner.run_all(named("a"), 60), 1)
            in_order(runner.run_all(named("a", "b"), 60), 2)
        assert sum(worker._answered for worker in workers[:2]) == 9


def test_no_more_workers_start_than_there_are(runner: LocalRunner) -> None:
    with runner:
        runner.start(3)
        (worker,) = runner._builders
        assert worker.is_started.wait(60)  # type: ignore[attr-defined]


class TransientWorker(HeldWorker):
    """A fake worker that notes what it is asked, and whose first answers may be the machine's fault."""

    faults = 1

    def __init__(self, environment: Mapping[str, str], *modules: str, **limits: int) -> None:
        super().__init__(environment, *modules, **limits)
        self.asked: list[tuple[str, float]] = []
        self.left = self.faults

    def call(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        self.asked.append((request["action"], limit_secs))
        if self.left:
            self.left -= 1
            return {"failure": "its process was killed by SIGKILL", "is_transient": True}
        return {"error": 0.0}


@pytest.mark.parametrize(("faults", "failure"), [(1, ""), (2, "its process was killed by SIGKILL")])
def test_what_the_machine_may_have_broken_is_tried_once_more(monkeypatch: pytest.MonkeyPatch, faults: int, failure: str) -> None:
    monkeypatch.setattr(local, "Worker", TransientWorker)
    monkeypatch.setattr(TransientWorker, "faults", faults)
    on = {"device": "cpu", "model": "", "spec": {"rule": "matmul"}}
    with LocalRunner(1, 1, limits=Limits(prepare_secs=3, verify_secs=2)) as runner:
        answer = runner.measure({"action": "prepare", **on}, 60)
        runner.measure({"action": "verify", **on}, 60)
        asked = runner._measurers["cpu", ""].worker.asked  # type: ignore[attr-defined]  # it is a TransientWorker
    assert answer.get("failure", "") == failure
    assert asked == [("prepare", 3), ("prepare", 3), ("verify", 2)]


def test_what_needs_a_prepared_process_is_for_the_search_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "Worker", TransientWorker)
    with LocalRunner(1, 1) as runner:
        assert "failure" in runner.measure({"action": "verify", "device": "cpu", "model": "", "spec": {}}, 60)


class AnsweringWorker(HeldWorker):
    """A fake worker that answers at once: with the limit that it was given, and with what it printed if it is to print."""

    def call(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        printed = {"printed": request["prints"]} if "prints" in request else {}
        return {"limit_secs": limit_secs, **printed}


LIMITS = {
    "build_secs": ("lower", "build", "describe", "specialize"),
    "propose_secs": ("propose",),
    "search_secs": ("propose_next", "ask"),
    "prepare_secs": ("prepare", "prepare_next"),
    "verify_secs": ("verify",),
    "sample_secs": ("sample",),
    "": ("run a model",),
}


@pytest.mark.parametrize(("field", "action"), [(field, action) for field, actions in LIMITS.items() for action in actions])
def test_a_declared_limit_replaces_the_callers_where_it_bounds_the_action(monkeypatch: pytest.MonkeyPatch, field: str, action: str) -> None:
    monkeypatch.setattr(local, "Worker", AnsweringWorker)
    declared = Limits(**dict(zip(filter(None, LIMITS), range(1, 7), strict=True)))
    for limits in (declared, None):
        with LocalRunner(1, 1, limits=limits) as runner:
            (answer,) = in_order(runner.run_all([{"action": action}], 60), 1)
            assert answer["limit_secs"] == (getattr(limits, field) if limits and field else 60)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(memory_gib=2.5, output_mib=3), {"memory_bytes": 5 << 29, "output_bytes": 3 << 20}),
        (None, {"memory_bytes": psutil.virtual_memory().total * 3 // 4, "output_bytes": 256 << 20}),
    ],
)
def test_workers_have_the_declared_memory_or_most_of_the_machines(
    monkeypatch: pytest.MonkeyPatch, limits: Limits | None, expected: Mapping[str, int]
) -> None:
    monkeypatch.setattr(local, "Worker", AnsweringWorker)
    with LocalRunner(2, 1, limits=limits) as runner:
        workers: list[HeldWorker] = [*runner._builders, *(each.worker for each in runner._measurers.values())]  # type: ignore[list-item]
        assert all(worker.limits == pytest.approx(expected, rel=1e-3) for worker in workers)


def test_kernels_have_every_core_and_compilers_and_policies_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "Worker", AnsweringWorker)
    with LocalRunner(1, 6) as runner:
        for device in ("cpu", "policy"):
            runner.measure({"action": "propose", "device": device, "model": "of no matter here"}, 60)
        workers: list[HeldWorker] = [*runner._builders, runner._measurers["policy", ""].worker, runner._measurers["cpu", ""].worker]  # type: ignore[list-item]
        assert [worker.environment["TVM_NUM_THREADS"] for worker in workers] == ["1", "1", "6"]
        assert {Path(worker.environment["TMPDIR"]).is_dir() for worker in workers} == {True}
        assert {device for device, _ in runner._measurers} == {"cpu", "policy", "rpc"}, "one of each, whatever the model of a CPU"
    assert {Path(worker.environment["TMPDIR"]).exists() for worker in workers} == {False}


def test_what_a_request_prints_is_heard_with_what_it_was_and_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "Worker", AnsweringWorker)
    heard: list[Printed | Ran] = []
    candidate = {"candidate": {"template": "tiled", "params": {}}}
    requests = [
        {"action": "lower", "rule": "matmul", "prints": "a"},
        {"action": "build", "spec": {"rule": "gemv"}, **candidate, "prints": "b"},
        {"action": "describe", "rule": "silent"},
    ]
    with LocalRunner(1, 1, heard=heard.append) as runner:
        answers = in_order(runner.run_all(requests, 60), 3)
    assert [event for event in heard if isinstance(event, Printed)] == [Printed("lower matmul", "a"), Printed("build gemv tiled", "b")]
    ran = [event for event in heard if isinstance(event, Ran)]
    assert [(event.request, event.process) for event in ran] == [
        (what, "compile 7") for what in ("lower matmul", "build gemv tiled", "describe silent")
    ]
    assert all(event.began > 1e9 and event.secs >= 0 and not event.failure for event in ran)
    assert all("printed" not in answer for answer in answers)
