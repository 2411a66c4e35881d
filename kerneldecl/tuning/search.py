"""Owns the search of one workload: which candidates are proposed, in which order policies are asked, who wins.

Knows nothing of plans, of records, of the store's layout or of where the runner runs things.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kerneldecl.errors import TuningError
from kerneldecl.model import SPECIALIZE, Candidate, Proposal, Trial
from kerneldecl.runners.process import Answers
from kerneldecl.store.protocol import Store
from kerneldecl.store.results import groups_from_json
from kerneldecl.tuning.budget import Allowance
from kerneldecl.tuning.earlier import is_by_machine, is_settled
from kerneldecl.tuning.loop import Outcome, Round, Steps, ended, search, steps
from kerneldecl.tuning.measure import OF_THE_RULE, Preparation, final, keep, known, measure, recall, verify
from kerneldecl.tuning.race import excluded, ranking
from kerneldecl.tuning.replacements import next_of_the_list, replaces
from kerneldecl.tuning.task import BUILD_SECS, SEARCH_SECS, OnProgress, Runner, Task, batches_of

DEVICE_FIELDS = ("registers", "smem_bytes", "spill_bytes")
BUILT_FIELDS = ("code_digest", "code_bytes", *DEVICE_FIELDS, "is_traceless")
"""Fields of a trial that a build record holds."""
BUILT = ("schedule_digest", *BUILT_FIELDS, "failure")
"""Fields of a trial that a build's answer gives."""
EARLIER = "earlier"
"""Stands for the policy where a candidate of an earlier list wins."""
FINALISTS = 8
"""Candidates of all batches that race once more at the end of a search."""
BUILT_AT_ONCE = 4
"""Candidates that are compiled side by side where the first ones may be enough."""

Evaluate = Callable[[Sequence[Proposal]], list[Trial] | None]


class Built(NamedTuple):
    """The candidates that one policy proposed, built, in its order."""

    policy: str
    built: tuple[Trial, ...]
    turn: int = 0


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
    return ended(tuning(task, runner, store, on_progress, prefetched, next_task))


def tuning(
    task: Task,
    runner: Runner,
    store: Store,
    on_progress: OnProgress,
    prefetched: Callable[[], Answers | None] | None = None,
    next_task: Task | None = None,
) -> Steps[Outcome]:
    """Tune as `tune` does, batch by batch."""
    pending = prefetched
    batches, broken = 0, ""

    def evaluate(proposals: Sequence[Proposal], *, is_second: bool = False) -> list[Trial]:
        nonlocal pending, batches, broken
        batches += not is_second
        preparation = Preparation(task, runner, store, next_task)
        is_first = batches == 1 and not is_second
        defect = broken or (preparation.defect() if is_first and _may_fail(task, runner) else "")
        if defect:
            failed = [Trial(proposal.candidate, proposal.predicted_secs, failure=defect) for proposal in proposals]
            broken = _of_the_rule(failed)
            return failed
        if task.arch.gpu:
            preparation.start()  # its compilers take seconds, and so do the references of its large operators
        answers, pending = pending() if pending else None, None
        built = build_all(task, proposals, runner, on_progress, preparation.start_for, answers)
        _keep_libraries(task, [t for t in built if t.code_digest and known(task, t.code_digest, store) is None], runner)
        trials = measure(task, built, preparation, runner, store, on_progress)
        broken = _of_the_rule(trials)
        on_progress(
            "timed", sum(bool(t.samples) for t in trials), len(trials), min((t.run_secs for t in trials if t.samples), default=None)
        )
        again = {trial.candidate for trial in trials if trial.code_digest and is_by_machine(trial)}  # builds were tried again before
        if not again or is_second:
            return trials
        repeated = evaluate([proposal for proposal in proposals if proposal.candidate in again], is_second=True)
        found = {trial.candidate: trial for trial in repeated}
        return [found.get(trial.candidate, trial) for trial in trials]

    budget = task.workload.budget
    allowance = Allowance(budget, least_secs(task) if budget else 0.0, ended_by=task.ended_by)
    outcome = yield from steps(_rounds(task), _with_known(task, evaluate), _asking_next(task, runner), allowance, _telling(task, runner))
    assert outcome is not None, "a measurement is never unknown"
    outcome = _with_own_code(task, outcome._replace(is_cut=allowance.was_cut), runner)
    in_batches = any(group.searches for group in task.groups) or has_turns(group.turn for group in task.groups)
    in_batches = in_batches or bool(replacements(task, outcome))
    if in_batches and (batches > 1 or (batches and task.known)):
        outcome = after_final(task, outcome, Preparation(task, runner, store), runner, on_progress)
    return _with_verified_winner(task, outcome, runner, store)


