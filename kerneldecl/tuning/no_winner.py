"""Owns the sentence that says why a search has no winner.

Knows nothing of how candidates were proposed, built or measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from kerneldecl.model import Trial
from kerneldecl.store.results import Group
from kerneldecl.tuning.measure import OF_THE_RULE

_SAME_ERROR = 1e-3
"""Share by which the errors of candidates differ that all compute the same."""


def why_no_winner(trials: Sequence[Trial], groups: Sequence[Group] = ()) -> str:
    """Return why a search without a winner has none, as a sentence; `groups` are what policies have proposed."""
    if not trials and any(group.count for group in groups):
        return "its budget was spent before a candidate was measured; give it more `seconds`, or none"
    if not trials:
        return "no policy proposes a candidate for it"
    reasons = sorted({trial.failure for trial in trials})
    if len(reasons) == 1 and reasons[0].startswith(OF_THE_RULE):
        return reasons[0]
    doubt = "; all candidates agree with each other and not with the reference: is reference() right?" if _agree(trials) else ""
    return f"none of {len(trials)} candidates passed: {'; '.join(reasons[:3])}{doubt}"


def _agree(trials: Sequence[Trial]) -> bool:
    """Say whether all candidates that ran are wrong by the same, which is no mistake of a schedule."""
    errors = [trial.error for trial in trials if trial.error]
    return len(errors) > 1 and len(errors) == len(trials) and max(errors) - min(errors) <= _SAME_ERROR * max(errors)
