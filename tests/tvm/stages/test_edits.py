"""Owns the property that a plan is true: after any edits `plan`, `check --stale` and `--locked` say what `build` then does, with TVM.

Knows nothing of keys. What ran is what the build says of itself and what its workers were asked; what came of it is compared with a build
of the same records in an empty clone, byte for byte.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fakes import ARCH
from support.spaces import Space

from kerneldecl import api
from kerneldecl.cli.summary import build_json
from kerneldecl.errors import StaleError
from kerneldecl.runners.local import LocalRunner
from kerneldecl.stages.session import Options, Session

RULE = """\
from dataclasses import dataclass

from kerneldecl.rule import Arg, Extent, Rule, Signature
{comment}

@dataclass(frozen=True, kw_only=True)
class Scale(Rule):
    n: Extent

    def signature(self):
        return Signature((Arg("X", (self.n,), "float32"),), (Arg("Y", (self.n,), "float32"),))

    def lower(self):
        from tvm import te

        x = te.placeholder((self.n,), "float32", "X")
        return [x, te.compute((self.n,), lambda {index}: x[{index}] * {factor}, "Y")]

    def reference(self, x):
        {reference}

    def flops(self):
        return self.n
"""
POLICY = """\
from kerneldecl.model import Candidate, Proposal

TEMPLATES = ("parts",)
PARTS = {parts}
{comment}

def propose(space, arch, top_k):
    return tuple(Proposal(Candidate.of("parts", {{"parts": p}}), 1e-6) for p in PARTS[:top_k])
"""
TEMPLATE = """\
import tvm
{comment}

def apply(mod, params, arch):
    {name} = tvm.s_tir.Schedule(mod)
    block = {name}.get_child_blocks({name}.get_sblock("root"))[-1]
    outer, inner = {name}.split({name}.get_loops(block)[0], [params["parts"], None])
    {name}.{primitive}(inner)
    return {name}
