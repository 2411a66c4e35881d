"""Owns entries that are not measured here: bundled to be measured elsewhere, won by what was measured before, or ranked.

Knows nothing of entries whose device is here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kerneldecl.planning.plan import EntryPlan, Searched, searched
from kerneldecl.stages.conclude import conclude
from kerneldecl.stages.session import Session
from kerneldecl.stages.tasks import known_of, reporter, task_of, with_known
from kerneldecl.store import signing
from kerneldecl.tuning import bundle
from kerneldecl.tuning.earlier import is_open
from kerneldecl.tuning.search import rank, recalled


def rank_entry(session: Session, entry: EntryPlan, folder: Path, reason: str) -> None:
    """Choose a winner for a declared device that is not here, by what was measured before or else unmeasured.

    Nothing else may be linked so: `host` is this machine.
    """
    action = entry.action("tune")
    if entry.arch.is_detected:
        session.fail(action, reason)
        return
    task, on_progress = with_known(session, entry, task_of(session, entry, folder / action.key)), reporter(session, entry)
    may_know_code = known_of(session, entry).is_of_other_code
    outcome = recalled(task, session.runner, session.workspace.store, on_progress, may_know_code=may_know_code)
    if session.options.require_measured and any(map(is_open, outcome.trials)):
        session.fail(action, f"{reason}; measure it there: `kerneldecl build`, or --no-measure here and `kerneldecl measure` there")
        return
    conclude(session, entry, task, outcome if outcome.policy else rank(task, session.runner, on_progress))


def bundle_entries(session: Session, waiting: Sequence[EntryPlan], folder: Path) -> None:
    """Build all candidates, write a bundle for each target, and rank the entries from what was built."""
    workspace, declaration = session.workspace, session.workspace.declaration
    by_target: dict[str, list[bundle.Entry]] = {}
    for entry in waiting:
        if session.is_over:
            return
        tuner = next((group.policy for group in entry.groups if group.options), "")
        if tuner:
            session.fail(entry.action("tune"), f"policy {tuner} is asked with what was measured, which no bundle can hold: build it there")
            continue
        task = task_of(session, entry, folder / entry.action("tune").key)
        bundled, outcome = bundle.build_entry(task, _searched(session, entry), session.runner, reporter(session, entry))
        if outcome.policy:
            by_target.setdefault(entry.workload.target, []).append(bundled)
        conclude(session, entry, task, outcome)
    for target, entries in by_target.items():
        path = bundle.bundle_folder(workspace.root, declaration.artifact, declaration.version, target)
        bundle.write_bundle(path, workspace.case_files, entries, signing.signer_of(os.environ))
        session.bundles[target] = path


def _searched(session: Session, entry: EntryPlan) -> Searched:
    assert entry.lowered is not None, "what is bundled is lowered"
    return searched(entry.workload, entry.groups, session.workspace.inputs)
