"""Owns how entries get their winners: tuned here, bundled to be tuned elsewhere, ranked unmeasured, or made again from records.

Knows nothing of how candidates are built or measured, of artifacts or of the lock.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kerneldecl.hardware import gpu_lock, host
from kerneldecl.model import SPECIALIZE, Arch, Candidate, Trial
from kerneldecl.planning import lockfile
from kerneldecl.planning.plan import MEASURING, EntryPlan, tolerance
from kerneldecl.runners.local import in_order
from kerneldecl.store.keys import key
from kerneldecl.store.local import Record
from kerneldecl.store.lock import exclusive
from kerneldecl.tuning import bundle
from kerneldecl.tuning.events import Finished, Note, Step
from kerneldecl.tuning.measure import measured_on
from kerneldecl.tuning.search import BUILT_AT_ONCE, Outcome, ask_first, rank, recalled, record_result, tune, winner_object
from kerneldecl.tuning.task import BUILD_SECS, Answers, Task
from kerneldecl.tuning.task import Step as Told

if TYPE_CHECKING:
    from kerneldecl.flow import Build

Ahead = Callable[[], Answers | None]
"""Returns the answers, which may be to come, to what was asked for an entry before its turn."""
BUILT_AHEAD = 3
"""Entries."""
RECALLED = {"provenance": {"samples": "of records in cache/record/measure"}}
"""What is told of a device that is not here: others have measured on it, the candidates then were those that there are now."""


class Turn(NamedTuple):
    """An entry whose turn has come to be tuned, and what happens beside it."""

    entry: EntryPlan
    task: Task
    ahead: Ahead | None
    following: Task | None
    """The next one's."""


def built_at_once(at_work: Build) -> int:
    """Return how many candidates will be built side by side, as far as the plan tells; 0 where nothing is to be tuned.

    Entries that are not lowered yet count, though their computations may turn out to be tuned.
    """
    waiting = list({e.action("tune").key or e.entry: e for e in at_work.entries if not e.action("tune").is_hit}.values())
    measures, objections = at_work.options.measure, _objections(waiting)
    alone = [min(e.workload.top_k, BUILT_AT_ONCE) if measures and objections[e.arch.name] else e.workload.top_k for e in waiting]
    ahead = [e.workload.top_k for e in waiting if measures and e.arch.gpu and not objections[e.arch.name]]
    return max(sum(ahead[: 1 + BUILT_AHEAD]), *alone, 0)


def tune_entries(at_work: Build) -> None:
    """Give every entry without a tuning record its winner: measured, or ranked where it cannot be measured here."""
    waiting = at_work.pending("tune")
    _count_own_functions(at_work, waiting)
    waiting = [entry for entry in waiting if entry.entry not in at_work.failures]
    objections = _objections(waiting)
    to_bundle = [e for e in waiting if e.arch.gpu and not at_work.options.measure]
    to_tune = [e for e in waiting if e not in to_bundle and not objections[e.arch.name]]
    with tempfile.TemporaryDirectory(prefix="kerneldecl-", ignore_cleanup_errors=True) as folder:
        if to_tune and not at_work.is_over:
            _tune_in_turns(at_work, to_tune, Path(folder))
        if to_bundle and not at_work.is_over:
            _bundle_entries(at_work, to_bundle, Path(folder))
        for entry in waiting:
            if entry not in to_tune and entry not in to_bundle and not at_work.is_over:
                _rank_entry(at_work, entry, Path(folder), objections[entry.arch.name])
    at_work.shows_ranked = not at_work.options.require_measured
    at_work.replan()


def _objections(waiting: Sequence[EntryPlan]) -> dict[str, str]:
    """Return why this machine cannot measure for an arch, by its name; empty where it can."""
    return {name: cannot_measure(arch) for name, arch in {entry.arch.name: entry.arch for entry in waiting}.items()}


def _count_own_functions(at_work: Build, waiting: Sequence[EntryPlan]) -> None:
    """Find out how many functions the files give that entries name; fail the entries whose file is wrong."""
    entries = [entry for entry in waiting if entry.workload.specialize]
    requests = [_task(at_work, entry, Path()).specialize_request() for entry in entries]
    for index, answer in at_work.the_runner.run_all(requests, BUILD_SECS):
        entry = entries[index]
        if "failure" in answer:
            at_work.fail(entry.action("tune"), answer["failure"])
            continue
        at_work.variants[entry.entry] = answer["variants"]
        if not answer["variants"]:
            at_work.report(Note(f"{entry.entry}: {entry.workload.specialize} gives no function for it"))


