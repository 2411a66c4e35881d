"""Owns tuning of one workload: which candidates are proposed, built and measured, who wins, and the record that is left.

Knows nothing of plans, of the store's layout or of where the runner runs things.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kerneldecl.model import SPECIALIZE, Candidate, Proposal, Trial
from kerneldecl.plugins.load import load_module
from kerneldecl.policies.gpu_matmul import tensor_cores
from kerneldecl.serial import space_from_json, to_json
from kerneldecl.store.local import LocalStore
from kerneldecl.tuning.measure import Preparation, known, measure, recall
from kerneldecl.tuning.race import ranking
from kerneldecl.tuning.task import BUILD_SECS, Answers, Runner, Step, Task

DEVICE_FIELDS = ("registers", "smem_bytes", "spill_bytes")
BUILT = ("scheduled", "code", "code_bytes", *DEVICE_FIELDS, "is_specialised", "failure")
"""What a build's answer tells of a candidate: fields of a `Trial`."""
BUILT_AT_ONCE = 4
"""Candidates that are compiled side by side where the first ones may be enough."""


class Group(NamedTuple):
    """The candidates that one policy proposed, built, in its order."""

    policy: str
    built: tuple[Trial, ...]


class Outcome(NamedTuple):
    """What became of a workload's candidates."""

    measurements: list[Trial]
    """Winner first. Where there is none, the first has a failure."""
    tied: int
    """How many others noise cannot tell from the winner."""
    policy: str
    """That proposed the winner; empty where there is none."""


def tune(
    task: Task,
    runner: Runner,
    store: LocalStore,
    step: Step,
    ahead: Callable[[], Answers | None] | None = None,
    following: Task | None = None,
) -> Outcome:
    """Build and measure candidates until a policy has one that passes verification.

    Policies are asked in turn. A policy is asked again with what was measured until it has nothing more to propose.
    `ahead` returns what `ask_first` has asked already, if it has. `following` is tuned next.
    """
    failed: list[Trial] = []
    for policy, first in _first_proposals(task):
        proposals, measured = first, list[Trial]()
        while proposals:
            preparation = Preparation(task, runner, store, following)
            if task.arch.gpu:
                preparation.start()  # its compilers take seconds, and so do the references of its large operators
            answers, ahead = ahead() if ahead else None, None
            built = build_all(task, proposals, runner, step, preparation.start_for, answers)
            _keep_libraries(task, [m for m in built if m.code and known(task, m.code, store) is None], runner)
            measured += measure(task, built, preparation, runner, store, step)
            proposals = _proposals(task, policy, measured)
        if any(m.samples for m in measured):
            return Outcome(*ranking([*measured, *failed]), policy)
        failed += measured
    return Outcome(failed, 0, "")


def recalled(task: Task, runner: Runner, store: LocalStore, step: Step) -> Outcome | None:
    """Return what `tune` would where measurements of all candidates are known, say after a policy was edited; None where one is missing.

    Candidates are built a few at a time: where nothing is known, `rank` would have built those, too.
    """
    failed: list[Trial] = []
    for policy, first in _first_proposals(task):
        proposals, measured = first, list[Trial]()
        while proposals:
            for start in range(0, len(proposals), BUILT_AT_ONCE):
                some = recall(task, build_all(task, proposals[start : start + BUILT_AT_ONCE], runner, step), store)
                if some is None:
                    return None
                measured += some
            proposals = _proposals(task, policy, measured)
        if any(m.samples for m in measured):
            return Outcome(*ranking([*measured, *failed]), policy)
        failed += measured
    return None


def ask_first(task: Task, runner: Runner) -> Answers | None:
    """Have built what is proposed first, and return the answers to come; None where nothing is."""
    return next((_asked(task, proposals, runner) for _, proposals in _first_proposals(task)), None)


def groups(task: Task, runner: Runner, step: Step) -> Iterator[Group]:
    """Yield what each policy proposes without knowing any measurement, built; policies that propose nothing are left out."""
    for policy, proposals in _first_proposals(task):
        yield Group(policy, tuple(build_all(task, proposals, runner, step)))


def rank(task: Task, runner: Runner, step: Step) -> Outcome:
    """Choose a winner without measuring: the first in its policy's order that compiles, without spills if there is one.

    Candidates behind the winner are not built.
    """
    failed: list[Trial] = []
    for policy, proposals in _first_proposals(task):
        built: list[Trial] = []
        for start in range(0, len(proposals), BUILT_AT_ONCE):
            built += build_all(task, proposals[start : start + BUILT_AT_ONCE], runner, step)
            if outcome := chosen(Group(policy, tuple(built)), is_complete=start + BUILT_AT_ONCE >= len(proposals)):
                return Outcome([*outcome, *failed], 0, policy)
        failed += built
    return Outcome(failed, 0, "")


