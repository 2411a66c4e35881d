"""Owns what a complete build leaves behind so that the next null build and the next plan are quick: the stamp and the memo.

Knows nothing of how they are read.
"""

from __future__ import annotations

import os
from pathlib import Path

from kerneldecl.null_build import memo, stamp, tables
from kerneldecl.planning.plan import ORDER
from kerneldecl.planning.workspace import FILE, plugins_key
from kerneldecl.stages.session import Session
from kerneldecl.store.keys import digest
from kerneldecl.store.regular import read_file


def note_complete(session: Session) -> None:
    """Leave the stamp and the memo that make the next null build and the next plan quick."""
    workspace = session.workspace
    root, sources = workspace.root, workspace.sources
    content = read_file(sources / FILE)
    if digest(content) != workspace.declaration.digest:
        return  # edited while we built without a snapshot: the next build looks again
    text = content.decode("utf-8-sig")
    document = tables.parse(text)
    assert document is not None, "it was declared"
    extra = sorted(_relative(sources if path.is_relative_to(sources) else root, path) for path in workspace.extra_files)
    folders = sorted(_relative(root, path) for path in session.artifacts.values())
    context = stamp.context(str(root), extra, str(sources), workspace.surroundings)
    rows: dict[int, list[memo.Row]] = {}
    for entry in session.plan.entries:
        lower, propose, tune, build = (entry.action(kind).key for kind in ORDER)
        row = memo.Row(
            name=entry.workload.name,
            target=entry.workload.target,
            lower_key=lower,
            propose_key=propose,
            tune_key=tune,
            build_key=build,
            link_digest=entry.link_digest,
            entry_digest=memo.entry_digest(entry.workload),
        )
        rows.setdefault(entry.workload.line, []).append(row)
    digests = [tables.table_digest(table) for table in document["workload"]]
    if len(digests) == len(rows):  # inline tables share a line, which tells tables apart elsewhere
        plugins = {plugins_key(*chosen): found for chosen, found in session.workspace.inputs.plugins.items()}
        links = {link.target: link.key for link in session.plan.links}
        by_digest = dict(zip(digests, rows.values(), strict=True))
        known = memo.Memo(by_digest, links, plugins, tables.known_texts(text, document["workload"]))
        memo.write_memo(root, document, known, context, extra, folders)
    stamp.write_stamp(str(root), extra, folders, len(session.plan.entries), (stamp.digest(content), context))


def _relative(root: Path, path: Path) -> str:
    return os.path.relpath(path, root)