def after_final(task: Task, outcome: Outcome, preparation: Preparation, runner: Runner, on_progress: OnProgress) -> Outcome:
    """Return the outcome of a search in several batches after a race of the fastest of all: times of different batches do not compare."""
    fastest = [trial for trial in outcome.trials if trial.samples and trial.error is not None and trial.code_digest]
    fastest = sorted(fastest, key=lambda trial: trial.run_secs)[:FINALISTS]
    if len(fastest) < 2:
        return outcome
    _keep_libraries(task, fastest, runner)
    places = {trial.candidate: place for place, trial in enumerate(outcome.trials)}
    raced = final(task, sorted(fastest, key=lambda trial: places[trial.candidate]), preparation, runner, on_progress)
    first, tied = ranking(raced)
    names = {trial.candidate for trial in raced}
    return outcome.with_trials([*first, *(trial for trial in outcome.trials if trial.candidate not in names)], tied)


def has_turns(turns: Iterable[int]) -> bool:
    """Say whether several items of an entry's list are asked: their candidates are timed in different batches."""
    return len({*turns}) > 1


def _with_own_code(task: Task, outcome: Outcome, runner: Runner) -> Outcome:
    """Return the outcome with a winner whose code is known: one that was timed under other names in its computation is built again.

    A template that looks at names may schedule otherwise now; then the next best comes.
    """
    while outcome.policy and not outcome.trials[0].code_digest:
        winner, *others = outcome.trials
        (built,) = build_all(task, [Proposal(winner.candidate, winner.predicted_secs)], runner, lambda *_: None)
        is_same = built.schedule_digest == winner.schedule_digest
        why = built.failure or f"template {winner.candidate.template} depends on names in the computation, which are others now"
        now = replace(winner, code_digest=built.code_digest) if is_same else excluded(winner, why)
        outcome = outcome.with_trials(*ranking([now, *others]))
    return outcome


def _with_verified_winner(task: Task, outcome: Outcome, runner: Runner, store: Store) -> Outcome:
    """Return the outcome after a verdict on its winner by the reference of now; where that is wrong, the next best comes."""
    while outcome.policy and outcome.trials[0].error is None:
        winner, *others = outcome.trials
        _keep_libraries(task, [winner], runner)
        verdict = verify(task, winner, Preparation(task, runner, store), runner)
        keep(task, verdict, store)  # else an edit of its template asks for a verdict again, of the same code
        outcome = outcome.with_trials(*ranking([verdict, *others]))
    return outcome


def _with_known(task: Task, evaluate: Evaluate) -> Evaluate:
    """Return an evaluation that asks for what earlier searches have not found out, and for nothing else."""

    def evaluated(proposals: Sequence[Proposal]) -> list[Trial] | None:
        unknown = [proposal for proposal in proposals if proposal.candidate not in task.known]
        trials = evaluate(unknown) if unknown else []
        if trials is None:
            return None
        found = {**task.known, **{trial.candidate: trial for trial in trials}}
        return [replace(found[proposal.candidate], predicted_secs=proposal.predicted_secs) for proposal in proposals]

    return evaluated


