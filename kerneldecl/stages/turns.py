"""Owns the turns in which entries are measured here: one after the other on each device, with what is built ahead for the next.

Knows nothing of entries that cannot be measured here.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from kerneldecl.limits import SHARED_SECONDS
from kerneldecl.model import SPECIALIZE, Arch
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.runners.process import Answers
from kerneldecl.stages.conclude import conclude, device_of
from kerneldecl.stages.deal import deal
from kerneldecl.stages.exchange import in_own_order, is_left_to_another, not_tuned_by_others, was_tuned_elsewhere
from kerneldecl.stages.keyed import follows, shared_by, with_shared_winner
from kerneldecl.stages.session import Session
from kerneldecl.stages.tasks import reporter, task_of, with_known
from kerneldecl.store.local import Record
from kerneldecl.store.lock import exclusive
from kerneldecl.tuning.events import Begun, Note
from kerneldecl.tuning.loop import Outcome
from kerneldecl.tuning.records import Device
from kerneldecl.tuning.search import request_first, tune
from kerneldecl.tuning.side_by_side import Line, by_device, measure_line
from kerneldecl.tuning.task import Runner, Task, batches_of

Prefetched = Callable[[], Answers | None]
"""Returns the answers, which may be to come, to what was requested for an entry before its turn."""
PREFETCHED_ENTRIES = 3
_WAKE_SECS = 0.1


def tune_in_turns(session: Session, waiting: Sequence[EntryPlan], folder: Path) -> None:
    """Tune the entries that no other build has tuned meanwhile.

    The lock is held until all are tuned: who has begun to measure keeps the GPU, and must not wait for one that waits for it.
    """
    with _alone(session):
        here = in_own_order(session, [entry for entry in waiting if not _is_tuned(session, entry)])
        following = [entry for entry in here if follows(session, entry)]
        first = [entry for entry in here if entry not in following]
        if seconds := _shared_seconds(first):
            _deal(session, [entry for entry in first if not was_tuned_elsewhere(session, entry)], seconds, folder)
            first = []
        left = [entry for some in (first, following) for entry in _tune_by_device(session, some, folder)]
        for entry in not_tuned_by_others(session, left):
            _tune_on_device(session, [entry], folder, may_leave=False)


def _is_tuned(session: Session, entry: EntryPlan) -> bool:
    """Say whether somebody has tuned an entry since it was planned."""
    action = entry.action("tune")
    if session.is_wanted_again(entry.entry, action.key):
        return False
    return isinstance(session.workspace.store.read("tune", action.key, is_local=entry.arch.is_detected), Record)


def _shared_seconds(waiting: Sequence[EntryPlan]) -> float:
    """Return how many seconds the searches of all entries may take together; 0 where each has its own."""
    return max((dict(entry.workload.budget).get(SHARED_SECONDS, 0.0) for entry in waiting), default=0.0)


def _deal(session: Session, waiting: Sequence[EntryPlan], seconds: float, folder: Path) -> None:
    """Tune entries batch by batch, each where it is worth most."""
    tasks = [with_known(session, entry, task_of(session, entry, folder / str(place))) for place, entry in enumerate(waiting)]
    with _concluding(session) as concluding:
        for entry, task, outcome in deal(session, list(zip(waiting, tasks, strict=True)), seconds):
            concluding.take(entry, task, outcome, session.runner)


def _tune_by_device(session: Session, waiting: Sequence[EntryPlan], folder: Path) -> list[EntryPlan]:
    """Tune entries on their devices, one model after the other; return what other machines say they are tuning."""
    devices = ([waiting[place] for place in places] for places in by_device([entry.arch for entry in waiting]))
    return [entry for some in devices for entry in _tune_on_device(session, some, folder, may_leave=True)]


def _tune_on_device(session: Session, entries: Sequence[EntryPlan], folder: Path, *, may_leave: bool) -> list[EntryPlan]:
    """Tune entries of one model of GPU, or of the CPU; return what other machines say they are tuning, if that may be left to them."""
    with _turns(session, entries[0].arch, len(entries), folder, may_leave=may_leave) as turns:
        turns.add(entries)
        turns.line.close()
        turns.run()
    return turns.left


def tune_arriving(session: Session, arriving: Iterator[Sequence[EntryPlan]], arch: Arch, most: int, folder: Path) -> None:
    """Tune entries of one device as they come, at most so many: this thread waits for the next ones while others are measured.

    Nobody else tunes in the workspace from the first one on.
    """
    first = next(filter(None, arriving), None)
    if first is None:
        return
    with (
        _alone(session),
        _turns(session, arch, most, folder, may_leave=False, built_early=PREFETCHED_ENTRIES) as turns,
        _in_background(turns) as measuring,
    ):
        for entries in itertools.chain([first], arriving):
            turns.add([entry for entry in entries if not _is_tuned(session, entry)])
            if measuring.done():
                break  # with an error


@contextmanager
def _in_background(turns: _Turns) -> Iterator[Future[None]]:
    """Have the turns begin, and wait until all that was added has had its own; after an error or an interrupt, for nothing more."""
    pool = ThreadPoolExecutor(1, "turns")
    try:
        measuring = pool.submit(turns.run)
        yield measuring
        turns.line.close()
        while not measuring.done():
            wait([measuring], _WAKE_SECS)  # an interrupt just before a thread starts to wait does not wake it
        measuring.result()
    finally:
        turns.line.drop()
        pool.shutdown(wait=False)


def _alone(session: Session) -> AbstractContextManager[None]:
    """Return a context in which nobody else tunes in the workspace."""

    def say(text: str) -> None:
        session.report(Note(text))

    return exclusive(session.workspace.cache / "tune.lock", "tuning in this workspace", say, wait=session.options.wait)


class _Turns:
    """Entries of one device, each of which is tuned when its turn has come.

    What is timed has its device for itself: where there are several GPUs of the model, each measures one entry.
    """

    def __init__(self, session: Session, runners: Sequence[Runner], ahead: _Ahead, concluding: _Concluding, *, may_leave: bool) -> None:
        self._session, self._runners, self._ahead, self._concluding = session, runners, ahead, concluding
        self._may_leave = may_leave
        self.line = Line[int](is_open=True)
        """Places of entries, in their order."""
        self.left: list[EntryPlan] = []
        """What other machines say they are tuning."""

    def add(self, entries: Sequence[EntryPlan]) -> None:
        """Have entries wait for their turns."""
        self.line.add([self._ahead.add(entry) for entry in entries])

    def run(self) -> None:
        """Tune what waits until no more comes."""
        session = self._session
        measure_line(self.line, self._runners, self._measure, lambda text: session.report(Note(text)))

    def _measure(self, place: int, following: int | None, runner: Runner) -> None:
        session, ahead, concluding = self._session, self._ahead, self._concluding
        entry, task = ahead.entries[place], ahead.tasks[place]
        if session.is_over or session.is_interrupted or (self._may_leave and concluding.is_done_elsewhere(entry, self.left)):
            return
        session.report(Begun(entry.entry, task.lowered.computation))
        prefetched, next_task = ahead.of(place), None if following is None else ahead.tasks[following]
        tuned, outcome = _tuned(session, entry, runner, task, (prefetched, next_task))
        concluding.take(entry, tuned, outcome, runner)


@contextmanager
def _turns(session: Session, arch: Arch, most: int, folder: Path, *, may_leave: bool, built_early: int = 0) -> Iterator[_Turns]:
    """Provide the turns of at most so many entries; the first `built_early` are built before any turn has come."""
    has_several = arch.gpu or batches_of(session.runner)
    runners = session.runner.side_by_side(arch.model, most) if has_several else (session.runner,)
    with _ahead(session, folder, len(runners), built_early) as ahead, _concluding(session) as concluding:
        yield _Turns(session, runners, ahead, concluding, may_leave=may_leave)


def _tuned(
    session: Session, entry: EntryPlan, runner: Runner, task: Task, beside: tuple[Prefetched | None, Task | None]
) -> tuple[Task, Outcome]:
    """Return what an entry's search finds, and the task whose search it was: with keyed configurations, that of the key's winner alone.

    `beside` is what was built ahead for the task, and the task that is tuned next.
    """
    on_progress, store = reporter(session, entry), session.workspace.store
    if shared := with_shared_winner(session, entry, task):
        outcome = tune(shared.task, runner, store, on_progress)
        if outcome.is_cut or any(trial.samples for trial in outcome.trials if trial.candidate == shared.candidate):
            return shared.task, outcome
        # It is wrong for this entry, which takes part in the contest itself.
    return task, tune(task, runner, store, on_progress, *beside)


class _Ahead:
    """The tasks of entries, and what is built for them ahead of their turns.

    While a GPU measures the candidates of one entry, the first ones of the next are built: of more than one, for the last candidates
    of an entry leave cores idle. On a CPU that would disturb.
    """

    def __init__(self, session: Session, folder: Path, devices: int, built_early: int) -> None:
        self.entries: list[EntryPlan] = []
        self.tasks: list[Task] = []
        self._session, self._folder, self._runner, self._devices = session, folder, session.runner, devices
        # One thread proposes, in the order of the entries: workers that are idle take what is requested first.
        self.proposing = ThreadPoolExecutor(1, "propose")
        self._requested: dict[int, Future[Answers | None] | None] = {}
        self._requesting = threading.Lock()
        self._until = built_early
        """Place of the first entry that is not to be built yet."""

    def add(self, entry: EntryPlan) -> int:
        """Make an entry's task, and return its place."""
        place = len(self.tasks)
        task = with_known(self._session, entry, task_of(self._session, entry, self._folder / str(place)))
        with self._requesting:
            self.entries.append(entry)
            self.tasks.append(replace(task, priority=place))
            self._request()
        return place

    def of(self, place: int) -> Prefetched | None:
        """Return what was requested for an entry whose turn has come, and have the next ones requested.

        The answers are given once: nothing where the entry has lost its GPU before.
        """
        if not self.tasks[place].arch.gpu:
            return None
        with self._requesting:
            self._until = max(self._until, place + self._devices + PREFETCHED_ENTRIES)
            self._request()
            found, self._requested[place] = self._requested[place], None
        return found.result if found else None

    def _request(self) -> None:
        for at in range(len(self._requested), min(len(self.tasks), self._until)):
            # On a CPU it would disturb, and which configuration an entry of a key tries is known when its turn has come.
            is_late = not self.tasks[at].arch.gpu or shared_by(self.entries[at].workload) is not None
            self._requested[at] = None if is_late else self.proposing.submit(request_first, self.tasks[at], self._runner)


