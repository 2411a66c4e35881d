"""Owns the tests of entries that are measured at the same time, on several GPUs of one model.

Knows nothing of kernels: workers answer in process. Locks, threads and records are real.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fake_gpus import FakeWorker, fake_gpu
from support.fakes import Answer, FakeLinker, FakeRunner
from support.spaces import Space

from kerneldecl import api, flow
from kerneldecl.cli.report import show_json
from kerneldecl.errors import LostGpuError, StaleError, ToolchainError
from kerneldecl.hardware import gpu_lock
from kerneldecl.runners import local
from kerneldecl.stages.session import Options, Session
from kerneldecl.store.results import TuneResult
from kerneldecl.tuning.events import Event, Note
from kerneldecl.tuning.side_by_side import Line, measure_side_by_side

FIRST, SECOND = fake_gpu(1), fake_gpu(2)
WAIT_SECS = 20.0
LOST = "CudaError: no CUDA-capable device is detected (CUDA_ERROR_NO_DEVICE)"


class Machine:
    """GPUs whose processes note what they are asked; from its so-and-so-manieth request on, one may be lost."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []
        """UUID, action and computation."""
        self.meeting: threading.Barrier | None = None
        """Where processes wait for each other with their first data."""
        self.lost_at: dict[str, int] = {}
        self.peaks: dict[str, Answer] = {}
        self.interrupted_at = ""
        """The action at which the user interrupts; nothing is answered then until it may go on."""
        self.go_on = threading.Event()
        self._interrupting = threading.Lock()

    def computations(self, uuid: str, action: str) -> set[str]:
        return {computation for asked, did, computation in self.asked if (asked, did) == (uuid, action)}

    def worker(self, environment: Mapping[str, str], *modules: str, **limits: Any) -> FakeWorker:
        made = FakeWorker(environment, *modules, **limits)
        if made.uuid:
            made.call = functools.partial(self._answer, made.uuid, made.call, [])  # type: ignore[method-assign]
        return made

    def _answer(self, uuid: str, answered: Any, before: list[str], request: Mapping[str, Any], limit_secs: float) -> Answer:
        self.asked.append((uuid, request["action"], request.get("spec", {}).get("computation", "")))
        before.append(request["action"])
        if request["action"] == self.interrupted_at and not self.go_on.is_set():
            if self._interrupting.acquire(blocking=False):
                _thread.interrupt_main()  # once: a second one would end the test itself
            assert self.go_on.wait(WAIT_SECS)
        if len(before) > self.lost_at.get(uuid, sys.maxsize):
            return {"failure": LOST}
        if request["action"] == "prepare" and self.meeting and before.count("prepare") == 1:
            self.meeting.wait(WAIT_SECS)
        found: Answer = answered(request, limit_secs)
        return found | (self.peaks.get(uuid, {}) if request["action"] == "measured_peaks" else {})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Provide a machine with two GPUs of one model."""
    found = Machine()
    monkeypatch.setattr(gpu_lock, "_here", lambda: (FIRST, SECOND))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(local, "Worker", found.worker)
    return found


def build(space: Space, said: list[Event] | None = None) -> Session:
    report = [].append if said is None else said.append
    runners = functools.partial(local.LocalRunner, 2, 1, lambda text: report(Note(text)))
    return flow.build(space.open(), Options(require_measured=True), runners, {"cuda": FakeLinker()}, report)


def records(space: Space) -> dict[str, bytes]:
    return {str(path.relative_to(space.root)): path.read_bytes() for path in (space.root / "cache/record").rglob("*.json")}


def test_two_gpus_measure_at_the_same_time_and_the_records_are_those_of_one(
    gpus: Space, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = gpus.copy_of(tmp_path / "alone")
    machine.meeting = threading.Barrier(2)  # breaks, and the entry fails, unless both GPUs get data before either goes on
    done = build(gpus)
    assert not done.failures
    first, second = (machine.computations(gpu.uuid, "verify") for gpu in (FIRST, SECOND))
    assert first
    assert second
    assert not first & second, "an entry is measured on one GPU"
    assert len(first | second) == 3
    machine.meeting = None
    monkeypatch.setattr(gpu_lock, "_here", lambda: (FIRST,))
    by_one = build(alone)
    assert not by_one.failures
    assert records(alone) == records(gpus)
    assert done.started_runner
    assert by_one.started_runner
    assert done.started_runner.counts == by_one.started_runner.counts


def test_the_record_says_which_gpu_it_was_and_no_key_does(gpus: Space, machine: Machine) -> None:
    machine.meeting = threading.Barrier(2)
    state = {"device": {"gpu": "Test GPU"}, "conditions": {"measured_on": {}}}
    machine.peaks = {gpu.uuid: {**state, "conditions": {"measured_on": {"gpu": gpu.short_uuid}}} for gpu in (FIRST, SECOND)}
    done = build(gpus)
    tuned = [entry.tuned for entry in done.plan.entries if entry.tuned]
    assert {each.measured_on["gpu"] for each in tuned} == {"GPU-00000001", "GPU-00000002"}
    assert show_json(done.plan.entries[0])["measured_on"]["gpu"] in {"GPU-00000001", "GPU-00000002"}
    odd = [{"conditions": 5}, {"conditions": {"measured_on": "x"}}, {"conditions": {"measured_on": {"gpu": 1}}}, {}]
    assert [TuneResult(tuned[0].key, {**tuned[0].json, "conditions": None, **each}).measured_on for each in odd] == [{}] * 4
    assert not any("GPU-0000" in entry.action("tune").manifest for entry in done.plan.entries)


@pytest.mark.parametrize("requests", [0, 1, 4, 9])
def test_what_a_lost_gpu_was_measuring_goes_to_the_other(gpus: Space, machine: Machine, tmp_path: Path, requests: int) -> None:
    alone = gpus.copy_of(tmp_path / "alone")
    assert not build(alone).failures
    machine.asked.clear()
    machine.lost_at = {SECOND.uuid: requests}
    said: list[Event] = []
    done = build(gpus, said)
    assert not done.failures
    assert records(gpus) == records(alone), "nothing that a lost GPU has said is kept"
    notes = [event.text for event in said if isinstance(event, Note) and "no longer answers" in event.text]
    assert notes == [f"Test GPU GPU-00000002 at 0000:02:00.0 no longer answers: {LOST}; the others go on"]


def test_without_any_gpu_left_the_build_ends_and_keeps_what_is_done(gpus: Space, machine: Machine) -> None:
    machine.lost_at = {FIRST.uuid: 1, SECOND.uuid: 1}
    with pytest.raises(ToolchainError, match="no longer answers"):
        build(gpus)
    machine.lost_at = {}
    assert not build(gpus).failures


def test_after_an_interrupt_nothing_is_kept_of_what_was_being_measured(gpus: Space, machine: Machine) -> None:
    machine.interrupted_at = "verify"
    with pytest.raises(KeyboardInterrupt):
        build(gpus)
    machine.go_on.set()  # a real process would have been killed
    for thread in threading.enumerate():
        if thread.name.startswith(("measure", "conclude")):
            thread.join(WAIT_SECS)
    assert not list((gpus.root / "cache/record/tune").glob("*.json"))
    machine.interrupted_at = ""
    assert not build(gpus).failures


def test_a_candidate_that_crashes_is_no_lost_gpu(gpus: Space, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    crashes = {"failure": "CudaError: an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS)"}
    monkeypatch.setattr(FakeRunner, "measure", functools.partialmethod(_crashing, FakeRunner.measure, crashes))
    done = build(gpus)
    assert set(done.failures) == {"small@box", "large@box", "tabled@box"}
    assert all("illegal memory access" in reason for reason in done.failures.values())
    assert {action for _, action, _ in machine.asked} >= {"verify", "is_there"}


def _crashing(self: FakeRunner, measure: Any, answer: Answer, request: Mapping[str, Any], limit_secs: float) -> Answer:
    found: Answer = answer if request["action"] == "verify" else measure(self, request, limit_secs)
    return dict(found)


HOLDER = """
import sys
from pathlib import Path
from kerneldecl.store.lock import exclusive
with exclusive(Path(sys.argv[1]), "measuring on it", print):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield
    process.communicate()