def recalled(task: Task, runner: Runner, store: Store, on_progress: OnProgress, *, may_know_code: bool) -> Outcome:
    """Return what `tune` would as far as measurements are known; candidates without one have neither samples nor a failure.

    Where the code of candidates may be known (`may_know_code`: a template or a tool was edited), they are built a few at a time, as long
    as any is known. Of a list of which nothing was measured, the best of earlier lists wins.
    """

    def evaluate(proposals: Sequence[Proposal]) -> list[Trial]:
        trials: list[Trial] = []
        for start in range(0, len(proposals) if may_know_code else 0, BUILT_AT_ONCE):
            some = recall(task, build_all(task, proposals[start : start + BUILT_AT_ONCE], runner, on_progress), store)
            trials += some
            if not any(is_settled(trial) for trial in some):
                break
        return [*trials, *(Trial(proposal.candidate, proposal.predicted_secs) for proposal in proposals[len(trials) :])]

    outcome = search(_rounds(task), _with_known(task, evaluate))
    assert outcome is not None, "what is not known is left open"
    if outcome.policy:
        return _with_own_code(task, outcome, runner)
    listed = {trial.candidate for trial in outcome.trials}
    others = [trial for candidate, trial in task.known.items() if candidate not in listed and trial.samples]
    return _with_own_code(task, Outcome(*ranking([*others, *outcome.trials]), EARLIER), runner) if others else outcome


def request_first(task: Task, runner: Runner) -> Answers | None:
    """Have built what is proposed first and not known, and return the answers to come; None where nothing is."""
    if task.workload.budget or task.ended_by or task.has_own_rule:
        return None  # not all of them may be built, or none: its inputs or reference may fail
    first = next((part.first for part in _rounds(task)), ())
    unknown = [proposal for proposal in first if proposal.candidate not in task.known]
    return _requested(task, unknown, runner) if unknown else None


def groups(task: Task, runner: Runner, on_progress: OnProgress, most: int) -> Iterator[Built]:
    """Yield what each policy proposes without knowing any measurement, built: of each turn the first policies that propose anything."""
    taken = Counter[int]()
    for part in _first_proposals(task, runner):
        taken[part.turn] += 1
        if taken[part.turn] > most:
            continue
        yield Built(part.policy, tuple(build_all(task, part.first, runner, on_progress)), part.turn)


def rank(task: Task, runner: Runner, on_progress: OnProgress) -> Outcome:
    """Choose a winner without measuring: the first in its policy's order that compiles, without spills if there is one.

    Candidates behind the winner are not built.
    """
    failed: list[Trial] = []
    for part in _first_proposals(task, runner):
        built: list[Trial] = []
        waiting = part.first
        while waiting:
            built += build_all(task, waiting[:BUILT_AT_ONCE], runner, on_progress)
            waiting = waiting[BUILT_AT_ONCE:]
            preferred = preferred_first(Built(part.policy, tuple(built)), is_complete=False)
            if not (preferred or waiting):
                waiting = next_of_the_list(task, runner, part, built) if part.replaces else ()
                preferred = [] if waiting else preferred_first(Built(part.policy, tuple(built)), is_complete=True)
            if preferred:
                return Outcome([*preferred, *failed], 0, part.policy)
        failed += built
    return Outcome(failed, 0, "")


def preferred_first(group: Built, *, is_complete: bool) -> list[Trial]:
    """Return a group's candidates, first the one to prefer unmeasured; nothing where none compiled, or a better one may come."""
    compiled = [trial for trial in group.built if not trial.failure]
    clean = [trial for trial in compiled if not trial.spill_bytes]
    if not clean and not (compiled and is_complete):
        return []
    winner = (clean or compiled)[0]
    return [winner, *(trial for trial in group.built if trial is not winner)]


def _may_fail(task: Task, runner: Runner) -> bool:
    """Say whether inputs and reference are made before anything is compiled: they come from a file of the user's that has never worked."""
    if batches_of(runner) or not task.has_own_rule:
        return False
    return not (task.has_judged and task.has_judged())


def _of_the_rule(trials: Sequence[Trial]) -> str:
    """Return the failure that the rule's inputs or reference gave each candidate, so that no others are compiled; empty where none did."""
    reasons = {trial.failure for trial in trials}
    reason = next(iter(reasons), "")
    return reason if len(reasons) == 1 and reason.startswith(OF_THE_RULE) and not is_by_machine(trials[0]) else ""


