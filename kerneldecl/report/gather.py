"""Owns the reading of what a report tells: the plan with its records, the lock's git revisions, the last build's events, searches.

Knows nothing of how it is drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kerneldecl.compare.sides import Side, read_side
from kerneldecl.compare.verdict import Comparison, compare
from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.planning.causes import Cause
from kerneldecl.planning.git_files import file_in, revisions_of
from kerneldecl.planning.last_build import FILE as LAST_BUILD
from kerneldecl.planning.last_build import State, read_state
from kerneldecl.planning.lockfile import times_of
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.workspace import LOCK, Workspace
from kerneldecl.report.data import Built, Busy, Curve, Entry, Other, Report, Revision, Target
from kerneldecl.report.entries import entry_of, is_time, measured_now
from kerneldecl.report.spans import BUILD, ENTRIES, Line, Span, spans
from kerneldecl.serial import trials_from_json

MOST_REVISIONS = 40
"""The newest of them; a chart has no room for more."""
_LAST_BUILD = "last build"


@dataclass(frozen=True)
class Asked:
    """What a report is asked."""

    against: str = ""
    """What to compare with, as `kerneldecl diff` takes it; empty for the newest revision of the lock with other times."""
    searches: Path | None = None
    """What `kerneldecl compare --json` has printed."""


def gather(workspace: Workspace, plans: Sequence[EntryPlan], lines: Sequence[Line], asked: Asked) -> Report:
    """Return what is known of planned entries; `lines` are the events of the last build."""
    last = read_state(workspace.cache / LAST_BUILD)
    entries = [_with_reasons(entry_of(plan, _failure(last, plan.entry)), last) for plan in plans]
    revisions, times = _history(workspace.root)
    now = {entry.name: entry.run_secs for entry in entries if entry.run_secs}
    against = asked.against or _newest_other(revisions, times, {plan.entry for plan in plans if not plan.arch.is_detected}, now)
    compared = _compared(workspace.root, plans, against) if against else []
    changes = {each.name: each for each in compared if each.after}
    searched = _searched(asked.searches) if asked.searches else {}
    curves = _curves(lines)
    told = [
        replace(
            entry,
            change=changes.get(entry.name),
            history=(*(found.get(entry.name) for found in times), entry.run_secs or None) if revisions else (),
            others=(*entry.others, *(searched[entry.name][0] if entry.name in searched else ())),
            searches=(*curves.get(entry.name, ()), *(searched[entry.name][1] if entry.name in searched else ())),
        )
        for entry in entries
    ]
    declaration = workspace.declaration
    archs = {plan.workload.target: plan.arch for plan in plans}
    return Report(
        title=f"{declaration.artifact} {declaration.version}",
        targets=tuple(Target(name, arch.model or arch.name, arch.kind == "cpu") for name, arch in archs.items()),
        entries=tuple(told),
        against=against,
        gone=tuple(each.name for each in compared if each.after is None and each.name.rpartition("@")[2] in archs),
        revisions=(*revisions, Revision("", "now", "")) if revisions else (),
        built=_built(spans(lines)),
    )


def with_sources(report: Report, plans: Sequence[EntryPlan], workspace: Workspace) -> Report:
    """Return the report with the winners' scheduled TensorIR, as far as the store has it."""
    digests = {plan.entry: plan.tuned.blobs["source"] for plan in plans if plan.tuned}
    is_there = workspace.own_store.blobs_there()
    found = {name: workspace.own_store.read_blob(digest) for name, digest in digests.items() if is_there(digest)}
    sources = {name: blob.decode(errors="replace") for name, blob in found.items() if isinstance(blob, bytes)}
    return replace(report, entries=tuple(replace(entry, source=sources.get(entry.name, "")) for entry in report.entries))


def _failure(last: State, entry: str) -> Mapping[str, Any]:
    failed = last.failed.get(entry, {})
    return {**failed, "trials": trials_from_json(failed["trials"])} if failed else {}


