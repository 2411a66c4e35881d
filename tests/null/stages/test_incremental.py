"""Owns the property that makes the build system right: after any edits and damages, a build gives what a clean build gives.

Knows nothing of keys or plans: only files and the command's results are looked at.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from support.fakes import ARCH, POLICY, RULE, TEMPLATE, FakeRunner
from support.spaces import Command, Space

HEAD = """\
edition = 1
[artifact]
name = "fakes"
version = "{version}"
[target.host]
arch = "host"
[target.box]
arch = "test-cpu"
[defaults]
policy = "plain"
"""
OWN = """\
def specialize(mod, arch):
    return f"{{mod}} {word}"
"""
NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f"])
RULES = st.sampled_from(["scale", "lookup"])
TARGETS = st.sampled_from([["host"], ["box"], ["box", "host"]])
EXTENTS = st.sampled_from([[8], [16], [8, 24]])


@dataclass(frozen=True)
class Entry:
    """A `[[workload]]` table."""

    name: str
    rule: str
    n: tuple[int, ...]
    targets: tuple[str, ...]
    top_k: int = 2
    tolerance: float | None = None
    generation: int = 0
    specialize: str | None = None
    tags: tuple[str, ...] = ()

    def toml(self) -> str:
        values: dict[str, Any] = {**vars(self), "n": self.n[0] if len(self.n) == 1 else self.n}
        return "[[workload]]\n" + "".join(f"{name} = {json.dumps(v)}\n" for name, v in values.items() if v is not None)


class Edits(RuleBasedStateMachine):
    """Random edits of declarations and plug-ins, random damage to what builds left, and builds."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kerneldecl-test-"))
        self.space = Space(self.folder / "space")
        self.entries: list[Entry] = []
        self.version = 1
        self.counter = itertools.count()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(n=EXTENTS, on=TARGETS)
    def begin(self, n: list[int], on: list[str]) -> None:
        self.space.write(
            {
                "rules/scale.py": RULE.format(name="Scale"),
                "rules/lookup.py": RULE.format(name="Lookup").replace("{table}", "{table} looked up"),
                "policies/plain.py": POLICY,
                "templates/unrolled.py": TEMPLATE,
                "archs/test-cpu.toml": ARCH,
                "own/by_hand.py": OWN.format(word="by hand"),
                "own/wrong.py": OWN.format(word="wrong"),
            }
        )
        self.entries = [Entry("a", "scale", tuple(n), tuple(on))]
        self._declare()

    def _declare(self) -> None:
        self.space.write({"workloads.toml": HEAD.format(version=self.version) + "".join(e.toml() for e in self.entries)})

    def _replace(self, at: int, **fields: Any) -> None:
        position = at % len(self.entries)
        self.entries[position] = replace(self.entries[position], **fields)
        self._declare()

    # Edits of workloads.toml

    @rule(name=NAMES, rule=RULES, n=EXTENTS, on=TARGETS)
    def add(self, name: str, rule: str, n: list[int], on: list[str]) -> None:
        if name not in {e.name for e in self.entries}:
            self.entries.append(Entry(name, rule, tuple(n), tuple(on)))
            self._declare()

    @precondition(lambda self: len(self.entries) > 1)
    @rule(at=st.integers(0, 5))
    def remove(self, at: int) -> None:
        del self.entries[at % len(self.entries)]
        self._declare()

    @rule(at=st.integers(0, 5), name=NAMES)
    def rename(self, at: int, name: str) -> None:
        if name not in {e.name for e in self.entries}:
            self._replace(at, name=name)

    @rule()
    def reorder(self) -> None:
        self.entries.append(self.entries.pop(0))
        self._declare()

    @rule(at=st.integers(0, 5), n=EXTENTS)
    def reshape(self, at: int, n: list[int]) -> None:
        self._replace(at, n=tuple(n))

    @rule(at=st.integers(0, 5), rule=RULES)
    def change_rule(self, at: int, rule: str) -> None:
        self._replace(at, rule=rule)

    @rule(at=st.integers(0, 5), on=TARGETS)
    def retarget(self, at: int, on: list[str]) -> None:
        self._replace(at, targets=tuple(on))

    @rule(at=st.integers(0, 5), top_k=st.integers(1, 3), tolerance=st.sampled_from([None, 0.25]), generation=st.integers(0, 1))
    def change_search(self, at: int, top_k: int, tolerance: float | None, generation: int) -> None:
        self._replace(at, top_k=top_k, tolerance=tolerance, generation=generation)

    @rule(at=st.integers(0, 5), tags=st.sampled_from([(), ("fast",), ("fast", "wide")]))
    def tag(self, at: int, tags: tuple[str, ...]) -> None:
        self._replace(at, tags=tags)

    @rule(at=st.integers(0, 5), specialize=st.sampled_from([None, "own/by_hand.py", "own/wrong.py"]))
    def specialize(self, at: int, specialize: str | None) -> None:
        self._replace(at, specialize=specialize)

    @rule()
    def release(self) -> None:
        self.version += 1
        self._declare()

    # Edits of plug-ins

    @rule(file=st.sampled_from(["rules/scale.py", "policies/plain.py", "templates/unrolled.py", "archs/test-cpu.toml", "workloads.toml"]))
    def comment(self, file: str) -> None:
        self.space.write({file: f"{self.space.read(file)}# {next(self.counter)}\n"})

    @rule(rule=RULES, factor=st.sampled_from(["factor", "factor + 1"]))
    def change_computation(self, rule: str, factor: str) -> None:
        text = RULE.format(name=rule.capitalize()).replace("self.factor}", f"self.{factor}}}")
        self.space.write({f"rules/{rule}.py": text if rule == "scale" else text.replace("{table}", "{table} looked up")})

    @rule(rule=RULES)
    def make_rules_alike(self, rule: str) -> None:
        """Both rules compute the same, which is then tuned once."""
        other = {"scale": "lookup", "lookup": "scale"}[rule]
        text = self.space.read(f"rules/{other}.py").replace(f"class {other.capitalize()}(", f"class {rule.capitalize()}(")
        self.space.write({f"rules/{rule}.py": text})

    @rule(unrolls=st.sampled_from(["(1, 2, 4, 8)", "(2, 1)", "(16, 4, 1)"]))
    def change_policy(self, unrolls: str) -> None:
        self.space.write({"policies/plain.py": POLICY.replace("(1, 2, 4, 8)", unrolls)})

    @rule(words=st.sampled_from(["unrolled", "cut", "{'wrong' if params['unroll'] == 2 else 'unrolled'}"]))
    def change_template(self, words: str) -> None:
        self.space.write({"templates/unrolled.py": TEMPLATE.replace("unrolled", words)})

    @rule(word=st.sampled_from(["by hand", "with care", "wrong"]))
    def change_own_function(self, word: str) -> None:
        self.space.write({"own/by_hand.py": OWN.format(word=word)})

    @rule(size=st.sampled_from([16384, 32768]))
    def change_arch(self, size: int) -> None:
        self.space.write({"archs/test-cpu.toml": ARCH.replace("32768", str(size))})

    # Damage

    @rule(at=st.integers(0, 10_000), way=st.sampled_from(["delete", "truncate", "empty", "flip", "garbage"]), where=st.integers(0, 10_000))
    def damage_store(self, at: int, way: str, where: int) -> None:
        files = [path for path in sorted((self.space.root / "cache").rglob("*")) if path.is_file() and path.suffix != ".lock"]
        if files:
            _damage(files[at % len(files)], way, where)

    @rule(at=st.integers(0, 10_000), way=st.sampled_from(["delete", "truncate", "flip"]), where=st.integers(0, 10_000))
    def damage_artifact(self, at: int, way: str, where: int) -> None:
        files = [path for path in sorted((self.space.root / "dist").rglob("*")) if path.is_file()]
        if files:
            _damage(files[at % len(files)], way, where)

    @rule(folder=st.sampled_from(["dist", "cache/blob", "cache/record/lower", "cache/local", "cache"]))
    def forget(self, folder: str) -> None:
        shutil.rmtree(self.space.root / folder, ignore_errors=True)

    @rule(text=st.sampled_from(["", "# edited\n"]))
    def spoil_lock(self, text: str) -> None:
        if (self.space.root / "workloads.lock").exists():
            self.space.write({"workloads.lock": text})

    # Builds

    @rule(pattern=st.sampled_from(["*@host", "*@box", "a", "rule:scale"]))
    def build_some(self, pattern: str) -> None:
        done = self.space.command("build", pattern, "--keep-going", runner=FakeRunner())
        assert done.code in {0, 1, 4}, done.err

    @rule()
    def build(self) -> None:
        done = self.space.command("build", "--keep-going", runner=FakeRunner())
        clean = self.space.copy_of(self.folder / f"clean-{next(self.counter)}", "own")
        expected = clean.command("build", "--keep-going", runner=FakeRunner())
        assert expected.code in {0, 1}, expected.err
        assert (done.code, _failures(done)) == (expected.code, _failures(expected)), done.err
        # Of a target where every entry failed, what an earlier build linked may still be there.
        targets = {folder.name for folder in (clean.root / f"dist/fakes-{self.version}").glob("[!.]*")}
        assert _artifacts(self.space, self.version, targets) == _artifacts(clean, self.version, targets)
        assert self._lock(self.space) == self._lock(clean)
        if _failures(done):
            self._check_incomplete(done)
        else:
            self._check_up_to_date()
        shutil.rmtree(clean.root)

    def _check_incomplete(self, done: Command) -> None:
        """A failed entry is never up to date; what is there is neither linked again nor refused by --locked."""
        again = self.space.command("build", runner=FakeRunner())
        assert (again.code, again.links, _failures(again)) == (1, 0, _failures(done)), again.err
        assert self.space.command("check", "--stale").code == 3
        assert self.space.command("build", "--locked", runner=FakeRunner()).code == 1

    @staticmethod
    def _lock(space: Space) -> str:
        return space.read("workloads.lock") if (space.root / "workloads.lock").exists() else ""

    def _check_up_to_date(self) -> None:
        again = self.space.command("build")
        assert (again.code, again.links) == (0, 0), again.err
        assert self.space.command("check", "--stale").code == 0
        assert self.space.command("build", "--locked").code == 0


