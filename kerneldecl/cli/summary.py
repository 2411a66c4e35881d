"""Owns the summary of a finished build.

Knows nothing of progress or of how the build was done.
"""

from __future__ import annotations

from typing import Any

from kerneldecl.planning.fallbacks import fallback_shares, share_text
from kerneldecl.stages.session import Session


def build_json(done: Session) -> dict[str, Any]:
    """Return counts, failures with their reasons, and where the artifacts are."""
    before = {e.entry: e for e in done.first_plan.entries}
    chosen = [e for e in done.plan.entries if done.options.selected is None or e.entry in done.options.selected]
    up_to_date = [e.entry for e in chosen if before[e.entry].is_done]
    tuned = [e.entry for e in chosen if before[e.entry].tuned is None and e.tuned is not None]
    built = [e.entry for e in chosen if before[e.entry].tuned is not None and not before[e.entry].is_done and e.is_done]
    settled = {*up_to_date, *tuned, *built, *done.failures}
    unmeasured = [e.entry for e in chosen if e.is_unmeasured]
    linked = [action.target for action in done.first_plan.links if not action.is_hit and action.target in done.artifacts]
    incomplete = {e.workload.target for e in done.plan.entries if e.entry in done.failures}
    return {
        "schema": 1,
        "entries": len(chosen),
        "up_to_date": len(up_to_date),
        "tuned": len(tuned),
        "built": len(built),
        "unmeasured": unmeasured,
        "bundles": {target: str(folder) for target, folder in done.bundles.items()},
        "not_reached": [e.entry for e in chosen if e.entry not in settled],
        "linked": linked,
        "failed": [{"entry": entry, "reason": reason} for entry, reason in done.failures.items()],
        "fallbacks": fallback_shares(chosen),
        "incomplete": sorted(incomplete & done.artifacts.keys()),
        "artifacts": {target: str(folder) for target, folder in done.artifacts.items()},
    }


def build_text(found: dict[str, Any]) -> str:
    """Return the summary line, the failures, and the artifacts that were linked."""
    parts = [f"{found['up_to_date']} up to date"]
    parts += [f"{found[name]} {name}" for name in ("tuned", "built") if found[name]]
    parts += [f"{len(found['failed'])} failed"] * bool(found["failed"])
    parts += [f"{len(found['not_reached'])} not reached (--keep-going continues after a failure)"] * bool(found["not_reached"])
    parts += [f"{len(found['unmeasured'])} unmeasured"] * bool(found["unmeasured"])
    lines = [f"{found['entries']} entries: {', '.join(parts)}"]
    lines += [f"failed {failure['entry']}: {failure['reason']}" for failure in found["failed"]]
    if any(failure["reason"].startswith("none of ") for failure in found["failed"]):
        lines.append(
            "`kerneldecl show ENTRY` lists its candidates; a verdict is remembered: raise `generation` on the entry to verify again"
        )
    if names := found["unmeasured"]:
        lines.append(f"unmeasured, linked by their policies' choice: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}")
    lines += map(share_text, found["fallbacks"])
    lines += [f"bundle for {target}: run `kerneldecl measure {folder}` where its GPU is" for target, folder in found["bundles"].items()]
    without = dict.fromkeys(found["incomplete"], ", without the failed entries")
    lines += [f"artifact for {target}: {found['artifacts'][target]}{without.get(target, '')}" for target in found["linked"]]
    return "\n".join(lines)


def measured_text(found: dict[str, Any]) -> str:
    """Return the results of measuring a bundle."""
    parts = [f"{found['measured']} measured", *[f"{found['measured_before']} measured before"] * bool(found["measured_before"])]
    parts += [f"{len(found['failed'])} failed"] * bool(found["failed"])
    lines = [f"{found['entries']} entries: {', '.join(parts)}"]
    lines += [f"failed {failure['entry']}: {failure['reason']}" for failure in found["failed"]]
    return "\n".join([*lines, f"records: {found['records']}; commit them, and every build links what was measured"])
