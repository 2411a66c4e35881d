"""Owns the summary of a finished build.

Knows nothing of progress or of how the build was done.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerneldecl.cli.report import TRY_AGAIN
from kerneldecl.cli.winners import Before, winners_json, winners_text
from kerneldecl.diagnostics.units import counted, duration
from kerneldecl.planning.action import Kind
from kerneldecl.planning.fallbacks import fallback_shares, share_text

if TYPE_CHECKING:
    from kerneldecl.stages.session import Session  # with all of planning, which printing a quick plan does without


def build_json(done: Session, secs: float = 0.0, before: Before = lambda _: None) -> dict[str, Any]:
    """Return counts, what has won, failures with their reasons, and where the artifacts are.

    `secs` is what the build took, `before` gives what an earlier build has found.
    """
    ran = {(action.kind, action.entry) for action in done.ran}
    chosen = [e for e in done.plan.entries if done.options.selected is None or e.entry in done.options.selected]
    interrupted = [e.entry for e in chosen if e.action("tune").key in done.interim]
    # An entry of rows at run time may be tuned, and fail where its kernels are compared at other numbers.
    others = {*interrupted, *done.failures}
    tuned = [e.entry for e in chosen if ("tune", e.entry) in ran and e.tuned is not None and e.entry not in others]
    built = [e.entry for e in chosen if ("build", e.entry) in ran and e.entry not in {*tuned, *others} and e.is_done]
    # Also those that were lowered or proposed for again, with the same result.
    up_to_date = [e.entry for e in chosen if e.is_done and e.entry not in {*tuned, *built, *interrupted, *done.failures}]
    settled = {*up_to_date, *tuned, *built, *interrupted, *done.failures}
    unmeasured = [e.entry for e in chosen if e.is_unmeasured]
    partly = {e.entry: e.tuned.coverage for e in chosen if e.tuned and e.tuned.coverage}
    unverified = [e.entry for e in chosen if e.tuned and e.tuned.is_measured and not e.tuned.is_verified]
    linked = [target for target in done.artifacts if ("link", target) in ran]
    incomplete = {e.workload.target for e in done.plan.entries if e.entry in done.failures}
    return {
        "schema": 1,
        "entries": len(chosen),
        "secs": round(secs, 3),
        "winners": winners_json([e for e in chosen if e.entry in {*tuned, *built, *interrupted}], before),
        "up_to_date": len(up_to_date),
        "tuned": len(tuned),
        "built": len(built),
        "ran": _ran(done),
        "interrupted": interrupted,
        "unmeasured": unmeasured,
        "partly_measured": partly,
        "unverified": unverified,
        "bundles": {target: str(folder) for target, folder in done.bundles.items()},
        "not_reached": [e.entry for e in chosen if e.entry not in settled],
        "linked": linked,
        "failed": [{"entry": entry, "reason": reason} for entry, reason in done.failures.items()],
        "fallbacks": fallback_shares(chosen),
        "is_try": done.workspace.is_overridden,
        "incomplete": sorted(incomplete & done.artifacts.keys()),
        "artifacts": {target: str(folder) for target, folder in done.artifacts.items()},
    }


def _ran(done: Session) -> dict[str, int]:
    """Return how many actions of each kind were run, entries that share one counted once, and how many candidates took part."""
    keys = {(action.kind, action.key) for action in done.ran}
    counts = {kind: sum(ran == kind for ran, _ in keys) for kind in typing.get_args(Kind)}
    return {**counts, **(done.started_runner.counts if done.started_runner else {"scheduled": 0, "verified": 0, "measured": 0})}


def build_text(found: dict[str, Any], width: int = 0) -> str:
    """Return what has won, what is to be known of it, the artifacts, and one line: entries, seconds, what to do next.

    The table takes `width` columns, 0 for any.
    """
    lines = winners_text(found["winners"], width)
    lines += [""] * bool(lines)
    lines += [f"failed {failure['entry']}: {failure['reason']}" for failure in found["failed"]]
    if any(failure["reason"].startswith("none of ") for failure in found["failed"]):
        lines.append(TRY_AGAIN)
    if names := found["interrupted"]:
        lines.append(f"linked by the best that was found until the interrupt, the next build goes on: {_named(names)}")
    if names := found["unmeasured"]:
        lines.append(f"{len(names)} unmeasured, linked by their policies' choice: {_named(names)}")
    if partly := found["partly_measured"]:
        named = _named([f"{entry} ({coverage})" for entry, coverage in partly.items()])
        lines.append(f"{len(partly)} partly measured, linked by the best of what was: {named}")
    if names := found["unverified"]:
        lines.append(f"{len(names)} unverified, not run against today's reference: {_named(names)}")
    lines += map(share_text, found["fallbacks"])
    lines += [f"bundle for {target}: {_near(folder)}" for target, folder in found["bundles"].items()]
    without = dict.fromkeys(found["incomplete"], ", without the failed entries")
    lines += [f"artifact for {target}: {_near(found['artifacts'][target])}{without.get(target, '')}" for target in found["linked"]]
    return "\n".join([*lines, f"{_counts(found)}{_next(found)}"])


def _counts(found: Mapping[str, Any]) -> str:
    """Return how many entries there are, and what became of them; every entry counts once."""
    parts = [f"{found[name]} {name}" for name in ("tuned", "built") if found[name]]
    parts += [f"{found['up_to_date']} up to date"] * bool(found["up_to_date"])
    parts += [f"{len(found[name])} {name}" for name in ("failed", "interrupted") if found[name]]
    parts += [f"{len(found['not_reached'])} not reached (--keep-going continues after a failure)"] * bool(found["not_reached"])
    took = f" in {duration(found['secs'])}" if found["secs"] and any(found["ran"].values()) else ""
    return f"{counted(found['entries'], 'entry', 'entries')}: {', '.join(parts) or 'none'}{took}"


def _next(found: Mapping[str, Any]) -> str:
    """Return what to do next; empty where nothing was done."""
    if found["failed"]:
        tried = next((each["entry"] for each in found["failed"] if each["reason"].startswith("none of ")), "")
        return f"; next: `kerneldecl show '{tried}'` says what became of its candidates" if tried else "; next: mend that, and build again"
    if found["is_try"]:
        return "; a try, of which nothing is linked or locked: `kerneldecl build` builds what is declared"
    if found["bundles"]:
        target, folder = next(iter(found["bundles"].items()))
        return f"; next: `kerneldecl measure {_near(folder)}` where {target}'s device is"
    if found["linked"]:
        return f'; next: kerneldecl.load("{_near(found["artifacts"][found["linked"][0]])}") in Python'
    return ""


def _near(path: str) -> str:
    """Return a path as one would type it here: what lies below the current folder, seen from there."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _named(entries: Sequence[str]) -> str:
    """Return the first entries."""
    return f"{', '.join(entries[:5])}{' …' if len(entries) > 5 else ''}"


def measured_text(found: dict[str, Any]) -> str:
    """Return the results of measuring a bundle."""
    parts = [f"{found['measured']} measured", *[f"{found['measured_before']} measured before"] * bool(found["measured_before"])]
    parts += [f"{len(found['failed'])} failed"] * bool(found["failed"])
    lines = [f"{counted(found['entries'], 'entry', 'entries')}: {', '.join(parts)}"]
    lines += [f"failed {failure['entry']}: {failure['reason']}" for failure in found["failed"]]
    by_reference: dict[str, list[str]] = {}
    for entry, reference in found["references"].items():
        by_reference.setdefault(reference, []).append(entry)
    lines += [f"verified against {reference}: {_named(entries)}" for reference, entries in by_reference.items()]
    return "\n".join([*lines, f"records: {found['records']}; commit them, and every build links what was measured"])
