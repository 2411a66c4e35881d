"""Owns the end of an entry's tuning: its winner's blobs and record are kept, or its failure is noted.

Knows nothing of how the winner was found.
"""

from __future__ import annotations

from collections.abc import Sequence

from kerneldecl.diagnostics.units import duration
from kerneldecl.model import Candidate, Trial
from kerneldecl.planning.beyond import BEYOND, beyond
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.runners.local import in_order
from kerneldecl.stages.session import Session
from kerneldecl.stages.suspect import history, recorded, with_others
from kerneldecl.stages.tasks import known_of
from kerneldecl.store.overlay import Overlay
from kerneldecl.tuning.earlier import Known
from kerneldecl.tuning.events import Finished
from kerneldecl.tuning.loop import Outcome
from kerneldecl.tuning.measure import measured_on
from kerneldecl.tuning.no_winner import why_no_winner
from kerneldecl.tuning.records import Device, measured_here, write_result
from kerneldecl.tuning.search import EARLIER, replacements, winner_object
from kerneldecl.tuning.task import BUILD_SECS, Runner, Task

OF_THE_DEVICE = ("provenance", "conditions", "measured_peaks")
"""Fields of a tune record that tell of the device that has measured."""
INTERRUPTED = "interrupted before any candidate of it was right; the next build goes on"
"""Why an entry is not in the artifact of an interrupted build."""
RECALLED = {"provenance": {"samples": "of records in cache/record/measure"}}
"""Recorded in place of a device that is not here: others have measured on it, the candidates then were those that there are now."""


def conclude(session: Session, entry: EntryPlan, task: Task, outcome: Outcome, device: Device | None = None) -> bool:
    """Keep the winner's blobs and the record of how it was found; fail the entry where there is no winner. Say whether there is.

    `device` is what is known of the device that has measured the winner, where that is known already.
    """
    action, winner = entry.action("tune"), outcome.trials[0] if outcome.policy else None
    if winner is None and outcome.is_cut:
        session.fail(action, INTERRUPTED)
        return False
    again = recorded(session, entry)
    if winner is None:
        if not again:
            _make_way(session, entry)
        session.fail(action, why_no_winner(outcome.trials, task.groups), outcome.trials)
        return False
    before = known_of(session, entry)
    blobs = _blobs(session, task, winner, before)
    if isinstance(blobs, str):
        session.fail(action, blobs)
        return False
    replaced = replacements(task, outcome)
    source = before.source(winner)
    if outcome.policy == EARLIER and source:
        outcome = outcome._replace(policy=source.policy)
    session.workspace.check_current()
    device = _with_replacements(session, entry, replaced, device or device_of(session, entry, task, outcome, session.runner))
    if outcome.is_cut:
        overlay = Overlay(session.workspace.store)
        write_result(overlay, action.manifest, task, outcome, blobs, device)
        session.interim |= {record.key: record for record in overlay.records.values()}
        session.tuned_again.add(action.key)
    else:
        if again:
            outcome = with_others(outcome, again)
            device = device._replace(fields={**device.fields, "before": history(again)})
        _make_way(session, entry)
        write_result(session.workspace.store, action.manifest, task, outcome, blobs, device)
    figure = _figure(winner, outcome.trials) if winner.samples else f"{duration(winner.predicted_secs)} expected, not measured"
    session.report(Finished(entry.entry, "tune" if winner.samples else "rank", f"{winner.candidate} {figure}"))
    return True


def _with_replacements(session: Session, entry: EntryPlan, replaced: Sequence[Candidate], device: Device) -> Device:
    """Return what the record says besides the search, with what the choice of replacements depends on, where there are any."""
    if not replaced:
        return device
    depends_on = beyond(entry.action("propose").key, replaced, session.workspace.inputs.template)
    return device._replace(fields={**device.fields, BEYOND: depends_on})


def _figure(winner: Trial, trials: Sequence[Trial]) -> str:
    """Return the winner's time, and the least where another's is less by as little as noise."""
    fastest_secs = min(trial.run_secs for trial in trials if trial.samples)
    tie = f", within noise of {duration(fastest_secs)}" if duration(fastest_secs) != duration(winner.run_secs) else ""
    return f"{duration(winner.run_secs)}{tie}"


def _make_way(session: Session, entry: EntryPlan) -> None:
    """Remove the record of an entry that was tuned again: records are written once."""
    key = entry.action("tune").key
    if session.is_wanted_again(entry.entry, key):
        session.workspace.store.forget("tune", key, is_local=entry.arch.is_detected)
        session.tuned_again.add(key)


def _blobs(session: Session, task: Task, winner: Trial, before: Known) -> dict[str, str] | str:
    """Return the digests of the winner's blobs, as an earlier record has them or else made now; or why they cannot be made."""
    if won := before.winner(winner):
        return won.blobs
    content = winner_object(task, winner, session.runner)
    if isinstance(content, str):
        return content
    described = describe(session, task, winner.candidate)
    return described if isinstance(described, str) else {"object": session.workspace.own_store.write_blob(content), **described}


def device_of(session: Session, entry: EntryPlan, task: Task, outcome: Outcome, runner: Runner) -> Device:
    """Return what is known of the device that has measured the winner, which `runner` has if that was now; nothing where none has."""
    winner = outcome.trials[0] if outcome.policy else None
    if winner is None:
        return Device({}, is_here=False)
    source = known_of(session, entry).source(winner)
    is_here = bool(winner.samples) and session.options.measure and not session.why_not_measured(task.arch)
    if source and winner.samples:
        return Device({name: source.json[name] for name in OF_THE_DEVICE if name in source.json}, is_here)
    if is_here:
        return measured_here(measured_on(task, runner))
    return Device(RECALLED if winner.samples else {}, is_here=False)


def describe(session: Session, task: Task, candidate: Candidate) -> dict[str, str] | str:
    """Return the digests of the candidate's database lines and source, now in the store, or a failure."""
    (answer,) = in_order(session.runner.run_all([task.describe_request(candidate)], BUILD_SECS, task.priority), 1)
    if "failure" in answer:
        return f"the winner cannot be described: {answer['failure']}"
    store = session.workspace.own_store
    return {"database": store.write_blob(answer["database"].encode()), "source": store.write_blob(answer["source"].encode())}
