"""Owns the stage that tunes: entries get their winners, measured here, bundled to be measured elsewhere, or ranked unmeasured.

Knows nothing of how candidates are built or measured, of artifacts or of the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.model import SPECIALIZE, Candidate, Trial
from kerneldecl.planning.plan import MEASURING, VERIFYING, EntryPlan, Searched, reference, searched, tolerance
from kerneldecl.runners.local import in_order
from kerneldecl.serial import trial_to_json
from kerneldecl.stages.session import Session
from kerneldecl.store.keys import build_manifest, symbol
from kerneldecl.store.local import Record
from kerneldecl.store.lock import exclusive
from kerneldecl.store.results import TuneResult
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.tuning import bundle
from kerneldecl.tuning.earlier import Earlier, Known, is_open
from kerneldecl.tuning.events import Finished, Note, Step
from kerneldecl.tuning.measure import measured_on
from kerneldecl.tuning.records import Device, measured_here, write_result
from kerneldecl.tuning.search import (
    BUILT_AT_ONCE,
    BUILT_FIELDS,
    EARLIER,
    Outcome,
    rank,
    recalled,
    request_first,
    tune,
    why_no_winner,
    winner_object,
)
from kerneldecl.tuning.task import BUILD_SECS, Answers, OnProgress, Task

Prefetched = Callable[[], Answers | None]
"""Returns the answers, which may be to come, to what was requested for an entry before its turn."""
PREFETCHED_ENTRIES = 3
OF_THE_DEVICE = ("provenance", "conditions", "measured_peaks")
"""Fields of a tune record that tell of the device that has measured."""
RECALLED = {"provenance": {"samples": "of records in cache/record/measure"}}
"""Recorded in place of a device that is not here: others have measured on it, the candidates then were those that there are now."""


class Turn(NamedTuple):
    """An entry whose turn has come to be tuned, and what happens beside it."""

    entry: EntryPlan
    task: Task
    prefetched: Prefetched | None
    next_task: Task | None


def built_at_once(session: Session) -> int:
    """Return how many candidates will be built side by side, as far as the plan knows; 0 where nothing is to be tuned.

    Entries that are not lowered yet count, though their computations may turn out to be tuned.
    """
    waiting = list({e.action("tune").key or e.entry: e for e in session.entries if not e.action("tune").is_hit}.values())
    measures, reasons = session.options.measure, _why_not_measured(waiting)
    alone = [min(e.workload.top_k, BUILT_AT_ONCE) if measures and reasons[e.arch.name] else e.workload.top_k for e in waiting]
    prefetched = [e.workload.top_k for e in waiting if measures and e.arch.gpu and not reasons[e.arch.name]]
    return max(sum(prefetched[: 1 + PREFETCHED_ENTRIES]), *alone, 0)


def tune_entries(session: Session) -> None:
    """Give every entry without a tuning record its winner: measured, or ranked where it cannot be measured here."""
    waiting = session.pending("tune")
    _count_custom_kernels(session, waiting)
    waiting = [entry for entry in waiting if entry.entry not in session.failures]
    reasons = _why_not_measured(waiting)
    to_bundle = [e for e in waiting if e.arch.gpu and not session.options.measure]
    to_tune = [e for e in waiting if e not in to_bundle and not reasons[e.arch.name]]
    with scratch_folder() as folder:
        if to_tune and not session.is_over:
            _tune_in_turns(session, to_tune, folder)
        if to_bundle and not session.is_over:
            _bundle_entries(session, to_bundle, folder)
        for entry in waiting:
            if entry not in to_tune and entry not in to_bundle and not session.is_over:
                _rank_entry(session, entry, folder, reasons[entry.arch.name])
    session.shows_ranked = not session.options.require_measured
    session.replan()


def _why_not_measured(waiting: Sequence[EntryPlan]) -> dict[str, str]:
    """Return why this machine cannot measure for an arch, by the arch's name; empty where it can."""
    return {name: why_not_measured_here(arch) for name, arch in {entry.arch.name: entry.arch for entry in waiting}.items()}


def _count_custom_kernels(session: Session, waiting: Sequence[EntryPlan]) -> None:
    """Find out how many custom kernels the files give that entries name; fail the entries whose file is wrong."""
    entries = [entry for entry in waiting if entry.workload.specialize]
    requests = [task_of(session, entry, Path()).specialize_request() for entry in entries]
    for index, answer in session.runner.run_all(requests, BUILD_SECS):
        entry = entries[index]
        if "failure" in answer:
            session.fail(entry.action("tune"), answer["failure"])
            continue
        session.variants[entry.entry] = answer["variants"]
        if not answer["variants"]:
            session.report(Note(f"{entry.entry}: {entry.workload.specialize} gives no kernel for it"))


