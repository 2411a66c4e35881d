"""Owns the stage that tunes: entries get their winners, measured here, bundled to be measured elsewhere, or ranked unmeasured.

Knows nothing of how candidates are built or measured, of artifacts or of the lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kerneldecl.planning.beyond import OUTDATED
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.stages.conclude import INTERRUPTED
from kerneldecl.stages.session import Session
from kerneldecl.stages.tasks import task_of
from kerneldecl.stages.turns import PREFETCHED_ENTRIES, tune_in_turns
from kerneldecl.stages.unmeasured import bundle_entries, rank_entry
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.tuning.events import Note
from kerneldecl.tuning.search import BUILT_AT_ONCE
from kerneldecl.tuning.task import BUILD_SECS


def built_at_once(session: Session) -> int:
    """Return how many candidates will be built side by side, as far as the plan knows; 0 where nothing is to be tuned.

    Entries that are not lowered yet count, though their computations may turn out to be tuned.
    """
    waiting = list({e.action("tune").key or e.entry: e for e in session.entries if not e.action("tune").is_hit}.values())
    measures, reasons = session.options.measure, _why_not_measured(session, waiting)
    alone = [min(e.workload.top_k, BUILT_AT_ONCE) if measures and reasons[e.arch.name] else e.workload.top_k for e in waiting]
    prefetched = [e.workload.top_k for e in waiting if measures and e.arch.gpu and not reasons[e.arch.name]]
    return max(sum(prefetched[: 1 + PREFETCHED_ENTRIES]), *alone, 0)


def tune_entries(session: Session) -> None:
    """Give every entry without a tuning record its winner: measured, or ranked where it cannot be measured here."""
    waiting = pending = session.pending("tune")
    _forget_outdated(session, waiting)
    _count_custom_kernels(session, waiting)
    waiting = [entry for entry in waiting if entry.entry not in session.failures]
    reasons = _why_not_measured(session, waiting)
    to_bundle, to_tune, to_rank = list[EntryPlan](), list[EntryPlan](), list[EntryPlan]()
    for entry in waiting:
        is_bundled = not entry.arch.is_detected and not session.options.measure
        (to_bundle if is_bundled else to_rank if reasons[entry.arch.name] else to_tune).append(entry)
    with scratch_folder() as folder:
        if to_tune and not session.is_over:
            tune_in_turns(session, to_tune, folder)
        if to_bundle and not session.is_over:
            bundle_entries(session, to_bundle, folder)
        for entry in to_rank:
            if not session.is_over:
                rank_entry(session, entry, folder, reasons[entry.arch.name])
    shows_ranked, session.shows_ranked = session.shows_ranked, not session.options.require_measured
    if pending or session.shows_ranked != shows_ranked:
        session.replan()
    _fail_interrupted(session)


def _fail_interrupted(session: Session) -> None:
    """Fail what the user has not waited for."""
    if session.is_interrupted:
        for entry in [entry for entry in session.entries if entry.tuned is None]:
            session.fail(entry.action("tune"), INTERRUPTED)


def _forget_outdated(session: Session, waiting: Sequence[EntryPlan]) -> None:
    """Remove the records that the plan has found outdated: whoever looks for one by its key would take it."""
    store = session.workspace.own_store
    for entry in waiting:
        action = entry.action("tune")
        if action.reason == OUTDATED:
            store.forget("tune", action.key, is_local=entry.arch.is_detected)


def _why_not_measured(session: Session, waiting: Sequence[EntryPlan]) -> dict[str, str]:
    """Return why an arch cannot be measured for, by the arch's name; empty where it can."""
    return {name: session.why_not_measured(arch) for name, arch in {entry.arch.name: entry.arch for entry in waiting}.items()}


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
