"""Owns what the reading commands report of plans and records, as JSON values and as text.

Knows nothing of terminals, exit codes or of how results were obtained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kerneldecl.cli.steps import Steps
from kerneldecl.cli.table import folded, name_lines, table, wrapped
from kerneldecl.diagnostics.units import amount, counted, duration
from kerneldecl.model import SPECIALIZE, Trial
from kerneldecl.planning import last_build
from kerneldecl.planning.action import Action, State
from kerneldecl.planning.causes import Cause
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.roofline import Roofline, roofline_of, roofline_share
from kerneldecl.stages.suspect import why_suspect
from kerneldecl.timing import PROTOCOLS, median, timing_in_words

SCHEMA = 1
TRY_AGAIN = "verdicts are remembered: `kerneldecl build --retune ENTRY` finds them out again, a higher `generation` does so for everybody"
"""The way out for an entry whose candidates were wrong through no fault of theirs."""
_MOST_CAUSES = 20
"""Causes of one action that `why` prints."""
_LEAST_REASON = 28
"""Columns that a reason must have beside names; else it stands below them."""
_WIDE = 120
"""Columns of a window that has room for rates beside their shares."""
Json = dict[str, Any]


def plan_json(actions: Sequence[Action], steps: Mapping[str, Steps]) -> Json:
    """Return the plan: a summary, and every action with its state, key and reason; `steps` by entry are of the tunings."""
    misses = sum(not action.is_hit for action in actions)
    return {
        "schema": SCHEMA,
        "summary": {"hit": len(actions) - misses, "miss": misses},
        "actions": [_action_json(action, steps) for action in actions],
    }


def _action_json(action: Action, steps: Mapping[str, Steps]) -> Json:
    state = "hit" if action.is_hit else "miss"
    fields = {"workload": action.entry.rpartition("@")[0], "target": action.target}
    found = {"kind": action.kind, "state": state, "key": action.key, "reason": action.reason, "causes": _causes_json(action)}
    return {**fields, **found, "steps": steps[action.entry].json if action.kind == "tune" and action.entry in steps else None}


def _causes_json(action: Action) -> list[Json]:
    return [cause._asdict() for cause in action.causes]


def plan_text(actions: Sequence[Action], steps: Mapping[str, Steps], width: int = 0) -> str:
    """Return the actions that a build would run, a line each with the reason, and a summary, in `width` columns, 0 for any."""
    misses = [action for action in actions if not action.is_hit]
    by_entry: dict[str, list[Action]] = {}
    for action in misses:
        by_entry.setdefault(action.entry, []).append(action)
    # An action that waits for an earlier one has no reason of its own.
    kinds = {entry: _kinds(several) for entry, several in by_entry.items()}
    wide = max(map(len, by_entry), default=0)
    rows = [(kinds[entry], entry.ljust(wide), f"{several[0].reason}{_bracketed(steps, entry)}") for entry, several in by_entry.items()]
    fits = not width or max((len(kind) + wide for kind, *_ in rows), default=0) + _LEAST_REASON <= width
    lines = table((), rows, width) if rows and fits else [line for row in rows for line in _stacked(row, width)]
    entries = {action.entry for action in actions if action.kind != "link"}
    done = len(entries - by_entry.keys())
    waiting = sum(action.state is State.WAITING for action in misses)
    follow = f", {waiting} may follow" * bool(waiting)
    return "\n".join(
        [
            *lines,
            f"{counted(len(entries), 'entry', 'entries')}: {done} up to date; {counted(len(misses) - waiting, 'action')} to run{follow}",
        ]
    )


def _stacked(row: Sequence[str], width: int) -> list[str]:
    """Return a row whose names leave no room for the reason: that stands below them, and a name that is wider than the window is folded."""
    kind, entry, reason = row
    *before, last = name_lines(f"{entry.rstrip()}:", width)
    names = [*before, f"{last} {kind}"] if len(f"{last} {kind}") <= width else [*before, last, f"  {kind}"]
    return [*names, *(f"  {line}" for line in wrapped(reason, width - 2))]


def _bracketed(steps: Mapping[str, Steps], entry: str) -> str:
    return f" [{steps[entry]}]" if entry in steps else ""


def _kinds(misses: Sequence[Action]) -> str:
    """Return the kinds of an entry's actions; those in brackets wait for others, and run where these give something else."""
    ready, waiting = (", ".join(a.kind for a in misses if (a.state is State.WAITING) is waits) for waits in (False, True))
    return f"{ready} ({waiting})".lstrip() if waiting else ready