def _tune_in_turns(session: Session, waiting: Sequence[EntryPlan], folder: Path) -> None:
    """Tune the entries that no other build has tuned meanwhile.

    The lock is held until all are tuned: who has begun to measure keeps the GPU, and must not wait for one that waits for it.
    """
    store = session.workspace.store

    def say(text: str) -> None:
        session.report(Note(text))

    def is_tuned(entry: EntryPlan) -> bool:
        return isinstance(store.read("tune", entry.action("tune").key, is_local=entry.arch.is_detected), Record)

    with exclusive(session.workspace.cache / "tune.lock", "tuning in this workspace", say, wait=session.options.wait):
        for turn in _turns(session, [entry for entry in waiting if not is_tuned(entry)], folder):
            _tune_entry(session, turn)


def _turns(session: Session, waiting: Sequence[EntryPlan], folder: Path) -> Iterator[Turn]:
    """Yield one entry after the other: what is timed must have its device for itself.

    While a GPU measures the candidates of one entry, the first ones of the next are built: of more than one, for the last candidates
    of an entry leave cores idle. On a CPU that would disturb.
    """
    tasks = [
        replace(_with_known(session, entry, task_of(session, entry, folder / str(index))), priority=index)
        for index, entry in enumerate(waiting)
    ]
    # One thread proposes, in the order of the entries: workers that are idle take what is requested first.
    proposing = ThreadPoolExecutor(1, "propose")
    prefetched: list[Prefetched | None] = []
    try:
        for index, (entry, task) in enumerate(zip(waiting, tasks, strict=True)):
            if session.is_over:
                break
            for at in range(len(prefetched), min(index + 1 + PREFETCHED_ENTRIES, len(tasks))):
                may_build = all(each.arch.gpu for each in tasks[index : at + 1])
                prefetched.append(proposing.submit(request_first, tasks[at], session.runner).result if may_build else None)
            yield Turn(entry, task, prefetched[index], next(iter(tasks[index + 1 : index + 2]), None))
    finally:
        # An interrupted build stops the workers, and with them what is still being built.
        proposing.shutdown(wait=False, cancel_futures=True)


def _reporter(session: Session, entry: EntryPlan) -> OnProgress:
    def on_progress(doing: str, done: int, total: int, best_secs: float | None) -> None:
        session.report(Step(entry.entry, doing, done, total, best_secs))

    return on_progress


def _tune_entry(session: Session, turn: Turn) -> None:
    entry, task, on_progress = turn.entry, turn.task, _reporter(session, turn.entry)
    outcome = tune(task, session.runner, session.workspace.store, on_progress, turn.prefetched, turn.next_task)
    for failed in (t for t in outcome.trials if t.candidate.template == SPECIALIZE and t.failure):
        session.report(Note(f"{entry.entry}: {failed.candidate} of {entry.workload.specialize}: {failed.failure}"))
    _conclude(session, entry, task, outcome)


def _conclude(session: Session, entry: EntryPlan, task: Task, outcome: Outcome) -> bool:
    """Keep the winner's blobs and the record of how it was found; fail the entry where there is no winner. Say whether there is."""
    action, winner = entry.action("tune"), outcome.trials[0] if outcome.policy else None
    if winner is None:
        session.fail(action, why_no_winner(outcome.trials), outcome.trials)
        return False
    before = _known(session, entry)
    blobs = _blobs(session, task, winner, before)
    if isinstance(blobs, str):
        session.fail(action, blobs)
        return False
    source = before.source(winner)
    if outcome.policy == EARLIER and source:
        outcome = outcome._replace(policy=source.policy)
    session.workspace.check_current()
    device = _device(session, task, winner, source)
    write_result(session.workspace.store, action.manifest, task, outcome, blobs, device)
    figure = f"{winner.run_secs * 1e6:.4g} us" if winner.samples else f"{winner.predicted_secs * 1e6:.4g} us expected, not measured"
    session.report(Finished(entry.entry, "tune" if winner.samples else "rank", f"{winner.candidate} {figure}"))
    return True


def _blobs(session: Session, task: Task, winner: Trial, before: Known) -> dict[str, str] | str:
    """Return the digests of the winner's blobs, as an earlier record has them or else made now; or why they cannot be made."""
    if won := before.winner(winner):
        return won.blobs
    rebuilt = session.workspace.store.write_blob(winner_object(task, winner, session.runner))
    described = describe(session, task, winner.candidate)
    return described if isinstance(described, str) else {"object": rebuilt, **described}


