"""Owns the tests of what a build remembers for the next one: it comes back as it was, and nothing else is believed.

Knows nothing of plans. Without it explanations are lost, never results.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kerneldecl.model import Candidate, Trial
from kerneldecl.planning.last_build import State, read_state, write_state
from kerneldecl.serial import trial_to_json

TRIAL = trial_to_json(Trial(Candidate.of("plain", {"unroll": 1}), 1e-6, failure="its process was killed by SIGSEGV"))
KNOWN = State(
    keys={"a@box": {"lower": "k", "tune": "l"}, "box": {"link": "m"}},
    why={
        "a@box": [
            {
                "kind": "tune",
                "reason": "it changed",
                "changed": [["attrs.n", "1", None], ["rule", None, "2"]],
                "causes": [["rules/scale.py", "lower", "a", "b"], ["workloads.toml", "n", None, "1"]],
            }
        ]
    },
    failed={"b@box": {"key": "k", "reason": "no candidate is right", "trials": [TRIAL]}},
)
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_state(tmp_path / "state.json", KNOWN)
    return tmp_path / "state.json"


def test_it_comes_back_as_it_was_written(path: Path) -> None:
    assert read_state(path) == KNOWN


@pytest.mark.parametrize(
    "edit",
    [
        *(lambda found, name=name: found.pop(name) for name in ("schema", "keys", "why", "failed")),
        lambda found: found.update(schema=found["schema"] - 1),
        lambda found: found.update(keys=[]),
        lambda found: found["keys"].update(box="m"),
        lambda found: found["keys"]["a@box"].update(lower=1),
        lambda found: found["why"].update({"a@box": {"kind": "tune"}}),
        *(lambda found, name=name: found["why"]["a@box"][0].pop(name) for name in ("kind", "reason", "changed", "causes")),
        *(lambda found, name=name: found["why"]["a@box"][0].update({name: 1}) for name in ("kind", "reason", "changed", "causes")),
        *(lambda found, name=name: found["why"]["a@box"][0][name][1].pop() for name in ("changed", "causes")),
        lambda found: found["why"]["a@box"][0]["changed"][0].append("more"),
        lambda found: found["why"]["a@box"][0]["changed"][1].__setitem__(2, 7),
        *(lambda found, name=name: found["failed"]["b@box"].pop(name) for name in ("key", "reason", "trials")),
        *(lambda found, name=name: found["failed"]["b@box"].update({name: 1}) for name in ("key", "reason", "trials")),
        lambda found: found["failed"]["b@box"]["trials"][0].update(failure=1),
    ],
)
def test_what_has_other_fields_or_types_is_not_believed(path: Path, edit: Edit) -> None:
    found = copy.deepcopy(json.loads(path.read_bytes()))
    edit(found)
    path.write_text(json.dumps(found))
    assert read_state(path) == State()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000])
def test_what_is_no_state_is_none(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert read_state(path) == State()
    path.unlink()
    assert read_state(path) == State()
