"""Owns the tests that each mistake of a list made by hand is answered by one sentence with its place and the way out.

Knows nothing of the sentences besides that: `tests/golden` has whole ones. Wrong calls and broken artifacts are in
`tests/tvm/artifact/test_wrong_calls.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.in_this_process import workers_here
from support.mistakes import ARCH_TARGET, ARCHS, BASE, COMMANDS, DECLARATIONS, POLICIES, POLICY_ENTRY, RULE_ENTRY, RULES, Command, Mistake
from support.spaces import Space


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Space:
    monkeypatch.chdir(tmp_path)
    return Space(tmp_path).write(BASE)


def named(mistake: Mistake) -> str:
    return mistake.what


def check(space: Space, mistake: Mistake, file: str) -> None:
    text = space.read(file)
    if mistake.old:
        assert mistake.old in text
    space.write({file: text.replace(mistake.old, mistake.new, 1) if mistake.old else text + mistake.new})
    done = space.command("check")
    assert (done.code, done.out) == (2, ""), done
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: {mistake.place}")
    assert mistake.way_out in line


def test_the_workspace_that_mistakes_are_made_in_is_right(space: Space) -> None:
    assert space.command("check").out == "4 entries declared, no mistakes\n"


@pytest.mark.parametrize("mistake", DECLARATIONS, ids=named)
def test_a_mistake_in_the_declaration(space: Space, mistake: Mistake) -> None:
    check(space, mistake, "workloads.toml")


@pytest.mark.parametrize("mistake", RULES, ids=named)
def test_a_mistake_in_a_rule(space: Space, mistake: Mistake) -> None:
    check(space.write({"workloads.toml": RULE_ENTRY}), mistake, "rules/scale.py")


@pytest.mark.parametrize("mistake", POLICIES, ids=named)
def test_a_mistake_in_a_policy(space: Space, mistake: Mistake) -> None:
    check(space.write({"workloads.toml": POLICY_ENTRY}), mistake, "policies/plain.py")


@pytest.mark.parametrize("mistake", ARCHS, ids=named)
def test_a_mistake_in_an_arch(space: Space, mistake: Mistake) -> None:
    check(space.write({"workloads.toml": ARCH_TARGET}), mistake, "archs/test-cpu.toml")


@pytest.mark.parametrize("wrong", COMMANDS, ids=lambda wrong: " ".join(wrong.typed))
def test_a_mistake_on_the_command_line(space: Space, wrong: Command) -> None:
    with workers_here():  # some ask for a model, which a worker reads
        done = space.command(*wrong.typed)
    assert done.code == wrong.code, done
    (line,) = (done.err or done.out).splitlines()
    assert wrong.says in line
    assert wrong.way_out in line
