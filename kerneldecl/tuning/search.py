"""Owns the search of one workload: which candidates are proposed, in which order policies are asked, who wins.

Knows nothing of plans, of records, of the store's layout or of where the runner runs things. There is one loop, `search`; what tuning,
recalling and measuring a bundle differ in is how they evaluate candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from kerneldecl.model import SPECIALIZE, Candidate, Proposal, Trial
from kerneldecl.plugins.load import load_module
from kerneldecl.store.protocol import Store
from kerneldecl.tuning.measure import Preparation, known, measure, recall
from kerneldecl.tuning.race import ranking
from kerneldecl.tuning.task import BUILD_SECS, Answers, OnProgress, Runner, Task

DEVICE_FIELDS = ("registers", "smem_bytes", "spill_bytes")
BUILT = ("schedule_digest", "code_digest", "code_bytes", *DEVICE_FIELDS, "is_traceless", "failure")
"""Fields of a trial that a build's answer gives."""
BUILT_AT_ONCE = 4
"""Candidates that are compiled side by side where the first ones may be enough."""

Item = TypeVar("Item")
"""What stands for a candidate before it is evaluated: a proposal, or a trial that was built elsewhere."""


class Group(NamedTuple):
    """The candidates that one policy proposed, built, in its order."""

    policy: str
    built: tuple[Trial, ...]


class Outcome(NamedTuple):
    """What became of a workload's candidates."""

    trials: list[Trial]
    """Winner first. Where there is none, the first has a failure."""
    tied: int
    """How many others noise cannot tell from the winner."""
    policy: str
    """The policy that proposed the winner; empty where there is none."""


def search(
    rounds: Iterable[tuple[str, Sequence[Item]]],
    evaluate: Callable[[Sequence[Item]], list[Trial] | None],
    propose_next: Callable[[str, Sequence[Trial]], Sequence[Item]] = lambda *_: (),
) -> Outcome | None:
    """Evaluate candidates until a policy has one that passes verification; return what became of all.

    `rounds` gives each policy with its first candidates. A policy that searches is asked again with its trials, by `propose_next`,
    until it proposes nothing more. Return None as soon as `evaluate` does: it cannot tell.
    """
    failed: list[Trial] = []
    for policy, first in rounds:
        trials, candidates = list[Trial](), first
        while candidates:
            evaluated = evaluate(candidates)
            if evaluated is None:
                return None
            trials += evaluated
            candidates = propose_next(policy, trials)
        if any(trial.samples for trial in trials):
            return Outcome(*ranking([*trials, *failed]), policy)
        failed += trials
    return Outcome(failed, 0, "")


def tune(
    task: Task,
    runner: Runner,
    store: Store,
    on_progress: OnProgress,
    prefetched: Callable[[], Answers | None] | None = None,
    next_task: Task | None = None,
) -> Outcome:
    """Build and measure candidates until a policy has one that passes verification.

    `prefetched` returns the answers to what `request_first` has requested already, if it has. `next_task` is tuned next.
    """
    pending = prefetched

    def evaluate(proposals: Sequence[Proposal]) -> list[Trial]:
        nonlocal pending
        preparation = Preparation(task, runner, store, next_task)
        if task.arch.gpu:
            preparation.start()  # its compilers take seconds, and so do the references of its large operators
        answers, pending = pending() if pending else None, None
        built = build_all(task, proposals, runner, on_progress, preparation.start_for, answers)
        _keep_libraries(task, [t for t in built if t.code_digest and known(task, t.code_digest, store) is None], runner)
        return measure(task, built, preparation, runner, store, on_progress)

    outcome = search(_first_proposals(task), evaluate, lambda policy, trials: _next_proposals(task, policy, trials))
    assert outcome is not None, "a measurement is never unknown"
    return outcome


def recalled(task: Task, runner: Runner, store: Store, on_progress: OnProgress) -> Outcome | None:
    """Return what `tune` would where measurements of all candidates are known, say after a policy was edited; None where one is missing.

    Candidates are built a few at a time: where nothing is known, `rank` would have built those, too.
    """

    def evaluate(proposals: Sequence[Proposal]) -> list[Trial] | None:
        trials: list[Trial] = []
        for start in range(0, len(proposals), BUILT_AT_ONCE):
            some = recall(task, build_all(task, proposals[start : start + BUILT_AT_ONCE], runner, on_progress), store)
            if some is None:
                return None
            trials += some
        return trials

    return search(_first_proposals(task), evaluate, lambda policy, trials: _next_proposals(task, policy, trials))


def request_first(task: Task, runner: Runner) -> Answers | None:
    """Have built what is proposed first, and return the answers to come; None where nothing is."""
    return next((_requested(task, proposals, runner) for _, proposals in _first_proposals(task)), None)


def groups(task: Task, runner: Runner, on_progress: OnProgress) -> Iterator[Group]:
    """Yield what each policy proposes without knowing any measurement, built; policies that propose nothing are left out."""
    for policy, proposals in _first_proposals(task):
        yield Group(policy, tuple(build_all(task, proposals, runner, on_progress)))


