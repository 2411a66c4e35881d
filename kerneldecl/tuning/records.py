"""Owns the tuning record: what it holds of a search's outcome, and the one place that writes it.

Knows nothing of how candidates were found, built or measured.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kerneldecl.model import SPECIALIZE, Candidate
from kerneldecl.policies.gpu_matmul import tensor_cores
from kerneldecl.serial import trial_to_json
from kerneldecl.store.keys import key, object_key, symbol
from kerneldecl.store.protocol import Store
from kerneldecl.tuning.earlier import is_by_machine, is_open
from kerneldecl.tuning.loop import Outcome
from kerneldecl.tuning.task import Task

_OF_ANY_MEANS = frozenset({SPECIALIZE, "trace", "tvm_default", "library_matmul", "library_conv2d", "library_attention"})
"""Templates whose schedules use tensor cores or not, as others decide."""


class Device(NamedTuple):
    """What is known of the device that has measured a winner."""

    fields: Mapping[str, Any]
    """Fields of the record: provenance, conditions, peaks; none where nothing has measured it."""
    is_here: bool
    """Whether it could measure every candidate now."""


def write_result(store: Store, manifest: str, task: Task, outcome: Outcome, blobs: Mapping[str, str], device: Device) -> None:
    """Keep the record of a search that has a winner: a tune record if the device was here or nothing is wanting, else a rank record.

    What was measured is shared, what was not is this machine's.

    `blobs` names the winner's blobs; `device` is what is known of the device that measured: nothing where none did, so that two
    machines make the same artifact of what is unmeasured.
    """
    result = {**_result(task, outcome), **blobs, "provenance": {}, **device.fields}
    result["build_key"] = object_key(outcome.trials[0].schedule_digest, blobs["object"])
    is_whole = result["measured"] == result["wanted"] and result["error"] is not None
    if is_whole or device.is_here:
        store.write("tune", manifest, result, is_local=task.arch.is_detected)
    else:
        store.forget("rank", key(manifest), is_local=True)  # it may be of fewer measurements
        store.write("rank", manifest, result, is_local=True)


def _result(task: Task, outcome: Outcome) -> dict[str, Any]:
    """Return what a record says of every candidate. The time of a winner that was not measured is the predicted one."""
    winner = outcome.trials[0]
    run_secs = winner.run_secs if winner.samples else winner.predicted_secs
    listed = {proposal.candidate for group in task.groups for proposal in group.proposals}
    others = [trial for trial in task.known.values() if trial.candidate not in listed and trial.candidate.template != SPECIALIZE]
    wanted = [trial for trial in outcome.trials if trial.candidate not in {other.candidate for other in others}]
    return {
        "computation": task.lowered.computation,
        "symbol": symbol(task.lowered.computation),
        "tolerance": task.tolerance,
        "policy": outcome.policy,
        **_idea_of(task, outcome),
        **_tensor_cores(task, winner.candidate),
        "winner": winner.candidate.to_json(),
        "is_measured": bool(winner.samples),
        "measured": sum(not is_open(trial) for trial in wanted),
        "wanted": len(wanted),
        "run_secs": float(f"{run_secs:.4g}"),
        "error": winner.error,
        "tied": outcome.tied,
        # What the machine has failed at is not held against the candidate.
        "trials": [trial_to_json(replace(trial, failure="") if is_by_machine(trial) else trial) for trial in outcome.trials],
    }


def _idea_of(task: Task, outcome: Outcome) -> dict[str, Any]:
    """Return where the winner's configuration comes from that its policy has taken from a record; nothing for others."""
    sources = [group.source_of.get(outcome.trials[0].candidate) for group in task.groups if group.policy == outcome.policy]
    source = next(filter(None, sources), None)
    return {"idea_of": dict(source)} if source else {}


def _tensor_cores(task: Task, winner: Candidate) -> dict[str, str]:
    """Return whether the winner uses a GPU's tensor cores, or why not; nothing where they are out of the question."""
    if not task.arch.gpu or winner.template in _OF_ANY_MEANS:
        return {}
    found = tensor_cores(task.lowered.space, task.arch, winner.template)
    return {"tensor_cores": found} if found else {}


def measured_here(fields: Mapping[str, Any]) -> Device:
    """Return the device that has measured just now, on this machine."""
    return Device({**fields, "provenance": {**_provenance(), **fields.get("provenance", {})}}, is_here=True)


def _provenance() -> dict[str, str]:
    here = os.uname()
    return {"date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"), "host": here.nodename, "kernel": here.release}
