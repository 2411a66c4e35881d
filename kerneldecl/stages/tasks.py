"""Owns what a search is given: an entry's task, with what earlier searches know of its candidates.

Knows nothing of when it is searched, or of what is done with the outcome.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kerneldecl.model import Arch
from kerneldecl.planning.plan import VERIFYING, EntryPlan, reference, tolerance
from kerneldecl.serial import trial_to_json
from kerneldecl.stages.exchange import shared_with_workers
from kerneldecl.stages.session import Session
from kerneldecl.stages.suspect import best_of, recorded
from kerneldecl.store.keys import build_manifest, symbol
from kerneldecl.timing import measuring
from kerneldecl.tuning.budget import EndedBy, Ending
from kerneldecl.tuning.earlier import Earlier, Known
from kerneldecl.tuning.events import Step
from kerneldecl.tuning.measure import judges
from kerneldecl.tuning.search import BUILT_FIELDS
from kerneldecl.tuning.task import OnProgress, Task


def task_of(session: Session, entry: EntryPlan, folder: Path) -> Task:
    """Return an entry's task; its folder is there."""
    assert entry.lowered is not None, "what is tuned or built is lowered"
    folder.mkdir(exist_ok=True)
    before = recorded(session, entry)
    return Task(
        root=session.workspace.sources,
        cache=session.workspace.cache,
        shared=shared_with_workers(session.workspace),
        workload=entry.workload,
        arch=entry.arch,
        groups=best_of(before) if before else entry.groups,
        lowered=entry.lowered,
        tolerance=tolerance(entry.workload, entry.lowered),
        protocol=measuring(entry.arch.kind, entry.workload.timing),
        seed=int(VERIFYING["seed"]),
        reference_digest=reference(entry.workload, session.workspace.inputs),
        toolchain=session.workspace.inputs.toolchain,
        folder=folder,
        has_spares=not before,
        tuners=session.workspace.inputs.tuners,
        variants=0 if before else session.variants.get(entry.entry, 0),
        is_again=session.is_wanted_again(entry.entry, entry.action("tune").key),
        ended_by=_ended_by(session),
    )


def _ended_by(session: Session) -> EndedBy | None:
    """Return what ends a search from outside: the user, where an interrupt is to leave what is there."""
    if session.options.is_interrupted is None:
        return None
    return lambda: Ending.INTERRUPTED if session.is_interrupted else None


def with_known(session: Session, entry: EntryPlan, task: Task) -> Task:
    """Return a task with what earlier searches know of its candidates; what their schedules compile to is not compiled again."""
    before, store = known_of(session, entry), session.workspace.store
    wanted = {proposal.candidate for group in entry.groups for proposal in group.proposals}
    if wanted - before.trials(task.tolerance).keys() or any(group.searches for group in entry.groups):
        for trial in before.built:
            manifest = build_manifest(
                trial.schedule_digest, symbol(task.lowered.computation), task.arch, task.toolchain, task.lowered.names
            )
            fields = trial_to_json(trial)
            store.write("build", manifest, {name: fields[name] for name in BUILT_FIELDS if name in fields}, is_local=True)
    return replace(task, known=before.trials(task.tolerance), has_judged=lambda: task.reference_digest in _judges(session, entry))


def _judges(session: Session, entry: EntryPlan) -> frozenset[str]:
    """Return the references that have judged before this build; all records are read once, however many entries ask."""
    is_local = entry.arch.is_detected
    if is_local not in session.judges:
        session.judges[is_local] = judges(session.workspace.store, is_local=is_local)
    return session.judges[is_local]


def known_of(session: Session, entry: EntryPlan) -> Known:
    """Return what records of other lists of candidates know of an entry's computation; nothing where it is to be tuned again."""
    action = entry.action("tune")
    if session.is_wanted_again(entry.entry, action.key):
        return Earlier(()).of(action.manifest)
    return read_earlier(session, entry.arch).of(action.manifest)


def read_earlier(session: Session, arch: Arch) -> Earlier:
    """Return the searches before this build, of detected archs or of declared ones; their records are read once."""
    is_local = arch.is_detected
    if is_local not in session.earlier:
        session.earlier[is_local] = Earlier(session.workspace.store.all("tune", is_local=is_local))
    return session.earlier[is_local]


def reporter(session: Session, entry: EntryPlan) -> OnProgress:
    def on_progress(doing: str, done: int, total: int, best_secs: float | None) -> None:
        session.report(Step(entry.entry, doing, done, total, best_secs))

    return on_progress
