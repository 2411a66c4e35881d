"""Owns an action of a plan: what it is of, how far it is, and why it is to run.

Knows nothing of how keys are made.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

from kerneldecl.planning.causes import Cause, in_short

Kind = Literal["lower", "propose", "tune", "build", "rows", "link"]
Changed = tuple[tuple[str, str | None, str | None], ...]
"""Lines of two manifests that differ: name, old value, new value."""


class Subject(NamedTuple):
    """What an action is of."""

    entry: str
    """Name and target; for a link the target alone."""
    target: str
    kind: Kind


class State(Enum):
    """How far an action is. Each state has its precondition, which `Action` holds to."""

    DONE = "done"
    """Its key is known and its result is there; there is no reason to run it."""
    READY = "ready"
    """Its key is known and its result is not there: it can run now, and there is a reason."""
    WAITING = "waiting"
    """Its key depends on an action that is not done; the reason names it."""


class Difference(NamedTuple):
    """What is not as in the last build: lines of the manifest, and where they come from."""

    changed: Changed = ()
    causes: tuple[Cause, ...] = ()

    def __str__(self) -> str:
        return in_short(self.causes)


class Action(NamedTuple):
    """Something with a key, done or not: made by `done`, `ready` and `waiting`, which keep the states' preconditions."""

    entry: str
    """Name and target; for a link the target alone."""
    target: str
    kind: Kind
    state: State
    key: str
    """Empty while the action waits."""
    reason: str
    """Why it is a miss; empty for a hit."""
    manifest: str = ""
    changed: Changed = ()
    """Lines of the manifest that differ from the last build's: name, old value, new value."""
    causes: tuple[Cause, ...] = ()
    """Where these lines come from: files and what of them changed."""

    @property
    def is_hit(self) -> bool:
        return self.state is State.DONE

    @classmethod
    def done(cls, subject: Subject, key: str, manifest: str = "") -> Action:
        return cls(*subject, state=State.DONE, key=key, reason="", manifest=manifest)

    @classmethod
    def ready(cls, subject: Subject, key: str, reason: str, manifest: str = "", difference: Difference | None = None) -> Action:
        assert key, "what can run has a key"
        assert reason, "what is to run has a reason"
        changed, causes = difference or Difference()
        return cls(*subject, state=State.READY, key=key, reason=reason, manifest=manifest, changed=changed, causes=causes)

    @classmethod
    def waiting(cls, subject: Subject, awaited: str) -> Action:
        return cls(*subject, state=State.WAITING, key="", reason=f"waits for {awaited}")