def test_a_gpu_that_another_process_has_is_not_waited_for(gpus: Space, machine: Machine) -> None:
    said: list[Event] = []
    with held(gpu_lock.lock_of(FIRST)):
        assert not build(gpus, said).failures
    assert {uuid for uuid, _, _ in machine.asked} == {SECOND.uuid}
    assert not any(isinstance(event, Note) for event in said)


def test_a_bundle_is_measured_side_by_side(gpus: Space, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lock, "_here", tuple)
    (folder,) = gpus.build(measure=False).build.bundles.values()
    monkeypatch.setattr(gpu_lock, "_here", lambda: (FIRST, SECOND))
    machine.meeting = threading.Barrier(2)
    found = api.measure_bundle(folder, gpus.root / "cache")
    assert (found["measured"], found["failed"]) == (3, [])
    assert set(found["references"]) == {"small@box", "large@box", "tabled@box"}
    assert {uuid for uuid, _, _ in machine.asked} == {FIRST.uuid, SECOND.uuid}


# The order


def test_a_runner_knows_its_next_item_and_one_that_is_idle_takes_it_over() -> None:
    line = Line(deque(range(4)))
    assert line.take(0) == (0, 1)
    assert line.take(1) == (2, 3)
    assert line.take(1) == (3, None)
    assert line.take(1) == (1, None), "the first runner has not begun it"
    assert line.take(0) is None
    line.give_back(1, 1)
    assert line.take(0) == (1, None)