def _rounds(task: Task) -> Iterator[Round]:
    """Yield each policy that proposes or searches anything, with what it proposes without knowing any measurement.

    The user's custom kernels stand behind what the first one proposes: none of them is linked for want of a measurement.
    """
    custom = _custom_kernels(task)
    for group in task.groups:
        allowance = Allowance(group.budget, least_secs(task)) if group.budget else None
        yield Round(group.policy, (*group.proposals, *custom), group.turn, group.searches, allowance, replaces(task, group))
        custom = ()
    if custom:
        yield Round(SPECIALIZE, custom)


def _first_proposals(task: Task, runner: Runner) -> Iterator[Round]:
    """Yield each policy's part with what it proposes without knowing any measurement; a tuner is asked for that."""
    ask = _asking_next(task, runner)
    for part in _rounds(task):
        if first := tuple(part.first or ask(part, (), ())):
            yield part._replace(first=first)


def least_secs(task: Task) -> float:
    """Return the seconds that no kernel of the task can be faster than: its arithmetic or its traffic at the device's peak."""
    lowered, device = task.lowered, task.arch.device
    return max(lowered.flops / device.peak_flops_per_s(lowered.space.dtype), lowered.least_bytes / device.dram_bytes_per_s)


def _custom_kernels(task: Task) -> tuple[Proposal, ...]:
    """Return the user's custom kernels, each with the time that none can be faster than: no model knows more of them."""
    if not task.variants:
        return ()
    least = least_secs(task)
    return tuple(Proposal(Candidate.of(SPECIALIZE, {"variant": variant}), least) for variant in range(task.variants))


def _asking_next(task: Task, runner: Runner) -> Callable[[Round, Sequence[Trial], Sequence[Trial]], Sequence[Proposal]]:
    """Return what asks a policy that searches for more, given others' trials and its own; it gets nothing from one that does not."""
    options = {group.policy: group.options for group in task.groups}

    def next_proposals(part: Round, others: Sequence[Trial], trials: Sequence[Trial]) -> tuple[Proposal, ...]:
        if part.replaces:
            return next_of_the_list(task, runner, part, trials)
        if not part.searches:
            return ()
        seen = [*others, *trials] if options[part.policy] else trials
        own = [trial for trial in seen if trial.candidate.template != SPECIALIZE]
        answer = runner.measure(task.next_request(part.policy, options[part.policy], own), SEARCH_SECS)
        if "failure" in answer:
            raise TuningError(f"{task.workload.entry}: {answer['failure']}")
        return tuple(proposal for group in groups_from_json(answer) for proposal in group.proposals)

    return next_proposals


def replacements(task: Task, outcome: Outcome) -> list[Candidate]:
    """Return the candidates that stand in no list of the task, because they replace others that cannot be built."""
    replacing = {part.policy: {proposal.candidate for proposal in part.first} for part in _rounds(task) if part.replaces}
    by = {trial.candidate: outcome.proposed_by.get(trial.candidate, outcome.policy) for trial in outcome.trials}
    return [candidate for candidate, policy in by.items() if policy in replacing and candidate not in replacing[policy]]


def _telling(task: Task, runner: Runner) -> Callable[[Round, Sequence[Trial], Sequence[Trial]], None]:
    """Return what tells a tuner how its search has ended: it may keep what was measured."""
    options = {group.policy: group.options for group in task.groups}

    def tell(part: Round, others: Sequence[Trial], trials: Sequence[Trial]) -> None:
        if part.searches and options.get(part.policy) and trials:
            request = task.next_request(part.policy, options[part.policy], [*others, *trials])
            runner.measure({**request, "is_over": True}, SEARCH_SECS)

    return tell


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


def winner_object(task: Task, winner: Trial, runner: Runner) -> bytes | str:
    """Return the winner's object file, rebuilt if an earlier build's records spared that so far; or why there is none."""
    keep_objects(task, [winner], runner)
    if task.has_object(winner.code_digest):
        return task.object_path(winner.code_digest).read_bytes()
    # Records say what a schedule compiles to; another build of the same release of a compiler may make other code of it.
    return f"{winner.candidate} compiles to other code here than where it was measured: build it where its device is"
