"""Owns what a build remembers for the next one, to explain what changed: the keys of the last build, its reasons and failures.

Knows nothing of plans or of what the keys stand for. Losing it loses explanations, never results.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerneldecl.store.files import write_whole

SCHEMA = 2


@dataclass(frozen=True)
class State:
    """Keys of the last build by entry (or target) and kind, why it ran what it ran, and what failed."""

    keys: dict[str, dict[str, str]] = field(default_factory=dict)
    why: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed: dict[str, dict[str, str]] = field(default_factory=dict)
    """Key and reason of each entry that failed when it was last built."""


def read_state(path: Path) -> State:
    """Return the last build's state; an empty one where there is none or it is unreadable."""
    try:
        fields = json.loads(path.read_bytes())
        return State(fields["keys"], fields["why"], fields["failed"]) if fields["schema"] == SCHEMA else State()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return State()


def write_state(path: Path, state: State) -> None:
    write_whole(path, json.dumps({"schema": SCHEMA, "keys": state.keys, "why": state.why, "failed": state.failed}), durable=False)
