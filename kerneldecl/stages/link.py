"""Owns the stage that links: the artifact of every target whose entries are all there, or have failed.

Knows nothing of what an artifact holds.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from kerneldecl.artifact import link
from kerneldecl.artifact.manifest import artifact_defect, artifact_folder
from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.planning import published
from kerneldecl.planning.action import Action
from kerneldecl.planning.plan import EntryPlan, plan_link
from kerneldecl.planning.rows import is_called
from kerneldecl.planning.workspace import FILE
from kerneldecl.stages.headers import header_of
from kerneldecl.stages.session import Session, artifact_of, past_of
from kerneldecl.store.lock import exclusive
from kerneldecl.tuning.events import Finished, Note


def link_artifacts(session: Session) -> None:
    """Link the targets whose entries are all there, without those that failed.

    A target where every entry failed, or one did that the user requires, has no new artifact; that of an earlier build stays.
    """
    workspace, declaration = session.workspace, session.workspace.declaration
    for planned in session.plan.links:
        entries = [e for e in session.plan.entries if e.workload.target == planned.target]
        present = [e for e in entries if e.entry not in session.failures]
        is_whole = len(present) == len(entries)
        if not present or (session.options.require_all and not is_whole):
            continue
        action = planned if is_whole else _without_failed(session, planned, entries)
        folder = artifact_folder(workspace.root, declaration.artifact, declaration.version, action.target)
        if not action.is_hit:
            if not action.key or not all(e.action("build").is_hit for e in present):
                continue  # of other entries than those selected, some are not tuned, or their objects are not here
            _link_artifact(session, action, folder, present)
        elif link.left_beside(folder):
            with _alone(session):
                link.remove_left(folder)
        session.links[action.target] = action
        session.artifacts[action.target] = folder


def _without_failed(session: Session, planned: Action, entries: list[EntryPlan]) -> Action:
    artifact = artifact_of(session.workspace.declaration)
    return plan_link(artifact, planned.target, entries, past_of(session.workspace), session.failures)


def _link_artifact(session: Session, action: Action, folder: Path, entries: list[EntryPlan]) -> None:
    workspace, declaration = session.workspace, session.workspace.declaration
    _check_unpublished(session, action)
    session.ran.append(action)
    tuned = [(e, e.lowered, e.tuned) for e in entries if e.lowered is not None and e.tuned is not None and is_called(e)]
    parts = tuple(link.Part(e.workload, lowered, found, e.ranges, header_of(session, e)) for e, lowered, found in tuned)
    failed = (e for e in session.plan.entries if e.workload.target == action.target and e.entry in session.failures)
    linked = link.Linked(
        name=declaration.artifact,
        version=declaration.version,
        target=action.target,
        arch=workspace.inputs.archs[action.target],
        toolchain=workspace.inputs.toolchain,
        key=action.key,
        parts=parts,
        missing={e.workload.name: session.failures[e.entry] for e in failed},
    )
    with _alone(session):
        if artifact_defect(folder, action.key):  # another build may have linked it while we waited
            link.link(linked, workspace.store, folder, session.linkers[linked.arch.kind])
    workspace.store.write("link", action.manifest, {}, is_local=True)
    session.report(Finished(action.target, "link", str(folder.relative_to(workspace.root))))


def _check_unpublished(session: Session, action: Action) -> None:
    """Raise DeclarationError where the version was published with other content, unless that is to be overwritten."""
    workspace, declaration = session.workspace, session.workspace.declaration
    identity = {"name": declaration.artifact, "version": declaration.version, "target": action.target, "key": action.key}
    said = {**identity, "arch": {"model": workspace.inputs.archs[action.target].model}}
    if not session.options.overwrite and (reference := published.published_as(workspace.root, said)):
        sentence = f"version {declaration.version} is published with other content for {action.target} ({reference})"
        raise DeclarationError([Problem(FILE, sentence, "raise version in [artifact], or build with --overwrite")])


def _alone(session: Session) -> AbstractContextManager[None]:
    """Return a context in which nobody else links in the workspace."""
    return exclusive(session.workspace.cache / "link.lock", "linking in this workspace", lambda text: session.report(Note(text)))
