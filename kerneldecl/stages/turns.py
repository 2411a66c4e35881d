"""Owns the turns in which entries are measured here: one after the other, with what is built ahead for the next.

Knows nothing of entries that cannot be measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kerneldecl.limits import SHARED_SECONDS
from kerneldecl.model import SPECIALIZE
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.stages.conclude import conclude
from kerneldecl.stages.deal import deal
from kerneldecl.stages.exchange import in_own_order, is_left_to_another, not_tuned_by_others, was_tuned_elsewhere
from kerneldecl.stages.keyed import follows, shared_by, with_shared_winner
from kerneldecl.stages.session import Session
from kerneldecl.stages.tasks import reporter, task_of, with_known
from kerneldecl.store.local import Record
from kerneldecl.store.lock import exclusive
from kerneldecl.tuning.events import Note
from kerneldecl.tuning.loop import Outcome
from kerneldecl.tuning.search import request_first, tune
from kerneldecl.tuning.task import Answers, Task

Prefetched = Callable[[], Answers | None]
"""Returns the answers, which may be to come, to what was requested for an entry before its turn."""
PREFETCHED_ENTRIES = 3


class Turn(NamedTuple):
    """An entry whose turn has come to be tuned, and what happens beside it."""

    entry: EntryPlan
    task: Task
    prefetched: Prefetched | None
    next_task: Task | None


def tune_in_turns(session: Session, waiting: Sequence[EntryPlan], folder: Path) -> None:
    """Tune the entries that no other build has tuned meanwhile.

    The lock is held until all are tuned: who has begun to measure keeps the GPU, and must not wait for one that waits for it.
    """
    store = session.workspace.store

    def say(text: str) -> None:
        session.report(Note(text))

    def is_tuned(entry: EntryPlan) -> bool:
        if session.is_wanted_again(entry.entry, entry.action("tune").key):
            return False
        return isinstance(store.read("tune", entry.action("tune").key, is_local=entry.arch.is_detected), Record)

    with exclusive(session.workspace.cache / "tune.lock", "tuning in this workspace", say, wait=session.options.wait):
        here = in_own_order(session, [entry for entry in waiting if not is_tuned(entry)])
        if seconds := _shared_seconds(here):
            _deal(session, [entry for entry in here if not was_tuned_elsewhere(session, entry)], seconds, folder)
            return
        for entry in not_tuned_by_others(session, _tune_here(session, here, folder)):
            for turn in _turns(session, [entry], folder):
                _tune_entry(session, turn)


def _shared_seconds(waiting: Sequence[EntryPlan]) -> float:
    """Return how many seconds the searches of all entries may take together; 0 where each has its own."""
    return max((dict(entry.workload.budget).get(SHARED_SECONDS, 0.0) for entry in waiting), default=0.0)


def _deal(session: Session, waiting: Sequence[EntryPlan], seconds: float, folder: Path) -> None:
    """Tune entries batch by batch, each where it is worth most."""
    first = [entry for entry in waiting if not follows(session, entry)]
    tasks = [with_known(session, entry, task_of(session, entry, folder / str(index))) for index, entry in enumerate(first)]
    for entry, task, outcome in deal(session, list(zip(first, tasks, strict=True)), seconds):
        _conclude(session, entry, task, outcome)
    following = folder / "following"
    following.mkdir()
    for turn in _turns(session, [entry for entry in waiting if entry not in first], following):
        _tune_entry(session, turn)


def _tune_here(session: Session, waiting: Sequence[EntryPlan], folder: Path) -> list[EntryPlan]:
    """Tune what no other machine has tuned meanwhile; return what others say they are tuning."""
    left: list[EntryPlan] = []
    for turn in _turns(session, waiting, folder):
        if was_tuned_elsewhere(session, turn.entry):
            continue
        if is_left_to_another(session, turn.entry):
            left.append(turn.entry)
        else:
            _tune_entry(session, turn)
    return left


def _turns(session: Session, waiting: Sequence[EntryPlan], folder: Path) -> Iterator[Turn]:
    """Yield one entry after the other: what is timed must have its device for itself.

    While a GPU measures the candidates of one entry, the first ones of the next are built: of more than one, for the last candidates
    of an entry leave cores idle. On a CPU that would disturb.
    """
    tasks = [
        replace(with_known(session, entry, task_of(session, entry, folder / str(index))), priority=index)
        for index, entry in enumerate(waiting)
    ]
    # One thread proposes, in the order of the entries: workers that are idle take what is requested first.
    proposing = ThreadPoolExecutor(1, "propose")
    prefetched: list[Prefetched | None] = []
    try:
        for index, (entry, task) in enumerate(zip(waiting, tasks, strict=True)):
            if session.is_over or session.is_interrupted:
                break
            for at in range(len(prefetched), min(index + 1 + PREFETCHED_ENTRIES, len(tasks))):
                may_build = all(each.arch.gpu for each in tasks[index : at + 1]) and shared_by(waiting[at].workload) is None
                prefetched.append(proposing.submit(request_first, tasks[at], session.runner).result if may_build else None)
            yield Turn(entry, task, prefetched[index], next(iter(tasks[index + 1 : index + 2]), None))
    finally:
        # An interrupted build stops the workers, and with them what is still being built.
        proposing.shutdown(wait=False, cancel_futures=True)


def _tune_entry(session: Session, turn: Turn) -> None:
    on_progress, store = reporter(session, turn.entry), session.workspace.store
    if shared := with_shared_winner(session, turn.entry, turn.task):
        outcome = tune(shared.task, session.runner, store, on_progress)
        if outcome.is_cut or any(trial.samples for trial in outcome.trials if trial.candidate == shared.candidate):
            _conclude(session, turn.entry, shared.task, outcome)
            return  # else it is wrong for this entry, which takes part in the contest itself
    outcome = tune(turn.task, session.runner, store, on_progress, turn.prefetched, turn.next_task)
    _conclude(session, turn.entry, turn.task, outcome)


def _conclude(session: Session, entry: EntryPlan, task: Task, outcome: Outcome) -> None:
    for failed in (t for t in outcome.trials if t.candidate.template == SPECIALIZE and t.failure):
        session.report(Note(f"{entry.entry}: {failed.candidate} of {entry.workload.specialize}: {failed.failure}"))
    conclude(session, entry, task, outcome)
    if session.workspace.shared:
        session.workspace.shared.share()