def why_json(entry: EntryPlan, link: Action, last: last_build.State, shadows: str, steps: Mapping[str, Steps]) -> Json:
    """Return why actions of the entry are pending or, if none is, why the last build ran its actions."""
    pending = [action for action in (*entry.actions, link) if not action.is_hit]
    actions = [
        {"kind": a.kind, "reason": a.reason, "changed": [list(line) for line in a.changed], "causes": _causes_json(a)} for a in pending
    ]
    if not pending:
        actions = [{**a, "causes": [Cause(*cause)._asdict() for cause in a["causes"]]} for a in last.why.get(entry.entry, [])]
    return {
        "schema": SCHEMA,
        "entry": entry.entry,
        "pending": bool(pending),
        "actions": actions,
        "shadows": shadows,
        "takes": str(steps.get(entry.entry, "")),
    }


def why_text(json: Json) -> str:
    """Return the reasons, and where there are several or long ones each with its old and new value."""
    if not json["actions"]:
        head = f"{json['entry']} is up to date; no build here has run anything for it"
    elif json["pending"]:
        head = f"{json['entry']} is not up to date:"
    else:
        head = f"{json['entry']} is up to date. The last build that ran something for it:"
    lines = [head, *(f"  its rule replaces the standard one, {json['shadows']}" for _ in [0] if json["shadows"])]
    for action in json["actions"]:
        causes = [str(Cause(**cause)) for cause in action["causes"]]
        more = [f"    and {len(causes) - _MOST_CAUSES} more: --json lists them"] * (len(causes) > _MOST_CAUSES)
        lines.append(f"  {action['kind']}: {action['reason'] if len(causes) < 2 else ''}".rstrip())
        lines[-1] += f" [{json['takes']}]" * (action["kind"] == "tune" and bool(json["takes"]))
        lines += [f"    {cause}" for cause in causes[:_MOST_CAUSES] if len(causes) > 1 or cause != action["reason"]] + more
    return "\n".join(lines)


def show_json(entry: EntryPlan, failed: Sequence[Trial] = (), names: Mapping[str, str] = MappingProxyType({})) -> Json:
    """Return what is known of an entry: its computation, and every candidate, best first, with its figures.

    `failed` are the candidates of the last build where none of them passed; `names` gives entries by the keys of their tunings.
    """
    head: Json = {"schema": SCHEMA, "entry": entry.entry, "rule": entry.workload.rule, "attrs": dict(entry.workload.attrs)}
    if entry.tuned is None:
        return {**head, "tuned": False, "reason": _first_reason(entry), "candidates": [_verdict_json(trial) for trial in failed]}
    assert entry.lowered is not None, "what is tuned is lowered"
    lowered, tuned, chosen_by = entry.lowered, entry.tuned, timing_in_words(entry.arch.kind, entry.workload.timing)
    roofline = roofline_of(entry)
    return {
        **head,
        "tuned": True,
        "unmeasured": entry.is_unmeasured,
        "measured": tuned.coverage,
        "key": tuned.key,
        "symbol": tuned.symbol,
        "policy": tuned.policy,
        "idea_of": _idea_json(tuned.idea_of, names),
        "tensor_cores": tuned.tensor_cores,
        "traceless": tuned.trials[0].is_traceless,
        "specialize": entry.workload.specialize,
        "tied": tuned.tied,
        "timing": chosen_by,
        "protocols": [protocol for protocol in PROTOCOLS[entry.arch.kind] if protocol != chosen_by],
        "tolerance": tuned.tolerance,
        "flops": lowered.json["flops"],
        "least_bytes": lowered.json["least_bytes"],
        "provenance": tuned.provenance,
        "suspect": why_suspect(entry),
        "before": list(tuned.before),
        "measured_on": tuned.measured_on,
        "candidates": [_candidate_json(trial, roofline, chosen_by) for trial in tuned.trials],
    }