def chosen(group: Group, *, is_complete: bool) -> list[Trial]:
    """Return a group's candidates, first the one to prefer unmeasured; nothing where none compiled, or a better one may come."""
    compiled = [m for m in group.built if not m.failure]
    clean = [m for m in compiled if not m.spill_bytes]
    if not clean and not (compiled and is_complete):
        return []
    winner = (clean or compiled)[0]
    return [winner, *(m for m in group.built if m is not winner)]


def _first_proposals(task: Task) -> Iterator[tuple[str, tuple[Proposal, ...]]]:
    """Yield each policy that proposes anything, with what it proposes without knowing any measurement.

    Functions of the user's own stand behind what the first one proposes: none of them is linked for want of a measurement.
    """
    own = _own_proposals(task)
    for policy in task.policies:
        if proposals := _proposals(task, policy, ()):
            yield policy, (*proposals, *own)
            own = ()
    if own:
        yield SPECIALIZE, own


def _own_proposals(task: Task) -> tuple[Proposal, ...]:
    """Return the user's own functions, each with the time that none can be faster than: no model knows more of them."""
    if not task.variants:
        return ()
    dtype, device = space_from_json(task.lowered["space"]).dtype, task.arch.device
    least_secs = max(task.lowered["flops"] / device.peak_flops_per_s(dtype), task.lowered["least_bytes"] / device.dram_bytes_per_s)
    return tuple(Proposal(Candidate.of(SPECIALIZE, {"variant": variant}), least_secs) for variant in range(task.variants))


def _proposals(task: Task, policy: str, measured: Sequence[Trial]) -> tuple[Proposal, ...]:
    if policy == SPECIALIZE:
        return ()
    space, told = space_from_json(task.lowered["space"]), tuple(m for m in measured if m.candidate.template != SPECIALIZE)
    return tuple(load_module("policies", task.root, policy).propose(space, task.arch, task.workload.top_k, told))


def _asked(task: Task, proposals: Sequence[Proposal], runner: Runner) -> Answers:
    return runner.run_all([task.build_request(proposal.candidate) for proposal in proposals], BUILD_SECS, task.turn)


def build_all(
    task: Task,
    proposals: Sequence[Proposal],
    runner: Runner,
    step: Step,
    seen: Callable[[str], None] | None = None,
    answers: Answers | None = None,
) -> list[Trial]:
    """Return what became of each proposal; `seen` hears of each code as it is built, `answers` come to what was asked before."""
    placed: list[Trial | None] = [None] * len(proposals)
    for count, (index, answer) in enumerate(answers or _asked(task, proposals, runner), start=1):
        proposal = proposals[index]
        fields = {name: answer[name] for name in BUILT if name in answer}
        placed[index] = Trial(proposal.candidate, proposal.predicted_secs, **fields)
        if seen and "code" in fields:
            seen(fields["code"])
        step("built", count, len(proposals), None)
    return [measurement for measurement in placed if measurement is not None]


def _keep_libraries(task: Task, built: Sequence[Trial], runner: Runner) -> None:
    _build_afresh(task, list({m.code: m for m in built if not task.library_path(m.code).exists()}.values()), runner)


def _build_afresh(task: Task, known: Sequence[Trial], runner: Runner) -> None:
    """Compile candidates whose code is known from an earlier build, but whose objects are gone."""
    requests = [task.build_request(measurement.candidate, afresh=True) for measurement in known]
    for _ in runner.run_all(requests, BUILD_SECS, task.turn):
        pass  # one that fails now fails again when it is to be loaded


def keep_objects(task: Task, built: Sequence[Trial], runner: Runner) -> None:
    """Compile again what has no object in the task's folder, because an earlier build's records spared that."""
    _build_afresh(task, [m for m in built if m.code and not task.has_object(m.code)], runner)


def winner_object(task: Task, winner: Trial, runner: Runner) -> bytes:
    """Return the winner's object file, compiled again if an earlier build's records spared that so far."""
    keep_objects(task, [winner], runner)
    return task.object_path(winner.code).read_bytes()


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
        **_tensor_cores(task, winner.candidate),
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
            **found.get("provenance", {}),
        },
    }


def _tensor_cores(task: Task, winner: Candidate) -> dict[str, str]:
    """Return what the record tells of a GPU's tensor cores; nothing where they are out of the question."""
    if not task.arch.gpu or winner.template == SPECIALIZE:
        return {}
    told = tensor_cores(space_from_json(task.lowered["space"]), task.arch, winner.template)
    return {"tensor_cores": told} if told else {}


def measurement_json(measurement: Trial) -> dict[str, Any]:
    fields = {
        **to_json(measurement),
        "candidate": measurement.candidate.to_json(),
        "predicted_secs": float(f"{measurement.predicted_secs:.4g}"),
    }
    optional = (*DEVICE_FIELDS, "is_specialised")
    return {name: value for name, value in fields.items() if value not in ("", (), None) and (value or name not in optional)}


def measurement_from_json(json: Mapping[str, Any]) -> Trial:
    """Read what `record_result` wrote of one candidate."""
    fields = {**json, "candidate": Candidate.from_json(json["candidate"]), "samples": tuple(json.get("samples", ()))}
    return Trial(**fields)
