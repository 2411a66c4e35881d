"""Owns the stage that links: the artifact of every target whose entries are all there.

Knows nothing of what an artifact holds.
"""

from __future__ import annotations

from pathlib import Path

from kerneldecl.artifact import link
from kerneldecl.artifact.manifest import artifact_defect, artifact_folder
from kerneldecl.planning.plan import Action
from kerneldecl.stages.session import Session
from kerneldecl.store.lock import exclusive
from kerneldecl.tuning.events import Finished, Note


def link_artifacts(session: Session) -> None:
    """Link the targets whose entries are all there."""
    workspace, declaration = session.workspace, session.workspace.declaration
    without_objects = {e.workload.target for e in session.plan.entries if not e.action("build").is_hit}
    for action in session.plan.links:
        folder = artifact_folder(workspace.root, declaration.artifact, declaration.version, action.target)
        if action.is_hit:
            session.artifacts[action.target] = folder
        elif action.key and action.target not in without_objects:
            _link_artifact(session, action, folder)


def _link_artifact(session: Session, action: Action, folder: Path) -> None:
    session.ran.append(action)
    workspace, declaration = session.workspace, session.workspace.declaration
    entries = [e for e in session.plan.entries if e.workload.target == action.target]
    parts = tuple(link.Part(e.workload, e.lowered, e.tuned) for e in entries if e.lowered is not None and e.tuned is not None)
    linked = link.Linked(
        name=declaration.artifact,
        version=declaration.version,
        target=action.target,
        arch=workspace.inputs.archs[action.target],
        toolchain=workspace.inputs.toolchain,
        key=action.key,
        parts=parts,
    )
    with exclusive(workspace.cache / "link.lock", "linking in this workspace", lambda text: session.report(Note(text))):
        if artifact_defect(folder, action.key):  # another build may have linked it while we waited
            link.link(linked, workspace.store, folder, session.linkers[linked.arch.kind])
    workspace.store.write("link", action.manifest, {}, is_local=True)
    session.artifacts[action.target] = folder
    session.report(Finished(action.target, "link", str(folder.relative_to(workspace.root))))