def _idea_json(source: Mapping[str, str], names: Mapping[str, str]) -> Json:
    """Return where a winner's configuration was measured first; with the entry, where that is declared here."""
    entry = names.get(source.get("record", ""), "")
    return {**source, **({"entry": entry} if entry else {})}


def _first_reason(entry: EntryPlan) -> str:
    """Return why the first action that is not done is not; later ones wait for it."""
    return next(action.reason for action in entry.actions if not action.is_hit)


def _verdict_json(trial: Trial) -> Json:
    return {
        "candidate": str(trial.candidate),
        "predicted_secs": trial.predicted_secs,
        "run_secs": None,
        "error": trial.error,
        "verdict": trial.failure or ("verified" if trial.samples else "not measured"),
    }


def _candidate_json(trial: Trial, roofline: Roofline, chosen_by: str) -> Json:
    samples, fields = sorted(trial.samples), _verdict_json(trial)
    if not samples:
        return fields
    flops, moved = roofline.flops / trial.run_secs, roofline.least_bytes / trial.run_secs
    shares = {"peak_share": flops / roofline.peak_flops_per_s, "bandwidth_share": moved / roofline.dram_bytes_per_s}
    spread = {"p20_secs": samples[len(samples) // 5], "p80_secs": samples[len(samples) * 4 // 5], "samples": len(samples)}
    timings = {chosen_by: trial.run_secs, **{protocol: median(found) for protocol, found in trial.timings if found}}
    return {
        **fields,
        "run_secs": trial.run_secs,
        "timings": timings,
        **spread,
        "gflop_per_s": flops / 1e9,
        "gb_per_s": moved / 1e9,
        **shares,
    }


def show_text(json: Json, width: int = 0) -> str:
    """Return the entry's candidates as a table, the winner first and marked, then by time, the failed ones with their reasons last.

    The table takes `width` columns, 0 for any; its candidates have the parameters alone in which they differ.
    """
    given = [f"{name}={_short(value)}" for name, value in json["attrs"].items() if value]
    head = wrapped(f"{json['entry']}: {' '.join([json['rule'], *given])}", width)
    if not json["tuned"]:
        tried = [f"  failed  {c['candidate']}  {c['verdict']}" for c in json["candidates"]]
        told = ["in the last build:", *tried, TRY_AGAIN.replace("ENTRY", json["entry"])] if tried else []
        return "\n".join([*head, f"not tuned yet: {json['reason']}", *told])
    work = f"{amount(json['flops'], 'FLOP')}, at least {amount(json['least_bytes'], 'B')} of memory traffic"
    lines = [*head, f"policy {json['policy']}; {work}", f"symbol {json['symbol']}"]
    if use := json["tensor_cores"]:
        lines.append(f"tensor cores: {use if use.startswith('used') else f'not used: {use}'}")
    if source := json["idea_of"]:
        measured = f"for {source.get('arguments', '?')} on {source.get('model', '?')}"
        lines.append(f"configuration of {source.get('entry', 'record ' + source.get('record', '?')[:12])}, measured {measured}")
    if json["traceless"]:
        lines.append("the winner is a PrimFunc without a schedule trace")
    if path := json["specialize"]:
        lines.append(f"{SPECIALIZE}(…) are the custom kernels of {path}")
    return "\n".join([*lines, "", *_candidates_text(json, width)])


def _candidates_text(json: Json, width: int) -> list[str]:
    verified = [c for c in json["candidates"] if c["run_secs"]]
    failed = [c for c in json["candidates"] if not c["run_secs"]]
    if json["unmeasured"]:
        expected: list[tuple[str, ...]] = [(duration(c["predicted_secs"]),) for c in failed]
        verdicts = ", ".join(dict.fromkeys(c["verdict"] for c in failed))
        lines = _with_candidates(("predicted",), expected, failed, width)
        return [*lines, f"{counted(len(failed), 'candidate')}: {verdicts}", "the first is linked: its policy ranks it first"]
    rates = ("FLOP/s", "B/s") if not width or width >= _WIDE else ()
    others = [protocol for protocol in json["protocols"] if any(protocol in c["timings"] for c in verified)]
    rows = [_row(c, others, rates) for c in verified]
    lines = _with_candidates((json["timing"], *others, "predicted", *rates, "of peak", "DRAM", "error"), rows, verified, width)
    if missing := [protocol for protocol in json["protocols"] if protocol not in verified[0]["timings"]]:
        lines.append(f"the winner was not timed {' or '.join(missing)}: `kerneldecl build --retune '{json['entry']}'` does that")
    tied = f"{json['tied']} more within noise of the fastest; the policy's first wins" if json["tied"] else "none within noise of it"
    lines.append(f"{len(verified)} verified, {len(failed)} failed; {tied}")
    lines += _suspect_text(json)
    if json["measured"]:
        lines.append(f"{json['measured']} candidates measured: the best of them is linked, and stays until the others are measured")
    return lines + [line for c in failed for line in wrapped(f"  failed  {c['candidate']}  {c['verdict']}", width)]


def _suspect_text(json: Json) -> list[str]:
    """Return in what the GPU here differs from the one that timed the candidates, and the times that others took before."""
    lines = []
    if json["suspect"]:
        lines.append(f"suspect: {json['suspect']}; `kerneldecl build --reverify` times the best again")
    for each in json["before"]:
        device = each.get("provenance")
        said = (
            ", ".join(str(device[name]) for name in ("driver", "clocks", "date") if name in device) if isinstance(device, Mapping) else ""
        )
        secs = each.get("run_secs")
        lines.append(f"timed before: {duration(secs) if isinstance(secs, float) else 'unknown'} ({said})")
    return lines


def _with_candidates(head: Sequence[str], rows: Sequence[tuple[str, ...]], candidates: Sequence[Json], width: int) -> list[str]:
    """Return the table of candidates, the first marked as the winner, with what they share above it."""
    found, room = folded([c["candidate"] for c in candidates]), width and width - 2
    wide = table((*head, *found.names), [(*row, *cells) for row, cells in zip(rows, found.rows, strict=True)], 0, is_named=False)
    if room and max(map(len, wide)) > room:
        found = found.in_one_column
        wide = table((*head, *found.names), [(*row, *cells) for row, cells in zip(rows, found.rows, strict=True)], room, is_named=False)
    marks = ("  ", "* ", *["  "] * len(wide))
    shared = (part for line in found.shared for part in wrapped(line, width))
    return [*shared, *(mark + line for mark, line in zip(marks, wide, strict=False))]


def _row(candidate: Json, protocols: Sequence[str], rates: Sequence[str]) -> tuple[str, ...]:
    values = [amount(candidate[field] * 1e9, unit) for field, unit in zip(("gflop_per_s", "gb_per_s"), rates, strict=False)]
    shares = f"{candidate['peak_share']:.0%}", f"{candidate['bandwidth_share']:.0%}"
    others = (duration(candidate["timings"][protocol]) if protocol in candidate["timings"] else "" for protocol in protocols)
    return duration(candidate["run_secs"]), *others, duration(candidate["predicted_secs"]), *values, *shares, _error(candidate["error"])


def _error(error: float | None) -> str:
    return "not verified by today's reference" if error is None else f"{error:.1e}"


def _short(value: Any) -> str:
    if not isinstance(value, tuple | list):
        return str(value)
    return ("x" if all(type(item) is int for item in value) else "+").join(map(_short, value)) or "none"


def query_json(entries: Sequence[EntryPlan], failed: Mapping[str, str] = MappingProxyType({})) -> Json:
    """Return what is known of entries; `failed` says why the last build failed some."""
    return {"schema": SCHEMA, "entries": [_entry_json(entry, failed.get(entry.entry, "")) for entry in entries]}


def _entry_json(entry: EntryPlan, failure: str) -> Json:
    tuned = entry.tuned
    return {
        "entry": entry.entry,
        "rule": entry.workload.rule,
        "attrs": dict(entry.workload.attrs),
        "tags": list(entry.workload.tags),
        "line": entry.workload.line,
        "keys": {action.kind: action.key for action in entry.actions},
        "winner": str(tuned.winner) if tuned else None,
        "run_secs": tuned.run_secs if tuned else None,
        "roofline_share": roofline_share(entry) if tuned and tuned.is_measured else None,
        "unmeasured": entry.is_unmeasured,
        "measured": tuned.coverage if tuned else "",
        "stale": not entry.is_done,
        "failed": failure,
    }
