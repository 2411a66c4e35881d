"""Owns the tests of words for what changed, where the last build left less than usual: in a clone, after damage, after several edits.

Knows nothing of the changes that a build explains after another one: tests of the flow tell of these.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fakes import POLICY, RULE, FakeRunner
from support.spaces import ENTRIES, HEAD, Space


def reasons(space: Space, kind: str) -> dict[str, str]:
    made = json.loads(space.command("plan", "--json").out)["actions"]
    return {action["workload"]: action["reason"] for action in made if action["kind"] == kind and action["state"] == "miss"}


@pytest.fixture
def clone(fakes: Space, tmp_path: Path) -> Space:
    """Return a clone of what one commits after a build."""
    fakes.build()
    return fakes.copy_of(tmp_path / "clone", "cache/record", "workloads.lock", "table.txt")


@pytest.mark.parametrize(
    ("file", "old", "new", "kind", "reason"),
    [
        ("workloads.toml", "n = 64", "n = 65", "lower", "workloads.toml: n 64 -> 65"),
        ("workloads.toml", "n = 64", "n = 64\ntop_k = 2", "propose", "workloads.toml: top_k 3 -> 2"),
        ("workloads.toml", "n = 64", "n = 64\ntolerance = 0.5", "tune", "workloads.toml: tolerance 0.0001 -> 0.5"),
        ("rules/scale.py", "Y[i]", "Y[j]", "lower", "rules/scale.py: itself or a file that it imports"),
        ("rules/scale.py", "return x *", "return 1 * x *", "tune", "rules/scale.py: reference or inputs, itself or a file that it imports"),
        ("archs/test-cpu.toml", "32768", "16384", "propose", "archs/test-cpu.toml: cpu.l1d_bytes 32768 -> 16384"),
        ("table.txt", "1 2 3", "1 2 4", "lower", "table.txt: its content"),
    ],
)
def test_a_clone_is_told_what_its_records_hold(clone: Space, file: str, old: str, new: str, kind: str, reason: str) -> None:
    clone.edit(file, old, new)
    assert reason in reasons(clone, kind).values()


def test_a_new_entry_in_a_clone_has_no_record(clone: Space) -> None:
    clone.write({"workloads.toml": clone.read("workloads.toml") + '\n[[workload]]\nname = "new"\nrule = "scale"\nn = 5\n'})
    assert reasons(clone, "lower") == {"new": "no record of new yet"}


NO_LOCKS = ("", "entry = 3", "[[entry]]\nname = 3\n", '[[entry]]\nkey = "0"\n', '[[entry]]\nname = "small@box"\nkey = 3\n', "\udc80")


@pytest.mark.parametrize("lock", [*NO_LOCKS, f"entry = {'[' * 5000}"], ids=lambda lock: lock[:40])
def test_a_lock_that_is_none_tells_nothing(clone: Space, lock: str) -> None:
    (clone.root / "workloads.lock").write_bytes(lock.encode(errors="surrogateescape"))
    clone.edit("workloads.toml", "n = 64", "n = 65")
    assert reasons(clone, "lower") == {"large": "no record of large yet"}


DAMAGES = ["", "[]", "{}", '{"schema": 1, "digests": {"a": 3}, "files": {}, "links": {}}', '{"schema": 9}', "[" * 9000]


@pytest.mark.parametrize("text", DAMAGES)
def test_what_files_meant_may_be_lost(fakes: Space, text: str) -> None:
    fakes.build()
    fakes.write({"cache/sources.json": text})
    fakes.edit("rules/scale.py", "Y[i]", "Y[j]")
    assert reasons(fakes, "lower")["small"] == "rules/scale.py: itself or a file that it imports"
    assert not fakes.build().build.failures
    fakes.edit("rules/scale.py", "Y[j]", "Y[k]")
    assert reasons(fakes, "lower")["small"] == "rules/scale.py: function Scale.lower"


def test_an_entry_that_was_not_built_since_is_told_of_all_edits_since(fakes: Space) -> None:
    fakes.build()
    fakes.edit("rules/scale.py", "Y[i]", "Y[j]")
    fakes.build(patterns=["small"])
    fakes.edit("rules/scale.py", "return self.n", "return 2 * self.n")
    found = reasons(fakes, "lower")
    assert found["small"] == "rules/scale.py: function Scale.flops"
    assert found["large"] == "rules/scale.py: function Scale.lower, rules/scale.py: function Scale.flops"


def test_what_a_plug_in_imports_is_named(fakes: Space) -> None:
    fakes.write({"rules/_shapes.py": "def half(n):\n    return n // 2\n\n\ndef twice(n):\n    return 2 * n\n"})
    rule = RULE.format(name="Scale").replace("return self.n\n", "return half(self.n)\n")
    fakes.write({"rules/scale.py": f"from ._shapes import half\n{rule}"})
    fakes.build()
    fakes.edit("rules/_shapes.py", "2 * n", "n * 2")
    assert reasons(fakes, "lower")["small"] == "rules/_shapes.py: function twice"


def told_of(space: Space) -> str:
    space.build()
    return space.command("why", "small").out


def test_what_a_policy_proposes_is_told_by_its_number(fakes: Space) -> None:
    fakes.build()
    fakes.write({"policies/simple.py": POLICY.replace("(1, 2, 4, 8)", "(2, 4)")})
    fakes.edit("workloads.toml", 'policy = "plain"', 'policy = "simple"')
    told = told_of(fakes)
    assert "candidates: of plain 3 -> (none)\n" in told
    assert "candidates: of simple (none) -> 2\n" in told
    fakes.edit("policies/simple.py", "(2, 4)", "(4, 2)")
    assert "candidates: others of simple, as many\n" in told_of(fakes)


def test_of_an_edited_rule_each_action_is_told_what_it_depends_on(fakes: Space) -> None:
    fakes.build()
    fakes.edit("rules/scale.py", "return self.n", "return 1 * self.n")
    fakes.edit("rules/scale.py", "return x *", "return 1 * x *")
    assert "lower: rules/scale.py: function Scale.flops\n  tune: rules/scale.py: function Scale.reference\n" in told_of(fakes)


def test_a_computation_that_changes_for_no_reason_that_is_known_is_told_as_another(fakes: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rule looks at what no rule should."""
    monkeypatch.setenv("WORD", "a")
    fakes.edit("rules/scale.py", 'return f"Y[i]', 'import os\n        return os.environ["WORD"] + f"Y[i]')
    fakes.build()
    monkeypatch.setenv("WORD", "b")
    for path in fakes.records("lower"):
        path.unlink()
    assert "tune: computation: another one\n" in told_of(fakes)


