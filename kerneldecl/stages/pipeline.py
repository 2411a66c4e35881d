"""Owns the stage that has the first entries measured while the later ones are still lowered, and their policies asked.

Knows nothing of how any of this is done. It does what can be done entry by entry, and leaves the others to the stages behind it, which find
in the plan what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from kerneldecl.limits import SHARED_SECONDS
from kerneldecl.model import Arch
from kerneldecl.planning.beyond import OUTDATED
from kerneldecl.planning.plan import EntryPlan, reads_records
from kerneldecl.runners.local import in_order
from kerneldecl.runners.process import Answer, Answers
from kerneldecl.stages.keyed import shared_by
from kerneldecl.stages.lower import lower_request
from kerneldecl.stages.propose import ask_policies, keep_proposed
from kerneldecl.stages.session import Session
from kerneldecl.stages.tasks import read_earlier
from kerneldecl.stages.tune import built_at_once
from kerneldecl.stages.turns import tune_arriving
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.tuning.task import BUILD_SECS, batches_of

LOWERED_AT_ONCE = 32
"""Entries whose rules are lowered while those before them are planned and their policies asked."""
KEPT_EVERY_SECS = 0.05
"""What policies have answered is kept so often, and measured: to look whether kerneldecl was changed takes as long as an answer."""

Planned = Callable[[Sequence[EntryPlan]], list[EntryPlan]]


def tune_as_proposed(session: Session) -> None:
    """Lower entries, ask their policies, and have each tuned as soon as its candidates are known.

    Those of one device alone, where nothing of this disturbs what it times, and where nothing has to be known of all entries before.
    """
    entries = _alike(session)
    if len(entries) < 2:
        return
    read_earlier(session, entries[0].arch)  # what this build finds out is not to be taken for an earlier search
    with scratch_folder() as folder:
        tune_arriving(session, _arriving(session, entries), entries[0].arch, len(entries), folder)
    session.replan()


def _alike(session: Session) -> list[EntryPlan]:
    """Return the entries without a winner that can be tuned as they come: those whose device is that of the first."""
    options, workspace = session.options, session.workspace
    waiting = [entry for entry in session.entries if not entry.action("tune").is_hit]
    has_others = workspace.shared is not None or bool(workspace.declaration.imports)
    shares_seconds = any(SHARED_SECONDS in dict(entry.workload.budget) for entry in waiting)
    if options.locked or not options.measure or has_others or shares_seconds:
        return []
    plain = [entry for entry in waiting if _is_plain(session, entry)]
    arch = next((entry.arch for entry in plain if _may_overlap(session, entry.arch)), None)
    return [entry for entry in plain if arch and entry.arch == arch]


def _is_plain(session: Session, entry: EntryPlan) -> bool:
    """Say whether an entry can be tuned whatever becomes of the others."""
    workload = entry.workload
    depends = shared_by(workload) is not None or reads_records(workload, session.workspace.inputs)
    depends = depends or workload.rows is not None  # for which numbers kernels are tuned follows from all proposals
    is_again = entry.entry in session.options.retuned | session.options.reverified or entry.action("tune").reason == OUTDATED
    return not (depends or is_again or workload.specialize)


def _may_overlap(session: Session, arch: Arch) -> bool:
    """Say whether candidates for an arch can be measured, and are not disturbed by what this machine does meanwhile."""
    if session.why_not_measured(arch):
        return False
    elsewhere = batches_of(session.runner)
    return arch.gpu is not None or (elsewhere is not None and not elsewhere.is_here(arch))


def _arriving(session: Session, entries: Sequence[EntryPlan]) -> Iterator[Sequence[EntryPlan]]:
    """Yield entries whose candidates are known, one for each key; stop where the build does."""
    given = set[str]()
    for proposed in _proposed(session, entries):
        if session.is_over or session.is_interrupted:
            return
        ready = session.begun("tune", [entry for entry in proposed if entry.action("tune").key not in given])
        given |= {entry.action("tune").key for entry in ready}
        yield ready


def _proposed(session: Session, entries: Sequence[EntryPlan]) -> Iterator[Sequence[EntryPlan]]:
    """Yield entries as they are once their candidates are known: at first those that need not be lowered."""
    planned = session.planner()
    to_lower = session.begun("lower", entries)
    keys = {entry.action("lower").key for entry in to_lower}
    of_key: dict[str, list[EntryPlan]] = {key: [] for key in keys}
    lowered: list[EntryPlan] = []
    for entry in entries:
        of_key.get(entry.action("lower").key, lowered).append(entry)
    windows = [to_lower[at : at + LOWERED_AT_ONCE] for at in range(0, len(to_lower), LOWERED_AT_ONCE)]
    requested = _requested(session, windows[0], 0) if windows else iter(())
    session.runner.start(built_at_once(session))  # they import while the first ones lower
    yield from _asked(session, planned, planned(lowered))
    for place, window in enumerate(windows, start=1):
        answers, requested = requested, _requested(session, windows[place], place) if place < len(windows) else iter(())
        done = _keep_lowered(session, window, in_order(answers, len(window)))
        yield from _asked(session, planned, planned([entry for first in done for entry in of_key[first.action("lower").key]]))


def _requested(session: Session, window: Sequence[EntryPlan], place: int) -> Answers:
    requests = [lower_request(session, entry) for entry in window]
    return session.runner.run_all(requests, BUILD_SECS, place * LOWERED_AT_ONCE)


def _keep_lowered(session: Session, window: Sequence[EntryPlan], answers: Sequence[Answer]) -> list[EntryPlan]:
    """Keep what rules were lowered to; return the entries for which that worked."""
    session.workspace.check_current()
    done: list[EntryPlan] = []
    for entry, answer in zip(window, answers, strict=True):
        action = entry.action("lower")
        if "failure" in answer:
            session.fail(action, f"lowering failed: {answer['failure']}")
        else:
            session.keep(action, answer, is_local=entry.arch.is_detected)
            done.append(entry)
    return done


def _asked(session: Session, planned: Planned, entries: Sequence[EntryPlan]) -> Iterator[Sequence[EntryPlan]]:
    """Have policies asked where that is to be done; yield every entry as planned with what they propose, some at a time."""
    wanted = session.begun("propose", entries)
    keys = {entry.action("propose").key for entry in wanted}
    yield [entry for entry in entries if entry.action("propose").key not in keys]
    answered: list[tuple[EntryPlan, Answer]] = []
    kept = time.monotonic()
    for place, entry in enumerate(wanted, start=1):
        answer = ask_policies(session, entry)
        if "failure" in answer:
            session.fail(entry.action("propose"), answer["failure"])
        else:
            answered.append((entry, answer))
        if place == len(wanted) or time.monotonic() - kept > KEPT_EVERY_SECS:
            keep_proposed(session, answered)
            known = {first.action("propose").key for first, _ in answered}
            yield planned([entry for entry in entries if entry.action("propose").key in known])
            answered, kept = [], time.monotonic()
        if session.is_over or session.is_interrupted:
            return