def _device(session: Session, task: Task, winner: Trial, source: TuneResult | None) -> Device:
    """Return what is known of the device that has measured the winner; nothing where none has."""
    is_here = bool(winner.samples) and session.options.measure and not why_not_measured_here(task.arch)
    if source and winner.samples:
        return Device({name: source.json[name] for name in OF_THE_DEVICE if name in source.json}, is_here)
    if is_here:
        return measured_here(measured_on(task, session.runner))
    return Device(RECALLED if winner.samples else {}, is_here=False)


def _known(session: Session, entry: EntryPlan) -> Known:
    """Return what records of other lists of candidates know of an entry's computation."""
    is_local = entry.arch.is_detected
    if is_local not in session.earlier:
        session.earlier[is_local] = Earlier(session.workspace.store.all("tune", is_local=is_local))
    return session.earlier[is_local].of(entry.action("tune").manifest)


def _rank_entry(session: Session, entry: EntryPlan, folder: Path, reason: str) -> None:
    """Choose a winner for a GPU that is not here, by what was measured before or else unmeasured; nothing else may be linked so."""
    action = entry.action("tune")
    if not entry.arch.gpu:
        session.fail(action, reason)
        return
    task, on_progress = _with_known(session, entry, task_of(session, entry, folder / action.key)), _reporter(session, entry)
    may_know_code = _known(session, entry).is_of_other_code
    outcome = recalled(task, session.runner, session.workspace.store, on_progress, may_know_code=may_know_code)
    if session.options.require_measured and any(map(is_open, outcome.trials)):
        session.fail(action, f"{reason}; measure it there: `kerneldecl build`, or --no-measure here and `kerneldecl measure` there")
        return
    _conclude(session, entry, task, outcome if outcome.policy else rank(task, session.runner, on_progress))


def _bundle_entries(session: Session, waiting: Sequence[EntryPlan], folder: Path) -> None:
    """Build all candidates, write a bundle for each target, and rank the entries from what was built."""
    workspace, declaration = session.workspace, session.workspace.declaration
    by_target: dict[str, list[bundle.Entry]] = {}
    for entry in waiting:
        if session.is_over:
            return
        task = task_of(session, entry, folder / entry.action("tune").key)
        bundled, outcome = bundle.build_entry(task, _searched(session, entry), session.runner, _reporter(session, entry))
        if outcome.policy:
            by_target.setdefault(entry.workload.target, []).append(bundled)
        _conclude(session, entry, task, outcome)
    for target, entries in by_target.items():
        path = bundle.bundle_folder(workspace.root, declaration.artifact, declaration.version, target)
        bundle.write_bundle(path, workspace.case_files, entries)
        session.bundles[target] = path


def _searched(session: Session, entry: EntryPlan) -> Searched:
    assert entry.lowered is not None, "what is bundled is lowered"
    return searched(entry.workload, entry.groups, session.workspace.inputs)


def task_of(session: Session, entry: EntryPlan, folder: Path) -> Task:
    """Return an entry's task; its folder is there."""
    assert entry.lowered is not None, "what is tuned or built is lowered"
    folder.mkdir(exist_ok=True)
    return Task(
        root=session.workspace.sources,
        cache=session.workspace.cache,
        workload=entry.workload,
        arch=entry.arch,
        groups=entry.groups,
        lowered=entry.lowered,
        tolerance=tolerance(entry.workload, entry.lowered),
        protocol=MEASURING[entry.arch.kind],
        seed=int(VERIFYING["seed"]),
        reference_digest=reference(entry.workload, session.workspace.inputs),
        toolchain=session.workspace.inputs.toolchain,
        folder=folder,
        variants=session.variants.get(entry.entry, 0),
    )


def _with_known(session: Session, entry: EntryPlan, task: Task) -> Task:
    """Return a task with what earlier searches know of its candidates; what their schedules compile to is not compiled again."""
    before, store = _known(session, entry), session.workspace.store
    wanted = {proposal.candidate for group in entry.groups for proposal in group.proposals}
    if wanted - before.trials(task.tolerance).keys():
        for trial in before.built:
            manifest = build_manifest(trial.schedule_digest, symbol(task.lowered.computation), task.arch, task.toolchain)
            fields = trial_to_json(trial)
            store.write("build", manifest, {name: fields[name] for name in BUILT_FIELDS if name in fields}, is_local=True)
    return replace(task, known=before.trials(task.tolerance))


def describe(session: Session, task: Task, candidate: Candidate) -> dict[str, str] | str:
    """Return the digests of the candidate's database lines and source, now in the store, or a failure."""
    (answer,) = in_order(session.runner.run_all([task.describe_request(candidate)], BUILD_SECS, task.priority), 1)
    if "failure" in answer:
        return f"the winner cannot be described: {answer['failure']}"
    store = session.workspace.store
    return {"database": store.write_blob(answer["database"].encode()), "source": store.write_blob(answer["source"].encode())}
