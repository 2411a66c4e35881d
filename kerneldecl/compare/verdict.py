"""Owns the comparison of two times of one entry, and what a gate makes of it.

Knows nothing of where the times come from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kerneldecl.store.keys import changed_lines
from kerneldecl.timing import Timings, median

BUDGET = 0.02
"""Slowdown that a gate lets pass by default."""
_Z = 4.0
"""Standard errors that noise alone does not reach: once in 30 000 comparisons."""
_BETWEEN_RUNS = 0.005
"""What two measurements of one kernel differ by besides their noise. Two machines differ by more: see `tuning.race.NOISE`."""
_UNKNOWN_NOISE = 0.01
"""Standard error of a time whose samples are not known."""


class Verdict(StrEnum):
    """What became of an entry."""

    SAME = "SAME"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    UNSURE = "UNSURE"
    """It was measured so noisily that the budget is less than the noise."""
    NEW = "NEW"
    MISSING = "MISSING"
    UNVERIFIED = "UNVERIFIED"
    """Nobody has measured it, or it does not agree with its reference of now."""


FAILING = frozenset({Verdict.SLOWER, Verdict.MISSING, Verdict.UNVERIFIED})


@dataclass(frozen=True)
class Measured:
    """An entry as an artifact or a lock has it."""

    name: str
    """Entry and target."""
    key: str
    winner: str
    run_secs: float | None
    """Median seconds of one call; None where nobody has measured it."""
    is_verified: bool
    code: str = ""
    """Digest of the object file; empty where it is not known."""
    samples: tuple[float, ...] = ()
    """Seconds of single samples; empty where its record is not known."""
    timing: str = ""
    """The protocol that `run_secs` and `samples` are of (`kerneldecl.timing`); empty where its record is not known."""
    timings: Timings = ()
    """Samples under the other protocols, as far as its record has them."""
    manifest: str = ""
    """What its tuning depends on; empty where its record is not known."""


@dataclass(frozen=True)
class Comparison:
    """One entry on both sides."""

    name: str
    before: Measured | None
    after: Measured | None
    verdict: Verdict
    change: float | None
    """Relative change of time, above 0 where it is slower; None without two times."""
    uncertainty: float | None
    """Relative change that noise alone can make."""
    reason: str
    """What of the entry is not as it was."""
    otherwise: tuple[tuple[str, float], ...] = ()
    """Relative change of time by each protocol that the verdict is not by and both sides were timed under."""

    @property
    def fails(self) -> bool:
        return self.verdict in FAILING


def compare(before: Mapping[str, Measured], after: Mapping[str, Measured], budget: float = BUDGET) -> list[Comparison]:
    """Return all entries of both sides by name; a slowdown within the budget passes."""
    return [_compared(name, before.get(name), after.get(name), budget) for name in sorted({*before, *after})]


def _compared(name: str, before: Measured | None, after: Measured | None, budget: float) -> Comparison:
    if after is None:
        return Comparison(name, before, after, Verdict.MISSING, None, None, "")
    if before is None:
        verdict = Verdict.NEW if after.is_verified else Verdict.UNVERIFIED
        return Comparison(name, before, after, verdict, None, None, "")
    change, noise = _change(before, after)
    verdict = Verdict.UNVERIFIED if not after.is_verified else Verdict.UNSURE if change is None else judge(change, noise, budget)
    known = noise if change is not None else None
    return Comparison(name, before, after, verdict, change, known, why_changed(before, after), tuple(_otherwise(before, after)))


def judge(change: float, noise: float, budget: float) -> Verdict:
    """Return what a relative change of time means, given what noise alone can make."""
    limit = max(budget, noise)
    if change > limit:
        return Verdict.SLOWER
    if 1 / (1 + change) - 1 > limit:
        return Verdict.FASTER
    return Verdict.SAME if noise <= budget else Verdict.UNSURE


def _change(before: Measured, after: Measured) -> tuple[float | None, float]:
    """Return the relative change of time, and what noise alone can make of it."""
    if before.run_secs is None or after.run_secs is None:
        return None, 0.0
    if (before.samples, before.run_secs, before.code) == (after.samples, after.run_secs, after.code):
        return 0.0, 0.0  # one and the same measurement
    if before.timing and after.timing and before.timing != after.timing:
        # Another protocol has chosen it: its time is no time to compare with.
        same = dict(before.timings).get(after.timing)
        if not same or not median(same) > 0:
            return None, 0.0
        return _change(replace(before, run_secs=median(same), samples=same, timing=after.timing), after)
    return after.run_secs / before.run_secs - 1, noise_of(before.samples, after.samples)


def noise_of(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the relative change that noise alone can make between two medians of these samples."""
    return _BETWEEN_RUNS + _Z * math.hypot(standard_error(before), standard_error(after))


def _otherwise(before: Measured, after: Measured) -> Iterator[tuple[str, float]]:
    old, new = ({**dict(side.timings), **({side.timing: side.samples} if side.timing else {})} for side in (before, after))
    for protocol in sorted((old.keys() & new.keys()) - {after.timing}):
        if old[protocol] and new[protocol] and median(old[protocol]) > 0:
            yield protocol, median(new[protocol]) / median(old[protocol]) - 1


def standard_error(samples: Sequence[float]) -> float:
    """Return the relative standard error of a median: 1.253 sigma / sqrt(n), with sigma from the median absolute deviation."""
    if len(samples) < 3:
        return _UNKNOWN_NOISE
    middle = median(samples)
    sigma = 1.4826 * median([abs(sample - middle) for sample in samples])
    return 1.253 * sigma / middle / math.sqrt(len(samples)) if middle > 0 else _UNKNOWN_NOISE


def why_changed(before: Measured, after: Measured) -> str:
    """Return what of an entry is not as it was: inputs of its tuning by name, else its measurement; empty where nothing is."""
    if before.key != after.key:
        if not before.manifest or not after.manifest:
            return "other inputs"
        names = [name for name, _, _ in changed_lines(before.manifest, after.manifest)]
        return ", ".join([*names[:4], *([f"{len(names) - 4} more"] if len(names) > 4 else [])])
    return "measured again" if (before.run_secs, before.winner) != (after.run_secs, after.winner) else ""
