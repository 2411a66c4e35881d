"""Owns what a report tells, as frozen values: targets, entries with their candidates, changes, revisions, what processes did.

Knows nothing of where it is read, or of how it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

from kerneldecl.compare.verdict import Comparison
from kerneldecl.model import Trial
from kerneldecl.planning.roofline import Roofline

Curve = tuple[tuple[float, float], ...]
"""Seconds of a search after which it had a better candidate, and that one's time."""


@dataclass(frozen=True)
class Other:
    """The time of what is not ours, beside ours of the same race."""

    name: str
    secs: float
    our_secs: float


@dataclass(frozen=True)
class Tried:
    """A candidate, with the policy that has proposed it."""

    trial: Trial
    policy: str
    """Empty where it is not known."""
    is_tied: bool = False
    """Whether noise cannot tell it from the fastest."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known of an entry."""

    name: str
    """Entry and target."""
    target: str
    rule: str
    attrs: str
    """Attributes as `name=value`, those that are not set left out."""
    reason: str = ""
    """Why it has no winner; empty where it has one."""
    roofline: Roofline | None = None
    dtype: str = ""
    """What the first input is read as: the dtype of the peak."""
    is_measured: bool = False
    run_secs: float = 0.0
    """Time of the winner, by the protocol that has chosen it; 0 where none is measured."""
    policy: str = ""
    """The policy that has proposed the winner."""
    timing: str = ""
    tried: tuple[Tried, ...] = ()
    """Candidates, the winner first, then by time, failed ones last."""
    best_of: tuple[float, ...] = ()
    """The fastest's time divided by that of the best of the first k in the policy's order, for each k from 1."""
    others: tuple[Other, ...] = ()
    conditions: tuple[tuple[str, str], ...] = ()
    """Under what it was measured: device, driver, clocks, date."""
    change: Comparison | None = None
    """The entry beside what the report compares with."""
    why: tuple[str, ...] = ()
    """Why the last build ran something for it."""
    history: tuple[float | None, ...] = ()
    """Its time at each of the report's revisions; None where it had none."""
    searches: tuple[tuple[str, Curve], ...] = ()
    """By whose search it is: the last build's, and those that were compared."""
    source: str = ""
    """The winner's scheduled TensorIR; empty where it is not at hand."""

    @property
    def share(self) -> float | None:
        """The part of what peak and bandwidth allow that the winner reaches; None where it is not measured."""
        return self.roofline.least_secs / self.run_secs if self.roofline and self.run_secs else None


@dataclass(frozen=True)
class Target:
    name: str
    device: str
    """The device's own name, or the arch's."""
    is_warm: bool = False
    """Whether its caches are warm while kernels are timed."""


@dataclass(frozen=True)
class Revision:
    """A git revision in which the lock has changed, oldest first in a report; the lock of now comes last, without digest."""

    digest: str
    """First letters of its hash; empty for the working tree."""
    date: str
    subject: str


@dataclass(frozen=True)
class Busy:
    """A process that was busy with a request."""

    process: str
    request: str
    began_secs: float
    """Since the build began."""
    secs: float
    has_failed: bool = False


@dataclass(frozen=True)
class Built:
    """What the last build's processes did."""

    secs: float
    failure: str
    busy: tuple[Busy, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    title: str
    targets: tuple[Target, ...]
    entries: tuple[Entry, ...]
    against: str = ""
    """What the entries are compared with; empty for nothing."""
    gone: tuple[str, ...] = ()
    """Entries of it that are not there any more."""
    revisions: tuple[Revision, ...] = ()
    built: Built | None = None