def _tune_in_turns(at_work: Build, waiting: Sequence[EntryPlan], folder: Path) -> None:
    """Tune the entries that no other build has tuned meanwhile.

    The lock is held until all are tuned: who has begun to measure keeps the GPU, and must not wait for one that waits for it.
    """
    store = at_work.workspace.store

    def say(text: str) -> None:
        at_work.report(Note(text))

    def is_tuned(entry: EntryPlan) -> bool:
        return isinstance(store.read("tune", entry.action("tune").key, is_local=entry.arch.is_detected), Record)

    with exclusive(store.root / "tune.lock", "tuning in this workspace", say, wait=at_work.options.wait):
        for turn in _turns(at_work, [entry for entry in waiting if not is_tuned(entry)], folder):
            _tune_entry(at_work, turn)


def _turns(at_work: Build, waiting: Sequence[EntryPlan], folder: Path) -> Iterator[Turn]:
    """Yield one entry after the other: what is timed must have its device for itself.

    While a GPU measures the candidates of one entry, the first ones of the next are built: of more than one, for the last candidates
    of an entry leave cores idle. On a CPU that would disturb.
    """
    tasks = [replace(_task(at_work, entry, folder / str(index)), turn=index) for index, entry in enumerate(waiting)]
    # One thread proposes, in the order of the entries: workers that are idle take what is asked first.
    asking = ThreadPoolExecutor(1, "ask-ahead")
    ahead: list[Ahead | None] = []
    try:
        for index, (entry, task) in enumerate(zip(waiting, tasks, strict=True)):
            if at_work.is_over:
                break
            for at in range(len(ahead), min(index + 1 + BUILT_AHEAD, len(tasks))):
                may_build = all(each.arch.gpu for each in tasks[index : at + 1])
                ahead.append(asking.submit(ask_first, tasks[at], at_work.the_runner).result if may_build else None)
            yield Turn(entry, task, ahead[index], next(iter(tasks[index + 1 : index + 2]), None))
    finally:
        # An interrupted build stops the workers, and with them what is still being built.
        asking.shutdown(wait=False, cancel_futures=True)


def _step(at_work: Build, entry: EntryPlan) -> Told:
    def step(doing: str, done: int, total: int, best_secs: float | None) -> None:
        at_work.report(Step(entry.entry, doing, done, total, best_secs))

    return step


def _tune_entry(at_work: Build, turn: Turn) -> None:
    entry, task = turn.entry, turn.task
    outcome = tune(task, at_work.the_runner, at_work.workspace.store, _step(at_work, entry), turn.ahead, turn.following)
    for failed in (m for m in outcome.measurements if m.candidate.template == SPECIALIZE and m.failure):
        at_work.report(Note(f"{entry.entry}: {lockfile.shown(failed.candidate)} of {entry.workload.specialize}: {failed.failure}"))
    if outcome.policy:
        _record(at_work, entry, task, outcome)
    else:
        at_work.fail(entry.action("tune"), no_winner(outcome.measurements))


def _record(at_work: Build, entry: EntryPlan, task: Task, outcome: Outcome) -> None:
    """Keep the winner's blobs and the record of how it was found."""
    action, store, winner = entry.action("tune"), at_work.workspace.store, outcome.measurements[0]
    code = store.write_blob(winner_object(task, winner, at_work.the_runner))
    blobs = _described(at_work, task, winner.candidate)
    if isinstance(blobs, str):
        at_work.fail(action, blobs)
        return
    found = {"code": code, "build_key": key(f"{winner.scheduled} {code}"), **blobs}
    if winner.samples:
        told = RECALLED if cannot_measure(task.arch) else measured_on(task, at_work.the_runner)
        result = record_result(task, outcome, {**found, **told})
        store.write("tune", action.manifest, result, is_local=entry.arch.is_detected)
        figure = f"{winner.run_secs * 1e6:.4g} us"
    else:
        store.write("rank", action.manifest, record_result(task, outcome, found), is_local=True)
        figure = f"{winner.predicted_secs * 1e6:.4g} us expected, not measured"
    at_work.report(Finished(entry.entry, "tune" if winner.samples else "rank", f"{lockfile.shown(winner.candidate)} {figure}"))


def _rank_entry(at_work: Build, entry: EntryPlan, folder: Path, objection: str) -> None:
    """Choose a winner for a GPU that is not here, by what was measured before or else unmeasured; nothing else may be linked so."""
    action = entry.action("tune")
    if not entry.arch.gpu:
        at_work.fail(action, objection)
        return
    task, step = _task(at_work, entry, folder / action.key), _step(at_work, entry)
    outcome = recalled(task, at_work.the_runner, at_work.workspace.store, step)
    if outcome is None and at_work.options.require_measured:
        at_work.fail(action, f"{objection}; measure it there: `kerneldecl build`, or --no-measure here and `kerneldecl measure` there")
        return
    outcome = outcome or rank(task, at_work.the_runner, step)
    if outcome.policy:
        _record(at_work, entry, task, outcome)
    else:
        at_work.fail(action, no_winner(outcome.measurements))