"""
HEAD = """\
edition = 1
{comment}
[artifact]
name = "edited"
version = "1"
[target.box]
arch = "test-cpu"
[defaults]
policy = "plain"
top_k = {top_k}
"""


@dataclass(frozen=True)
class Declared:
    """What a user edits, and what of it: each field has the values that an edit chooses from."""

    n: int = 64
    tolerance: str = ""
    top_k: int = 2
    tags: str = ""
    generation: int = 0
    second: str = "b"
    """Name of the second entry; none where it is empty."""
    l1d_bytes: int = 32768
    comment: str = ""
    rule_comment: str = ""
    factor: float = 2.0
    index: str = "i"
    """Name of a variable of the rule, which changes no computation."""
    reference: str = "return x * {factor}"
    policy_comment: str = ""
    parts: str = "(2, 4, 8)"
    template_comment: str = ""
    primitive: str = "vectorize"
    sch: str = "sch"
    """Name of a variable of the template, which changes no schedule."""

    def files(self) -> dict[str, str]:
        first = f'[[workload]]\nname = "a"\nrule = "scale"\nn = {self.n}\n{self.tolerance}{self.tags}'
        first += f"generation = {self.generation}\n" if self.generation else ""
        second = f'[[workload]]\nname = "{self.second}"\nrule = "scale"\nn = 32\n' if self.second else ""
        reference = self.reference.format(factor=self.factor)
        return {
            "workloads.toml": HEAD.format(top_k=self.top_k, comment=self.comment) + first + second,
            "rules/scale.py": RULE.format(factor=self.factor, index=self.index, reference=reference, comment=self.rule_comment),
            "policies/plain.py": POLICY.format(parts=self.parts, comment=self.policy_comment),
            "templates/parts.py": TEMPLATE.format(primitive=self.primitive, name=self.sch, comment=self.template_comment),
            "archs/test-cpu.toml": ARCH.replace("32768", str(self.l1d_bytes)),
        }


COMMENTS = ["", "# one", "# two"]
CHOICES: dict[str, list[Any]] = {
    "n": [64, 96],
    "tolerance": ["", "tolerance = 1e-2\n", "tolerance = 1e-6\n"],
    "top_k": [1, 2, 3],
    "tags": ["", 'tags = ["fast"]\n'],
    "generation": [0, 1],
    "second": ["", "b", "c"],
    "l1d_bytes": [32768, 16384],
    "comment": COMMENTS,
    "rule_comment": COMMENTS,
    "factor": [2.0, 3.0],
    "index": ["i", "j"],
    "reference": ["return x * {factor}", "return {factor} * x"],
    "policy_comment": COMMENTS,
    "parts": ["(2, 4, 8)", "(4, 2, 8)", "(8, 16)"],
    "template_comment": COMMENTS,
    "primitive": ["vectorize", "unroll"],
    "sch": ["sch", "made"],
}
EDITS = st.sampled_from(sorted(CHOICES)).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(CHOICES[name])))
SEQUENCES = st.lists(st.lists(EDITS, min_size=1, max_size=3), min_size=2, max_size=6)
Action = tuple[str, str]
"""Kind and entry, or target."""


@pytest.fixture(scope="module")
def runner() -> Iterator[LocalRunner]:
    """Return workers, which stay for all builds: what they read is told by its path, and each build has a snapshot of its own."""
    with LocalRunner(1, 1) as workers:
        yield workers


def build(space: Space, runner: LocalRunner, *, locked: bool = False) -> Session:
    @contextlib.contextmanager
    def runners() -> Iterator[LocalRunner]:
        yield runner

    with api.frozen_workspace(space.root) as workspace:
        return api.run_build(workspace, (), Options(locked=locked), lambda _: None, runners=runners)


def planned(space: Space) -> dict[Action, dict[str, Any]]:
    """Return the actions that `plan` names, which are not up to date."""
    made = space.command("plan", "--json")
    assert made.code == 0, made.err
    actions = json.loads(made.out)["actions"]
    return {(a["kind"], f"{a['workload']}@{a['target']}".lstrip("@")): a for a in actions if a["state"] == "miss"}


def lock(space: Space) -> str:
    path = space.root / "workloads.lock"
    return path.read_text() if path.exists() else ""


def check_plan(space: Space, runner: LocalRunner) -> None:
    """Build, and compare what was said before with what then ran."""
    said, stale, before = planned(space), space.command("check", "--stale").code, lock(space)
    full = {(a.kind, a.entry) for a in space.plan().misses}
    assert said.keys() == full, "with a memo or without, a plan is the same"
    locked = space.copy_of(Path(f"{space.root}-locked"), "cache", "dist", "workloads.lock")
    done = build(space, runner)
    assert not done.failures
    ran = {(action.kind, action.entry) for action in done.ran}
    ready = {action for action, told in said.items() if told["key"]}
    assert ready <= ran | {action for action in ready if action[0] == "build"}, "what is ready runs; an object comes with its tuning"
    assert ran <= said.keys(), "what is up to date does not run"
    counts = build_json(done)["ran"]
    tunes = [told["steps"] for (kind, _), told in said.items() if kind == "tune" and told["key"]]
    if not any(kind in {"lower", "propose"} for kind, _ in ready):
        most = sum(steps["candidates"] for steps in tunes)
        assert counts["measured"] <= most
        assert counts["verified"] <= most + sum(steps["verifies"] and not steps["candidates"] for steps in tunes)
        if not most:
            assert counts["verified"] == len({told["key"] for told in said.values() if told.get("steps") and told["steps"]["verifies"]})
    assert (stale == 3) == (any(kind == "tune" for kind, _ in ran) or lock(space) != before), "check --stale"
    assert refuses(locked, runner) == (lock(space) != before), "--locked"
    shutil.rmtree(locked.root)
    assert planned(space) == {}, "nothing is left to do"
    assert space.command("check", "--stale").code == 0


def refuses(space: Space, runner: LocalRunner) -> bool:
    """Say whether `build --locked` refuses; what it leaves where it does not is what it was."""
    before = lock(space)
    try:
        done = build(space, runner, locked=True)
    except StaleError:
        assert lock(space) == before
        return True
    assert not done.failures
    assert lock(space) == before
    return False


def check_clone(space: Space, runner: LocalRunner) -> None:
    """Build the same in a clone that has nothing but what one commits."""
    clone = space.copy_of(Path(f"{space.root}-clone"), "workloads.lock", "cache/record")
    assert clone.command("check", "--stale").code == 0
    assert {kind for kind, _ in planned(clone)} == {"build", "link"}
    done = build(clone, runner, locked=True)
    counts = build_json(done)["ran"]
    assert (counts["verified"], counts["measured"]) == (0, 0)
    assert clone.artifact_files() == space.artifact_files()
    assert lock(clone) == lock(space)
    shutil.rmtree(clone.root)


def follow(sequence: Sequence[Sequence[tuple[str, Any]]], runner: LocalRunner) -> None:
    """Edit and build by turns. `check --stale` asks the same workers: those of its own would import TVM each time."""

    def same_workers(*_: object, **_limits: object) -> contextlib.nullcontext[LocalRunner]:
        return contextlib.nullcontext(runner)

    folders = tempfile.TemporaryDirectory(prefix="kerneldecl-test-")
    with folders as folder, mock.patch("os.fsync"), mock.patch("kerneldecl.api.LocalRunner", same_workers):
        space, declared = Space(Path(folder) / "space"), Declared()
        space.write(declared.files())
        assert not build(space, runner).failures
        for edits in sequence:
            declared = replace(declared, **dict(edits))
            space.write(declared.files())
            check_plan(space, runner)
        check_clone(space, runner)


def test_every_field_can_be_edited() -> None:
    assert {field.name for field in fields(Declared)} == CHOICES.keys()
    assert all(getattr(Declared(), name) in values for name, values in CHOICES.items())


def test_each_kind_of_edit_runs_what_the_plan_says(runner: LocalRunner) -> None:
    """Those that the design names, one after the other; below are random ones."""
    follow(
        [
            [("rule_comment", "# one"), ("policy_comment", "# one"), ("template_comment", "# one"), ("l1d_bytes", 16384)],
            [("tolerance", "tolerance = 1e-2\n"), ("tags", 'tags = ["fast"]\n')],
            [("reference", "return {factor} * x"), ("second", "c")],
            [("top_k", 3)],
        ],
        runner,
    )


@pytest.mark.slow
def test_names_in_a_computation_are_in_objects_and_so_in_keys(runner: LocalRunner) -> None:
    """TVM writes names of loops into objects: an object is made again, while what was measured of its schedule holds."""
    follow([[("index", "j")], [("index", "i"), ("sch", "made")]], runner)


@pytest.mark.slow
def test_whatever_is_edited_runs_what_the_plan_says(runner: LocalRunner) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(SEQUENCES)
    def check(sequence: list[list[tuple[str, Any]]]) -> None:
        follow(sequence, runner)

    check()