@contextmanager
def _ahead(session: Session, folder: Path, devices: int, built_early: int) -> Iterator[_Ahead]:
    ahead = _Ahead(session, folder, devices, built_early)
    try:
        yield ahead
    finally:
        # An interrupted build stops the workers, and with them what is still being built.
        ahead.proposing.shutdown(wait=False, cancel_futures=True)


class _Concluding:
    """Ends entries one at a time: of a GPU's while it measures the next one; on a CPU nothing else runs meanwhile."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.one_at_a_time = threading.Lock()
        """Held by who ends an entry or exchanges with others. No device waits for it where there is no shared cache."""
        self.threads = ThreadPoolExecutor(1, "conclude")
        self.waiting: list[Future[None]] = []
        self.is_stopped = False

    def take(self, entry: EntryPlan, task: Task, outcome: Outcome, runner: Runner) -> None:
        """Keep what the device reports of the measurement, and have the entry ended; raise the error of an earlier one's end."""
        device = device_of(self._session, entry, task, outcome, runner)
        if batches_of(self._session.runner):
            self._conclude(entry, task, outcome, device)  # of many entries in flight, each has a thread of its own
            return
        if not task.arch.gpu or not self._session.options.keep_going:
            self._end(entry, task, outcome, device)
            return
        self.raise_errors()
        self.waiting.append(self.threads.submit(self._end, entry, task, outcome, device))

    def is_done_elsewhere(self, entry: EntryPlan, left: list[EntryPlan]) -> bool:
        """Say whether another machine has tuned an entry, or says that it does: then it is added to what is `left` to others."""
        if self._session.workspace.shared is None:
            return False
        with self.one_at_a_time:
            if was_tuned_elsewhere(self._session, entry):
                return True
            if is_left_to_another(self._session, entry):
                left.append(entry)
                return True
        return False

    def raise_errors(self) -> None:
        """Raise the error of an entry that could not be ended."""
        for future in self.waiting:
            if future.done():
                future.result()

    def _end(self, entry: EntryPlan, task: Task, outcome: Outcome, device: Device) -> None:
        with self.one_at_a_time:
            self._conclude(entry, task, outcome, device)

    def _conclude(self, entry: EntryPlan, task: Task, outcome: Outcome, device: Device) -> None:
        session = self._session
        if self.is_stopped:
            return  # what was measured last may have been interrupted
        for failed in (t for t in outcome.trials if t.candidate.template == SPECIALIZE and t.failure):
            session.report(Note(f"{entry.entry}: {failed.candidate} of {entry.workload.specialize}: {failed.failure}"))
        conclude(session, entry, task, outcome, device)
        if session.workspace.shared:
            session.workspace.shared.share()


@contextmanager
def _concluding(session: Session) -> Iterator[_Concluding]:
    concluding = _Concluding(session)
    try:
        yield concluding
        for future in concluding.waiting:
            future.result()
    finally:
        concluding.is_stopped = True
        concluding.threads.shutdown(wait=False, cancel_futures=True)