def _bundle_entries(at_work: Build, waiting: Sequence[EntryPlan], folder: Path) -> None:
    """Build all candidates, write a bundle for each target, and rank the entries from what was built."""
    workspace, declaration = at_work.workspace, at_work.workspace.declaration
    by_target: dict[str, list[bundle.Entry]] = {}
    for entry in waiting:
        if at_work.is_over:
            return
        task = _task(at_work, entry, folder / entry.action("tune").key)
        made, outcome = bundle.build_entry(task, entry.action("tune").manifest, at_work.the_runner, _step(at_work, entry))
        if outcome.policy:
            by_target.setdefault(entry.workload.target, []).append(made)
            _record(at_work, entry, task, outcome)
        else:
            at_work.fail(entry.action("tune"), no_winner(outcome.measurements))
    for target, entries in by_target.items():
        path = bundle.bundle_folder(workspace.root, declaration.artifact, declaration.version, target)
        bundle.write_bundle(path, workspace.case_files, entries)
        at_work.bundles[target] = path


def _task(at_work: Build, entry: EntryPlan, folder: Path) -> Task:
    """Return the task; its folder is there."""
    assert entry.lowered is not None
    workspace, variants = at_work.workspace, at_work.variants.get(entry.entry, 0)
    folder.mkdir(exist_ok=True)
    limit = tolerance(entry.workload, entry.lowered)
    given = (entry.workload, entry.arch, entry.policies, entry.lowered)
    return Task(workspace.root, *given, limit, MEASURING[entry.arch.kind], workspace.inputs.toolchain, folder, variants)


def no_winner(measurements: Sequence[Trial]) -> str:
    if not measurements:
        return "no policy proposes a candidate for it"
    reasons = sorted({m.failure for m in measurements})
    return f"none of {len(measurements)} candidates passed: {'; '.join(reasons[:3])}"


def cannot_measure(arch: Arch) -> str:
    """Return why this machine cannot measure for an arch, as a sentence; empty where it can."""
    if arch.gpu:
        return gpu_lock.missing(arch.model)
    here = host.detect()
    if arch.model and arch.model != here.model:
        return f"it must be measured on {arch.model}; this is {here.model}"
    if arch.cpu and arch.cpu.vector_bytes > here.the_cpu.vector_bytes:
        return f"arch {arch.name} has vectors of {arch.cpu.vector_bytes} bytes; this machine's have {here.the_cpu.vector_bytes}"
    return ""


def make_objects(at_work: Build) -> None:
    """Make winners' objects, database lines and sources that the store has lost, or never had, from their records."""
    wanted = at_work.pending("build")
    with tempfile.TemporaryDirectory(prefix="kerneldecl-", ignore_cleanup_errors=True) as folder:
        tasks = [_task(at_work, e, Path(folder)) for e in wanted]
        requests = [task.build_request(_winner(e), afresh=True) for task, e in zip(tasks, wanted, strict=True)]
        for index, answer in at_work.the_runner.run_all(requests, BUILD_SECS):
            _made(at_work, wanted[index], tasks[index], answer)
    at_work.replan()


def _winner(entry: EntryPlan) -> Candidate:
    assert entry.tuned is not None
    return Candidate.from_json(entry.tuned.result["winner"])


def _made(at_work: Build, entry: EntryPlan, task: Task, answer: Mapping[str, Any]) -> None:
    assert entry.tuned is not None
    action, result = entry.action("build"), entry.tuned.result
    if "failure" in answer:
        at_work.fail(action, f"the recorded winner cannot be built: {answer['failure']}")
        return
    blobs = {"code": at_work.workspace.store.write_blob((task.folder / f"{answer['code']}.o").read_bytes())}
    described = _described(at_work, task, _winner(entry))
    if isinstance(described, str):
        at_work.fail(action, described)
    elif differing := [name for name, blob in {**blobs, **described}.items() if blob != result[name]]:
        other = " and ".join(differing)
        at_work.fail(action, f"the recorded winner gives another {other} here; raise `generation` on the entry to tune it again")
    else:
        at_work.report(Finished(entry.entry, "build", "built from its record"))


def _described(at_work: Build, task: Task, candidate: Candidate) -> dict[str, str] | str:
    """Return the digests of the candidate's database lines and source, now in the store, or a failure."""
    (answer,) = in_order(at_work.the_runner.run_all([task.describe_request(candidate)], BUILD_SECS, task.turn), 1)
    if "failure" in answer:
        return f"the winner cannot be described: {answer['failure']}"
    store = at_work.workspace.store
    return {"database": store.write_blob(answer["database"].encode()), "source": store.write_blob(answer["source"].encode())}
