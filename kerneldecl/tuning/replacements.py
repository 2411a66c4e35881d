"""Owns the candidates that replace those of a policy's list that cannot be built.

Knows nothing of how candidates are built, or of how a search goes on with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kerneldecl.errors import TuningError
from kerneldecl.model import SPECIALIZE, Proposal, Trial
from kerneldecl.store.results import Group, groups_from_json
from kerneldecl.tuning.earlier import is_by_machine
from kerneldecl.tuning.loop import Round
from kerneldecl.tuning.measure import OF_THE_RULE
from kerneldecl.tuning.task import PROPOSE_SECS, Runner, Task

REPLACED_MOST = 16
"""Candidates at most that replace those of one policy that cannot be built: more would fail for the same reason."""


def replaces(task: Task, group: Group) -> bool:
    """Say whether a group is the beginning of its policy's list: tuners list all they have at once, or search, and have no next."""
    return task.has_spares and not group.searches and group.policy not in task.tuners


def next_of_the_list(task: Task, runner: Runner, part: Round, trials: Sequence[Trial]) -> tuple[Proposal, ...]:
    """Return the next candidates of a policy's order in place of those that cannot be built; nothing where it has listed all it has."""
    seen = [trial for trial in trials if trial.candidate.template != SPECIALIZE]
    wanted = sum(proposal.candidate.template != SPECIALIZE for proposal in part.first)
    missing = wanted - sum(not is_unbuilt(trial) for trial in seen)
    upto = min(len(seen) + missing, wanted + REPLACED_MOST)
    if wanted < task.workload.top_k or upto <= len(seen):
        return ()
    answer = runner.measure(task.more_request(part.policy, upto), PROPOSE_SECS)
    if "failure" in answer:
        raise TuningError(f"{task.workload.entry}: {answer['failure']}")
    known = {trial.candidate for trial in seen}
    longer = [proposal for group in groups_from_json(answer) for proposal in group.proposals]
    return tuple(proposal for proposal in longer if proposal.candidate not in known)[: upto - len(seen)]


def is_unbuilt(trial: Trial) -> bool:
    """Say whether a candidate cannot be built, which neither the machine nor the rule is to blame for."""
    return bool(trial.failure) and not (trial.code_digest or is_by_machine(trial) or trial.failure.startswith(OF_THE_RULE))
