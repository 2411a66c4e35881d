"""Owns a cause: a file, or another place, and what of it is not as it was.

Knows nothing of how causes are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SHOWN = 2
_SHORT = 24


class Cause(NamedTuple):
    """Why an action has another key than in the last build."""

    place: str
    """A file of the workspace or of kerneldecl, or `toolchain`, `kerneldecl`, `candidates`."""
    what: str
    """What of it: a definition, an attribute, a key of an entry."""
    old: str | None = None
    new: str | None = None
    """Both are None where there is more to it than a value."""

    def __str__(self) -> str:
        if self.old is None and self.new is None:
            return f"{self.place}: {self.what}"
        return f"{self.place}: {self.what} {_value(self.old)} -> {_value(self.new)}"


def _value(value: str | None) -> str:
    return "(none)" if value is None else value


def in_short(causes: Sequence[Cause]) -> str:
    """Return the first causes as one phrase, long values cut."""
    cut = (cause._replace(old=_cut(cause.old), new=_cut(cause.new)) for cause in causes[:_SHOWN])
    more = len(causes) - _SHOWN
    return ", ".join(map(str, cut)) + f" and {more} more" * (more > 0)


def _cut(value: str | None) -> str | None:
    return value if value is None or len(value) <= _SHORT else f"{value[: _SHORT // 2]}…"
