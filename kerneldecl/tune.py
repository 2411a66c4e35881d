"""Owns tuning of one workload: propose, build, verify, race, and the record that is left.

Knows nothing of plans, of the store's layout or of where the runner runs things.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kerneldecl.key import key, measure_manifest
from kerneldecl.model import Arch, Candidate, Measurement, Proposal, Workload
from kerneldecl.plugins import load_policy
from kerneldecl.race import race, ranking
from kerneldecl.runners.process import Answer
from kerneldecl.serial import space_from_json, to_json
from kerneldecl.stores.local import LocalStore, Record

DEVICE_FIELDS = ("registers", "smem_bytes", "spill_bytes")
BUILT = ("scheduled", "code", "code_bytes", *DEVICE_FIELDS, "failure")
"""What a build's answer tells of a candidate: fields of a `Measurement`."""
RANKED_AT_ONCE = 4
"""Candidates that are compiled side by side in search of one that does not spill."""
BUILD_SECS = 60.0
PREPARE_SECS = 120.0
VERIFY_SECS = 20.0
"""Limits for one request; a candidate that takes longer has failed."""


class Runner(Protocol):
    """Runs requests in processes of their own."""

    def run_all(self, requests: Sequence[Mapping[str, Any]], limit_secs: float) -> Iterator[tuple[int, Answer]]:
        """Yield (position, answer) as requests are answered, several at a time."""
        ...

    def measure(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        """Return the answer of the one process that measures."""
        ...


@dataclass(frozen=True)
class Task:
    """One workload to be tuned, with what planning found out about it."""

    root: Path
    workload: Workload
    arch: Arch
    policies: tuple[str, ...]
    lowered: Mapping[str, Any]
    tolerance: float
    protocol: Mapping[str, Any]
    toolchain: Mapping[str, str]
    folder: Path
    """Where objects and libraries of candidates go until the winner is known."""

    @property
    def case(self) -> dict[str, Any]:
        """Return what a worker needs to know of the workload to lower it and to make its inputs."""
        names = {"root": str(self.root), "rule": self.workload.rule, "attrs": dict(self.workload.attrs)}
        return {**names, "computation": self.lowered["computation"]}

    def build_request(self, candidate: Candidate, *, afresh: bool = False) -> dict[str, Any]:
        where = {"arch": to_json(self.arch), "toolchain": dict(self.toolchain), "folder": str(self.folder)}
        return {"do": "build", "case": self.case, "candidate": candidate.to_json(), **where, "afresh": afresh}

    def describe_request(self, candidate: Candidate) -> dict[str, Any]:
        return {"do": "describe", "case": self.case, "candidate": candidate.to_json(), "arch": to_json(self.arch)}

    def object_path(self, code: str) -> Path:
        return self.folder / f"{code}.o"

    def library_path(self, code: str) -> Path:
        return self.folder / f"{code}.so"

    def has_object(self, code: str) -> bool:
        return self.object_path(code).exists()


Step = Callable[[str, int, int, float | None], None]
"""Hears of progress: what is going on, how many candidates of how many, best seconds so far."""


class Group(NamedTuple):
    """The candidates that one policy proposed, built, in its order."""

    policy: str
    built: tuple[Measurement, ...]


class Outcome(NamedTuple):
    """What became of a workload's candidates."""

    measurements: list[Measurement]
    """Winner first. Where there is none, the first has a failure."""
    tied: int
    """How many others noise cannot tell from the winner."""
    policy: str
    """That proposed the winner; empty where there is none."""


def tune(task: Task, runner: Runner, store: LocalStore, step: Step, ahead: Group | None = None) -> Outcome:
    """Build and measure candidates until a policy has one that passes verification.

    Policies are asked in turn. A policy is asked again with what was measured until it has nothing more to propose.
    `ahead` is what `next(groups(…))` has built already.
    """
    failed: list[Measurement] = []
    for policy in task.policies:
        measured: list[Measurement] = []
        while proposals := _proposals(task, policy, measured):
            is_ahead = ahead is not None and ahead.policy == policy and not measured
            built = list(ahead.built) if ahead and is_ahead else build_all(task, proposals, runner, step)
            measured += measure(task, built, runner, store, step)
        if any(m.samples for m in measured):
            return Outcome(*ranking([*measured, *failed]), policy)
        failed += measured
    return Outcome(failed, 0, "")


def groups(task: Task, runner: Runner, step: Step) -> Iterator[Group]:
    """Yield what each policy proposes without knowing any measurement, built; policies that propose nothing are left out."""
    for policy in task.policies:
        if proposals := _proposals(task, policy, ()):
            yield Group(policy, tuple(build_all(task, proposals, runner, step)))


def rank(task: Task, runner: Runner, step: Step) -> Outcome:
    """Choose a winner without measuring: the first in its policy's order that compiles, without spills if there is one.

    Candidates behind the winner are not built.
    """
    failed: list[Measurement] = []
    for policy in task.policies:
        proposals = _proposals(task, policy, ())
        built: list[Measurement] = []
        for start in range(0, len(proposals), RANKED_AT_ONCE):
            built += build_all(task, proposals[start : start + RANKED_AT_ONCE], runner, step)
            if outcome := chosen(Group(policy, tuple(built)), is_complete=start + RANKED_AT_ONCE >= len(proposals)):
                return Outcome([*outcome, *failed], 0, policy)
        failed += built
    return Outcome(failed, 0, "")


def chosen(group: Group, *, is_complete: bool) -> list[Measurement]:
    """Return a group's candidates, first the one to prefer unmeasured; nothing where none compiled, or a better one may come."""
    compiled = [m for m in group.built if not m.failure]
    clean = [m for m in compiled if not m.spill_bytes]
    if not clean and not (compiled and is_complete):
        return []
    winner = (clean or compiled)[0]
    return [winner, *(m for m in group.built if m is not winner)]


def _proposals(task: Task, policy: str, measured: Sequence[Measurement]) -> tuple[Proposal, ...]:
    space = space_from_json(task.lowered["space"])
    return tuple(load_policy(task.root, policy).propose(space, task.arch, task.workload.top_k, tuple(measured)))


def measure(task: Task, built: Sequence[Measurement], runner: Runner, store: LocalStore, step: Step) -> list[Measurement]:
    """Verify and time what was built, as far as no earlier run has measured the same code; return all, in their order."""
    known = {m.code: _known(task, m.code, store) for m in built if m.code}
    fresh = {m.code: m for m in reversed(built) if m.code and known[m.code] is None}
    _build_afresh(task, [m for m in fresh.values() if not task.library_path(m.code).exists()], runner)
    done = {m.code: m for m in _timed(task, list(fresh.values()), runner, step)}
    for measurement in done.values():
        _keep(task, measurement, store)
    return [_with_result(m, done.get(m.code) or known.get(m.code)) for m in built]


def _with_result(built: Measurement, result: Measurement | None) -> Measurement:
    return replace(built, error=result.error, samples=result.samples, failure=result.failure) if result else built


def build_all(task: Task, proposals: Sequence[Proposal], runner: Runner, step: Step) -> list[Measurement]:
    """Return each proposal's digests or failure, in their order; nothing is run."""
    requests = [task.build_request(proposal.candidate) for proposal in proposals]
    placed: list[Measurement | None] = [None] * len(proposals)
    for count, (index, answer) in enumerate(runner.run_all(requests, BUILD_SECS), start=1):
        proposal = proposals[index]
        fields = {name: answer[name] for name in BUILT if name in answer}
        placed[index] = Measurement(proposal.candidate, proposal.predicted_secs, **fields)
        step("built", count, len(proposals), None)
    return [measurement for measurement in placed if measurement is not None]


def _build_afresh(task: Task, known: Sequence[Measurement], runner: Runner) -> None:
    """Compile candidates whose code is known from an earlier build, but whose objects are gone."""
    requests = [task.build_request(measurement.candidate, afresh=True) for measurement in known]
    for _ in runner.run_all(requests, BUILD_SECS):
        pass  # one that fails now fails again when it is to be loaded


def keep_objects(task: Task, built: Sequence[Measurement], runner: Runner) -> None:
    """Compile again what has no object in the task's folder, because an earlier build's records spared that."""
    _build_afresh(task, [m for m in built if m.code and not task.has_object(m.code)], runner)


def winner_object(task: Task, winner: Measurement, runner: Runner) -> bytes:
    """Return the winner's object file, compiled again if an earlier build's records spared that so far."""
    keep_objects(task, [winner], runner)
    return task.object_path(winner.code).read_bytes()


def _timed(task: Task, built: Sequence[Measurement], runner: Runner, step: Step) -> list[Measurement]:
    """Verify each, race those that passed; return all."""
    if not built:
        return []
    case = {**task.case, "seed": task.protocol["seed"]}
    answer = runner.measure({"do": "prepare", "case": case}, PREPARE_SECS)
    if "failure" in answer:
        return [replace(m, failure=f"inputs or reference: {answer['failure']}") for m in built]
    passed: list[tuple[Measurement, float]] = []
    failed: list[Measurement] = []
    best: float | None = None
    for count, measurement in enumerate(built, start=1):
        verdict, secs = _verified(task, measurement, case, runner)
        if verdict.failure:
            failed.append(verdict)
            # Its process may have died with it: what the next one needs is made again within its own limit.
            runner.measure({"do": "prepare", "case": case}, PREPARE_SECS)
        else:
            passed.append((verdict, secs))
            best = min(secs, best or secs)
        step("verified", count, len(built), best)

    def sample(measurement: Measurement, calls: int) -> list[float] | str:
        request = {"do": "sample", "case": case, "calls": calls, "samples": 1, **_kernel(task, measurement)}
        got = runner.measure(request, PREPARE_SECS)
        return str(got["failure"]) if "failure" in got else [float(f"{secs:.4g}") for secs in got["samples"]]

    step("racing", len(passed), len(built), best)
    return [*race(passed, sample), *failed]


def _verified(task: Task, measurement: Measurement, case: Mapping[str, Any], runner: Runner) -> tuple[Measurement, float]:
    answer = runner.measure({"do": "verify", "case": case, **_kernel(task, measurement)}, VERIFY_SECS)
    if "failure" in answer:
        return replace(measurement, failure=answer["failure"]), 0.0
    # JSON holds no infinity, which is the error of a NaN.
    error = min(float(f"{answer['error']:.3g}"), sys.float_info.max)
    if not error <= task.tolerance:
        return replace(measurement, error=error, failure=f"wrong: relative error {error:.3g} over {task.tolerance:g}"), 0.0
    return replace(measurement, error=error), answer["secs"]


def _kernel(task: Task, measurement: Measurement) -> dict[str, str]:
    return {"library": str(task.library_path(measurement.code)), "symbol": f"kd_{task.lowered['computation'][:20]}"}


def _manifest(task: Task, code: str) -> str:
    return measure_manifest(code, task.arch, {**task.protocol, "tolerance": task.tolerance, "generation": task.workload.generation})


def _known(task: Task, code: str, store: LocalStore) -> Measurement | None:
    """Return what an earlier run measured of the same code under the same protocol."""
    found = store.read("measure", key(_manifest(task, code)), is_local=task.arch.is_detected)
    if not isinstance(found, Record):
        return None
    result = found.result
    return Measurement(
        Candidate("", ()), 0.0, code=code, error=result["error"], samples=tuple(result["samples"]), failure=result["failure"]
    )


def _keep(task: Task, measurement: Measurement, store: LocalStore) -> None:
    # A candidate that crashed or hung may have met a busy machine: only verdicts and timings are kept.
    if measurement.error is None:
        return
    result = {"error": measurement.error, "samples": list(measurement.samples), "failure": measurement.failure}
    store.write("measure", _manifest(task, measurement.code), result, is_local=task.arch.is_detected)


def ceilings(runner: Runner) -> dict[str, float]:
    """Return what the machine reaches just now, to judge the figures by; empty where it cannot be found out."""
    answer = runner.measure({"do": "ceilings"}, PREPARE_SECS)
    return {name: float(f"{value:.3g}") for name, value in answer.items() if isinstance(value, float)}


def record_result(task: Task, outcome: Outcome, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record's content: every candidate, winner first; `found` is what else is known of the winner.

    The time of a winner that was not measured is the one that its policy expects.
    """
    winner = outcome.measurements[0]
    run_secs = winner.run_secs if winner.samples else winner.predicted_secs
    return {
        "computation": task.lowered["computation"],
        "symbol": f"kd_{task.lowered['computation'][:20]}",
        "tolerance": task.tolerance,
        "policy": outcome.policy,
        "winner": winner.candidate.to_json(),
        "is_measured": bool(winner.samples),
        "run_secs": float(f"{run_secs:.4g}"),
        "error": winner.error,
        "tied": outcome.tied,
        **found,
        "measurements": [measurement_json(m) for m in outcome.measurements],
        "provenance": {
            "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
            "host": os.uname().nodename,
            "kernel": os.uname().release,
        },
    }


def measurement_json(measurement: Measurement) -> dict[str, Any]:
    fields = {
        **to_json(measurement),
        "candidate": measurement.candidate.to_json(),
        "predicted_secs": float(f"{measurement.predicted_secs:.4g}"),
    }
    return {name: value for name, value in fields.items() if value not in ("", (), None) and (value or name not in DEVICE_FIELDS)}


def measurement_from_json(json: Mapping[str, Any]) -> Measurement:
    """Read what `record_result` wrote of one candidate."""
    fields = {**json, "candidate": Candidate.from_json(json["candidate"]), "samples": tuple(json.get("samples", ()))}
    return Measurement(**fields)