def rank(task: Task, runner: Runner, on_progress: OnProgress) -> Outcome:
    """Choose a winner without measuring: the first in its policy's order that compiles, without spills if there is one.

    Candidates behind the winner are not built.
    """
    failed: list[Trial] = []
    for policy, proposals in _first_proposals(task):
        built: list[Trial] = []
        for start in range(0, len(proposals), BUILT_AT_ONCE):
            built += build_all(task, proposals[start : start + BUILT_AT_ONCE], runner, on_progress)
            if preferred := preferred_first(Group(policy, tuple(built)), is_complete=start + BUILT_AT_ONCE >= len(proposals)):
                return Outcome([*preferred, *failed], 0, policy)
        failed += built
    return Outcome(failed, 0, "")


def preferred_first(group: Group, *, is_complete: bool) -> list[Trial]:
    """Return a group's candidates, first the one to prefer unmeasured; nothing where none compiled, or a better one may come."""
    compiled = [trial for trial in group.built if not trial.failure]
    clean = [trial for trial in compiled if not trial.spill_bytes]
    if not clean and not (compiled and is_complete):
        return []
    winner = (clean or compiled)[0]
    return [winner, *(trial for trial in group.built if trial is not winner)]


def why_no_winner(trials: Sequence[Trial]) -> str:
    """Return why a search without a winner has none, as a sentence."""
    if not trials:
        return "no policy proposes a candidate for it"
    reasons = sorted({trial.failure for trial in trials})
    return f"none of {len(trials)} candidates passed: {'; '.join(reasons[:3])}"


def _first_proposals(task: Task) -> Iterator[tuple[str, tuple[Proposal, ...]]]:
    """Yield each policy that proposes anything, with what it proposes without knowing any measurement.

    The user's custom kernels stand behind what the first one proposes: none of them is linked for want of a measurement.
    """
    custom = _custom_kernels(task)
    for policy in task.policies:
        proposals = load_module("policies", task.root, policy).propose(task.lowered.space, task.arch, task.workload.top_k)
        if proposals:
            yield policy, (*proposals, *custom)
            custom = ()
    if custom:
        yield SPECIALIZE, custom


def _custom_kernels(task: Task) -> tuple[Proposal, ...]:
    """Return the user's custom kernels, each with the time that none can be faster than: no model knows more of them."""
    if not task.variants:
        return ()
    lowered, device = task.lowered, task.arch.device
    least_secs = max(lowered.flops / device.peak_flops_per_s(lowered.space.dtype), lowered.least_bytes / device.dram_bytes_per_s)
    return tuple(Proposal(Candidate.of(SPECIALIZE, {"variant": variant}), least_secs) for variant in range(task.variants))


def _next_proposals(task: Task, policy: str, trials: Sequence[Trial]) -> tuple[Proposal, ...]:
    """Return what a policy that searches proposes next, given its own trials; nothing from one that does not search."""
    if policy == SPECIALIZE:
        return ()
    propose_next = getattr(load_module("policies", task.root, policy), "propose_next", None)
    own = tuple(trial for trial in trials if trial.candidate.template != SPECIALIZE)
    return tuple(propose_next(task.lowered.space, task.arch, task.workload.top_k, own)) if propose_next else ()


def _requested(task: Task, proposals: Sequence[Proposal], runner: Runner) -> Answers:
    return runner.run_all([task.build_request(proposal.candidate) for proposal in proposals], BUILD_SECS, task.priority)


def build_all(
    task: Task,
    proposals: Sequence[Proposal],
    runner: Runner,
    on_progress: OnProgress,
    on_code: Callable[[str], None] | None = None,
    answers: Answers | None = None,
) -> list[Trial]:
    """Return what became of each proposal; `on_code` gets each code digest as it is built, `answers` come to an earlier request."""
    placed: list[Trial | None] = [None] * len(proposals)
    for count, (index, answer) in enumerate(answers or _requested(task, proposals, runner), start=1):
        proposal = proposals[index]
        fields = {name: answer[name] for name in BUILT if name in answer}
        placed[index] = Trial(proposal.candidate, proposal.predicted_secs, **fields)
        if on_code and "code_digest" in fields:
            on_code(fields["code_digest"])
        on_progress("built", count, len(proposals), None)
    return [trial for trial in placed if trial is not None]


def _keep_libraries(task: Task, built: Sequence[Trial], runner: Runner) -> None:
    _rebuild(task, list({t.code_digest: t for t in built if not task.library_path(t.code_digest).exists()}.values()), runner)


def _rebuild(task: Task, trials: Sequence[Trial], runner: Runner) -> None:
    """Compile candidates whose code is known from an earlier build, but whose objects are gone."""
    requests = [task.build_request(trial.candidate, force=True) for trial in trials]
    for _ in runner.run_all(requests, BUILD_SECS, task.priority):
        pass  # one that fails now fails again when it is to be loaded


def keep_objects(task: Task, built: Sequence[Trial], runner: Runner) -> None:
    """Rebuild what has no object in the task's folder, because an earlier build's records spared that."""
    _rebuild(task, [t for t in built if t.code_digest and not task.has_object(t.code_digest)], runner)


def winner_object(task: Task, winner: Trial, runner: Runner) -> bytes:
    """Return the winner's object file, rebuilt if an earlier build's records spared that so far."""
    keep_objects(task, [winner], runner)
    return task.object_path(winner.code_digest).read_bytes()
