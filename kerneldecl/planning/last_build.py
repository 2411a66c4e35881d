"""Owns what a build remembers for the next one, to explain what changed: the keys of the last build, its reasons and failures.

Knows nothing of plans or of what the keys stand for. Losing it loses explanations, never results.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerneldecl.model import Trial
from kerneldecl.serial import misfit, trials_from_json
from kerneldecl.store.files import write_whole
from kerneldecl.store.regular import read_file

SCHEMA = 4
FILE = "state.json"
REFERENCE = "reference"


@dataclass(frozen=True)
class State:
    """Keys of the last build by entry (or target) and kind, why it ran what it ran, and what failed."""

    keys: dict[str, dict[str, str]] = field(default_factory=dict)
    """Besides keys of actions, under `REFERENCE`, the digest of what an entry's inputs and reference came from."""
    why: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Key, reason and candidates, as records have them, of each entry that failed when it was last built."""


def read_state(path: Path) -> State:
    """Return the last build's state; an empty one where there is none or it is unreadable."""
    try:
        fields = json.loads(read_file(path))
        found = State(fields["keys"], fields["why"], fields["failed"])
        return found if fields["schema"] == SCHEMA and _is_whole(found) else State()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return State()


def _is_whole(state: State) -> bool:
    """Say whether the fields have their types: the file may be of another version, or nobody's."""
    texts = all({*map(type, found.values())} <= {str} for found in state.keys.values())
    failed = all(isinstance(found["key"], str) and isinstance(found["reason"], str) for found in state.failed.values())
    failed = failed and all(not misfit(trials_from_json(found["trials"]), tuple[Trial, ...], "") for found in state.failed.values())
    return texts and failed and all(_is_action(action) for actions in state.why.values() for action in actions)


def _is_action(action: dict[str, Any]) -> bool:
    lines = [(line, size) for name, size in (("changed", 3), ("causes", 4)) for line in action[name]]
    are_lines = not lines or all(len(line) == size and all(part is None or isinstance(part, str) for part in line) for line, size in lines)
    return are_lines and isinstance(action["kind"], str) and isinstance(action["reason"], str)


def write_state(path: Path, state: State) -> None:
    write_whole(path, json.dumps({"schema": SCHEMA, "keys": state.keys, "why": state.why, "failed": state.failed}), durable=False)