def test_what_is_given_back_comes_first() -> None:
    line = Line(deque(range(5)))
    assert line.take(0) == (0, 1)
    line.give_back(0, 0)
    assert [line.take(1), line.take(1)] == [(0, 1), (1, 2)]


def test_an_error_that_is_no_lost_gpu_ends_all() -> None:
    begun: list[int] = []

    def measure(item: int, _next: int | None, _runner: object) -> None:
        begun.append(item)
        if item == 1:
            raise StaleError("kerneldecl itself was changed")

    with pytest.raises(StaleError):
        measure_side_by_side(range(1000), [FakeRunner(), FakeRunner()], measure, print)
    assert len(begun) < 1000


def test_an_interrupt_waits_for_no_gpu() -> None:
    is_over = threading.Event()

    def measure(item: int, _next: int | None, _runner: object) -> None:
        if item == 0:
            _thread.interrupt_main()
        assert is_over.wait(WAIT_SECS)

    with pytest.raises(KeyboardInterrupt):
        measure_side_by_side(range(4), [FakeRunner(), FakeRunner()], measure, print)
    is_over.set()


def test_a_lost_gpu_whose_fellow_had_nothing_left_gives_its_item_to_it() -> None:
    runners, said, done = [FakeRunner(), FakeRunner()], list[str](), list[int]()
    both, other_is_done = threading.Barrier(2), threading.Event()

    def measure(item: int, _next: int | None, runner: object) -> None:
        if not done:
            both.wait(WAIT_SECS)
        if runner is runners[1] and not said:
            assert other_is_done.wait(WAIT_SECS)
            raise LostGpuError("it no longer answers")
        done.append(item)
        other_is_done.set()

    measure_side_by_side([1, 2], runners, measure, said.append)
    assert sorted(done) == [1, 2]
    assert said == ["it no longer answers; the others go on"]
