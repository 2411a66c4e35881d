"""Owns planning with the memo: known tables cost nothing, the others are planned as usual.

Knows nothing of building. Where the memo does not hold, or anything is wrong, there is no quick plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerneldecl.null_build import memo, tables
from kerneldecl.store.regular import read_file

if TYPE_CHECKING:
    from kerneldecl.model import Workload
    from kerneldecl.planning.action import Action, Difference
    from kerneldecl.planning.plan import EntryPlan

FILE = "workloads.toml"


def quick_plan(root: Path) -> list[Action] | None:
    """Return all actions of the workspace, hits and misses, or None where the full plan must be made."""
    fields = memo.load_memo(root) if (root / memo.MEMO).is_file() else None
    found = _tables(root, fields["texts"]) if fields else None
    known = memo.still_holding(root, fields, found.document) if fields and found else None
    if known is None or found is None or not found.listed:
        return None
    document = found.document
    rows = [row for digest, _ in found.listed for row in known.tables.get(digest, ())]
    changed = _expanded(root, document, [table for digest, table in found.listed if digest not in known.tables])
    if changed is None:
        return None
    by_digest = {memo.entry_digest(workload): workload for workload in changed}
    old = {row.entry_digest: row for several in known.tables.values() for row in several} if changed else {}
    rows += [old[digest] for digest in by_digest if digest in old]
    new = tuple(workload for digest, workload in by_digest.items() if digest not in old)
    planned = _planned(root, document, new, known.plugins)
    if _has_duplicates(rows, planned) or len(by_digest) != len(changed):
        return None
    links = _links(root, document, rows, planned, known.links)
    return [*_hits(rows), *(action for entry in planned for action in entry.actions), *links]


def _tables(root: Path, known: Mapping[str, str]) -> tables.Tables | None:
    try:
        return tables.read_tables(read_file(root / FILE).decode("utf-8-sig"), known)
    except (OSError, ValueError):
        return None


def _expanded(root: Path, document: Mapping[str, Any], changed: Sequence[Any]) -> list[Workload] | None:
    """Return the workloads of tables that the memo does not know, None where a table has a mistake."""
    if not changed:
        return []
    from kerneldecl.declare import workload_table
    from kerneldecl.declare.document import scope_of

    scope = scope_of(root, document)
    expansions = [workload_table.expand_table(table, scope) for table in changed]
    if any(expansion.findings for expansion in expansions):
        return None
    return [workload for expansion in expansions for workload in expansion.workloads]


def _planned(
    root: Path, document: Mapping[str, Any], workloads: tuple[Workload, ...], plugins: Mapping[str, Mapping[str, str]]
) -> list[EntryPlan]:
    if not workloads:
        return []
    from kerneldecl.declare.document import declared
    from kerneldecl.planning import workspace
    from kerneldecl.stages.session import make_plan

    return list(make_plan(workspace.workspace_of(root, declared(root, document, workloads), plugins)).entries)


def _has_duplicates(rows: Sequence[memo.Row], planned: Sequence[EntryPlan]) -> bool:
    names = [(row.name, row.target) for row in rows] + [(entry.workload.name, entry.workload.target) for entry in planned]
    return len(set(names)) != len(names)


def _hits(rows: Sequence[memo.Row]) -> list[Action]:
    from kerneldecl.planning.action import Action, State

    done, actions = State.DONE, list[Action]()
    for row in rows:
        target = row.target
        entry = f"{row.name}@{target}"
        # By position: ten thousand entries have forty thousand actions.
        actions.append(Action(entry, target, "lower", done, row.lower_key, ""))
        actions.append(Action(entry, target, "propose", done, row.propose_key, ""))
        actions.append(Action(entry, target, "tune", done, row.tune_key, ""))
        actions.append(Action(entry, target, "build", done, row.build_key, ""))
    return actions


def _links(
    root: Path, document: Mapping[str, Any], rows: Sequence[memo.Row], planned: Sequence[EntryPlan], linked: Mapping[str, str]
) -> list[Action]:
    from kerneldecl.artifact.manifest import OTHER_KERNELS, artifact_defect, artifact_folder
    from kerneldecl.planning.link import ArtifactOf, LinkPast, link_action

    artifact = ArtifactOf(document["artifact"]["name"], document["artifact"]["version"], document["artifact"].get("headers", False))
    entries: dict[str, dict[str, str]] = {}
    waiting: dict[str, list[str]] = {}
    for row in rows:
        entries.setdefault(row.target, {})[row.name] = row.link_digest
    for entry in planned:
        of_target = entries.setdefault(entry.workload.target, {})
        if entry.tuned is None:
            waiting.setdefault(entry.workload.target, []).append(entry.entry)
        else:
            of_target[entry.workload.name] = entry.link_digest

    def past(target: str) -> LinkPast:
        key, folder = linked.get(target, ""), artifact_folder(root, artifact.name, artifact.version, target)

        def defect(of: str) -> str:
            # The memo has no key of an artifact that is not as it was left: then its files are looked at.
            return ("" if of == key else OTHER_KERNELS) if key else artifact_defect(folder, of)

        return LinkPast(defect, lambda new: _difference(root, target, key, new, planned))

    return [link_action(artifact, target, digests, waiting.get(target, []), past(target)) for target, digests in entries.items()]


def _difference(root: Path, target: str, key: str, manifest: str, planned: Sequence[EntryPlan]) -> Difference:
    """Return what of a link is not as in the last build, whose key is given."""
    from kerneldecl.planning import sources
    from kerneldecl.planning.action import Difference
    from kerneldecl.planning.explain import link_causes
    from kerneldecl.store.keys import changed_lines
    from kerneldecl.store.local import LocalStore, Record

    before = LocalStore(root / "cache").read("link", key, is_local=True)
    if not isinstance(before, Record):
        return Difference()
    lines = tuple(changed_lines(before.manifest, manifest))
    tuned = {entry.workload.name: entry for entry in planned if entry.workload.target == target and entry.tuned}
    return Difference(lines, link_causes(target, lines, tuned, sources.read_sources(root / "cache" / sources.FILE).links))