def _failures(done: Command) -> dict[str, str]:
    """Return the reason of each failed entry."""
    lines = (line.removeprefix("failed ") for line in done.out.splitlines() if line.startswith("failed "))
    return dict(line.split(": ", 1) for line in lines)


def _damage(path: Path, way: str, where: int) -> None:
    content = path.read_bytes()
    position = where % max(1, len(content))
    damaged = {
        "truncate": content[:position],
        "empty": b"",
        "flip": content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :] if content else b"",
        "garbage": b"{}",
    }
    if way == "delete":
        path.unlink()
    else:
        path.write_bytes(damaged[way])


def _artifacts(space: Space, version: int, targets: set[str]) -> dict[str, Any]:
    """Return every file of the declared artifacts, manifests without their dates."""
    folders = [space.root / f"dist/fakes-{version}" / target for target in sorted(targets)]
    paths = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    files: dict[str, Any] = {str(path.relative_to(space.root)): path.read_bytes() for path in paths}
    for name in [name for name in files if name.endswith("manifest.json")]:
        manifest = json.loads(files[name])
        for entry in manifest["entries"]:
            del entry["provenance"]
        files[name] = manifest
    return files


@pytest.mark.parametrize("examples", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_incremental_builds_give_what_clean_builds_give(examples: int) -> None:
    limits = settings(
        max_examples=examples,
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
        report_multiple_bugs=False,
    )
    with mock.patch("os.fsync"):
        run_state_machine_as_test(Edits, settings=limits)