def _with_reasons(entry: Entry, last: State) -> Entry:
    told = [f"{action['kind']}: {_reason(action)}" for action in last.why.get(entry.name, [])]
    return replace(entry, why=tuple(told)) if told else entry


def _reason(action: Mapping[str, Any]) -> str:
    return "; ".join(str(Cause(*cause)) for cause in action["causes"]) or str(action["reason"])


def _history(root: Path) -> tuple[list[Revision], list[Mapping[str, float]]]:
    """Return the newest revisions in which the lock differs, oldest first, and the times of each by entry."""
    revisions = revisions_of(root, LOCK, MOST_REVISIONS)[::-1]
    contents = file_in(root, LOCK, [each.digest for each in revisions])
    found = [(each, times_of(content.decode(errors="replace"))) for each, content in zip(revisions, contents, strict=True) if content]
    told = [(Revision(each.digest, each.date, each.subject), times) for each, times in found if times]
    return [each for each, _ in told], [times for _, times in told]


def _newest_other(
    revisions: Sequence[Revision], times: Sequence[Mapping[str, float]], locked: Collection[str], now: Mapping[str, float]
) -> str:
    """Return the newest revision whose times are not those of now; empty where there is none."""
    rounded = {name: float(f"{secs:.4g}") for name, secs in now.items() if name in locked}
    for each, found in reversed(list(zip(revisions, times, strict=True))):
        if any(abs(found.get(name, 0.0) / secs - 1) > 1e-3 for name, secs in rounded.items()):
            return each.digest
    return ""


def _compared(root: Path, plans: Sequence[EntryPlan], against: str) -> list[Comparison]:
    after: Side = {plan.entry: found for plan in plans if (found := measured_now(plan))}
    return compare(read_side(root, against, after), after)


def _curves(lines: Sequence[Line]) -> dict[str, list[tuple[str, Curve]]]:
    """Return the search of each entry that the events tell of: its best time, over the seconds since it began."""
    began = {line["entry"]: float(line["at"]) for line in lines if line["event"] == "begun"}
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        if line["event"] == "step" and line.get("best_secs") and line["entry"] in began:
            curve = found.setdefault(line["entry"], [])
            if not curve or line["best_secs"] < curve[-1][1]:
                curve.append((float(line["at"]) - began[line["entry"]], float(line["best_secs"])))
    return {entry: [(_LAST_BUILD, tuple(curve))] for entry, curve in found.items()}


def _searched(path: Path) -> dict[str, tuple[list[Other], list[tuple[str, Curve]]]]:
    """Return by entry what the policies that were compared have found beside the first one's, and the curves of their searches."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return {str(entry["entry"]): _of_policies(entry["policies"]) for entry in told["entries"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        said = "is not what `kerneldecl compare --json` prints"
        raise DeclarationError(
            [Problem(str(path), said, "write it by `kerneldecl compare --policies auto,library --json > FILE`")]
        ) from None


def _of_policies(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Other], list[tuple[str, Curve]]]:
    ours, *others = rows
    timed = [Other(str(row["policy"]), float(row["run_secs"]), float(ours["run_secs"])) for row in others]
    points = [(str(row["policy"]), [(float(at), float(secs)) for at, secs in row["curve"]]) for row in rows]
    curves = [(policy, tuple((at, secs) for at, secs in curve if 0 <= at < math.inf and is_time(secs))) for policy, curve in points]
    return [each for each in timed if is_time(each.secs) and is_time(each.our_secs)], [each for each in curves if each[1]]


def _built(found: Sequence[Span]) -> Built | None:
    if not found:
        return None
    whole = next(span for span in found if span.track == BUILD)
    ran = (span for span in found if span.track not in {BUILD, ENTRIES})
    busy = tuple(Busy(span.track, span.name, span.began - whole.began, span.secs, "failure" in span.fields) for span in ran)
    return Built(whole.secs, str(whole.fields.get("failure", "")), busy)