def test_a_plan_tells_what_a_tuning_takes(fakes: Space) -> None:
    fakes.build()
    small, large, tabled = ENTRIES.split("\n\n")
    fakes.write({"workloads.toml": f"{HEAD}{small}\ngeneration = 1\n\n{large}\ntolerance = 0.5\n\n{tabled}"})
    text = fakes.command("plan").out
    assert "workloads.toml: tolerance 0.0001 -> 0.5 [from records]" in text
    assert "workloads.toml: generation 0 -> 1 [compile, verify and measure 3 candidates at most]" in text
    fakes.build()
    fakes.edit("rules/scale.py", "return x *", "return 1 * x *")
    assert "rules/scale.py: function Scale.reference [verify the winner]" in fakes.command("plan").out
    assert "[verify the winner]" in fakes.command("why", "small").out
    assert fakes.command("build", runner=FakeRunner()).code == 0


def test_a_hundred_causes_are_told_in_part(fakes: Space) -> None:
    functions = "".join(f"def f{i}():\n    return 1\n\n\n" for i in range(30))
    fakes.write({"policies/plain.py": functions + fakes.read("policies/plain.py")})
    fakes.build()
    fakes.write({"policies/plain.py": fakes.read("policies/plain.py").replace("return 1", "return 2")})
    told = fakes.command("why", "small").out
    assert told.count("policies/plain.py: function f") == 20
    assert "and 10 more" in told
    assert "and 28 more" in fakes.command("plan").out
    assert len(json.loads(fakes.command("why", "small", "--json").out)["actions"][0]["causes"]) == 30
