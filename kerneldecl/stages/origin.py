"""Owns what a workspace knows of an artifact that it has linked: the records of its entries, and the git revision they were built at.

Knows nothing of packages' files or of registries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kerneldecl.errors import StaleError
from kerneldecl.package.make import Origin
from kerneldecl.planning.git_files import clean_revision
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.workspace import Workspace
from kerneldecl.stages.session import make_plan
from kerneldecl.store.local import Record
from kerneldecl.store.protocol import Wanted


def origin_of(workspace: Workspace, manifest: Mapping[str, Any]) -> Origin:
    """Return where the workspace's artifact for a target comes from; raise StaleError where it is not what is declared now."""
    target = manifest["target"]
    planned = make_plan(workspace)
    linked = next((action for action in planned.links if action.target == target), None)
    if linked is None or not linked.is_hit or linked.key != manifest["key"]:
        raise StaleError(f"the artifact for {target} is not up to date: run `kerneldecl build` first")
    names = {entry["name"] for entry in manifest["entries"]}
    entries = [entry for entry in planned.entries if entry.workload.target == target and entry.workload.name in names]
    return Origin(
        workspace.own_store,
        tuple(dict.fromkeys(wanted for entry in entries for wanted in _records(entry))),
        clean_revision(workspace.root),
        dict(_tuned(workspace, entries)),
    )


def _records(entry: EntryPlan) -> Iterator[Wanted]:
    for kind in ("lower", "propose", "tune"):
        action = entry.action(kind)
        if action.is_hit and not (kind == "tune" and entry.is_unmeasured):
            yield Wanted(kind, action.key, entry.arch.is_detected)


def _tuned(workspace: Workspace, entries: list[EntryPlan]) -> Iterator[tuple[str, Record]]:
    for entry in entries:
        record = workspace.own_store.read("tune", entry.action("tune").key, is_local=entry.arch.is_detected)
        if isinstance(record, Record) and not entry.is_unmeasured:
            yield entry.workload.name, record


def is_of(workspace: Workspace, artifact: Path) -> bool:
    """Say whether an artifact's folder is one that the workspace links."""
    return artifact.resolve().parent.parent == (workspace.root / "dist").resolve()
