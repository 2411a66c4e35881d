"""Owns the summary of a finished build.

Knows nothing of progress or of how the build was done.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kerneldecl.diagnostics.units import counted
from kerneldecl.planning.action import Kind
from kerneldecl.planning.fallbacks import fallback_shares, share_text

if TYPE_CHECKING:
    from kerneldecl.stages.session import Session  # with all of planning, which printing a quick plan does without

TRY_AGAIN = "verdicts are remembered: `kerneldecl build --retune ENTRY` finds them out again, a higher `generation` does so for everybody"
"""The way out for an entry whose candidates were wrong through no fault of theirs."""


def build_json(done: Session) -> dict[str, Any]:
    """Return counts, failures with their reasons, and where the artifacts are."""
    ran = {(action.kind, action.entry) for action in done.ran}
    chosen = [e for e in done.plan.entries if done.options.selected is None or e.entry in done.options.selected]
    tuned = [e.entry for e in chosen if ("tune", e.entry) in ran and e.tuned is not None]
    built = [e.entry for e in chosen if ("build", e.entry) in ran and e.entry not in tuned and e.is_done]
    # Also those that were lowered or proposed for again, with the same result.
    up_to_date = [e.entry for e in chosen if e.is_done and e.entry not in {*tuned, *built}]
    interrupted = [e.entry for e in chosen if e.action("tune").key in done.interim]
    settled = {*up_to_date, *tuned, *built, *interrupted, *done.failures}
    unmeasured = [e.entry for e in chosen if e.is_unmeasured]
    partly = {e.entry: e.tuned.coverage for e in chosen if e.tuned and e.tuned.coverage}
    unverified = [e.entry for e in chosen if e.tuned and e.tuned.is_measured and not e.tuned.is_verified]
    linked = [target for target in done.artifacts if ("link", target) in ran]
    incomplete = {e.workload.target for e in done.plan.entries if e.entry in done.failures}
    return {
        "schema": 1,
        "entries": len(chosen),
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
        "incomplete": sorted(incomplete & done.artifacts.keys()),
        "artifacts": {target: str(folder) for target, folder in done.artifacts.items()},
    }


def _ran(done: Session) -> dict[str, int]:
    """Return how many actions of each kind were run, entries that share one counted once, and how many candidates took part."""
    keys = {(action.kind, action.key) for action in done.ran}
    counts = {kind: sum(ran == kind for ran, _ in keys) for kind in typing.get_args(Kind)}
    return {**counts, **(done.started_runner.counts if done.started_runner else {"scheduled": 0, "verified": 0, "measured": 0})}


def build_text(found: dict[str, Any]) -> str:
    """Return the summary line, the failures, and the artifacts that were linked."""
    parts = [f"{found['up_to_date']} up to date"]
    parts += [f"{found[name]} {name}" for name in ("tuned", "built") if found[name]]
    parts += [f"{len(found['failed'])} failed"] * bool(found["failed"])
    parts += [f"{len(found['not_reached'])} not reached (--keep-going continues after a failure)"] * bool(found["not_reached"])
    parts += [f"{len(found['interrupted'])} interrupted"] * bool(found["interrupted"])
    parts += [f"{len(found['unmeasured'])} unmeasured"] * bool(found["unmeasured"])
    parts += [f"{len(found['partly_measured'])} partly measured"] * bool(found["partly_measured"])
    parts += [f"{len(found['unverified'])} unverified"] * bool(found["unverified"])
    lines = [f"{counted(found['entries'], 'entry', 'entries')}: {', '.join(parts)}"]
    lines += [f"failed {failure['entry']}: {failure['reason']}" for failure in found["failed"]]
    if any(failure["reason"].startswith("none of ") for failure in found["failed"]):
        lines.append(f"`kerneldecl show ENTRY` lists its candidates; {TRY_AGAIN}")
    if names := found["interrupted"]:
        lines.append(f"linked by the best that was found until the interrupt, the next build goes on: {_named(names)}")
    if names := found["unmeasured"]:
        lines.append(f"unmeasured, linked by their policies' choice: {_named(names)}")
    if partly := found["partly_measured"]:
        named = _named([f"{entry} ({coverage})" for entry, coverage in partly.items()])
        lines.append(f"linked by the best of those candidates that were measured: {named}")
    if names := found["unverified"]:
        lines.append(f"not verified by today's reference: {_named(names)}")
    lines += map(share_text, found["fallbacks"])
    lines += [f"bundle for {target}: run `kerneldecl measure {folder}` where its device is" for target, folder in found["bundles"].items()]
    without = dict.fromkeys(found["incomplete"], ", without the failed entries")
    lines += [f"artifact for {target}: {found['artifacts'][target]}{without.get(target, '')}" for target in found["linked"]]
    return "\n".join(lines)


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
