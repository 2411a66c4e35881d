"""Owns the tests of what a build runs after which change: the design's table of keys, asked of a runner that counts.

Knows nothing of TVM: plug-ins are text, and the runner answers from it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tomli
from support.fakes import POLICY, RULE, TEMPLATE, Answer, DieRunner, FakeRunner, Request
from support.spaces import ENTRIES, FAKES, HEAD, Built, Space

from kerneldecl import flow
from kerneldecl.artifact import link
from kerneldecl.cli import report
from kerneldecl.cli.summary import build_json, build_text
from kerneldecl.errors import ArtifactError, LockHeldError, StaleError, ToolchainError
from kerneldecl.hardware import host
from kerneldecl.model import Cpu
from kerneldecl.planning.last_build import read_state
from kerneldecl.stages.conclude import INTERRUPTED
from kerneldecl.store.lock import exclusive
from kerneldecl.store.results import TuneResult
from kerneldecl.toolchain.versions import PACKAGES, PINS
from kerneldecl.tuning.events import Finished, Started, Step

ALL = frozenset({"small", "large", "tabled"})
NONE: frozenset[str] = frozenset()
CANDIDATES = 3

DOUBT = "; all candidates agree with each other and not with the reference: is reference() right?"


@dataclass(frozen=True)
class Change:
    """An edit of the workspace, and what it must cause: which entries are lowered, proposed for, tuned, compiled and measured."""

    edit: Callable[[Space], object]
    line: str
    """The manifest's line that an explanation must name; empty where nothing is to be done."""
    lowered: frozenset[str] = NONE
    tuned: frozenset[str] = NONE
    compiled: frozenset[str] = NONE
    """Entries of which every candidate is compiled."""
    measured: frozenset[str] = NONE
    """Entries of which every candidate is verified and timed."""
    linked: bool = True
    proposed: frozenset[str] | None = None
    """None: those of which candidates are compiled."""
    recalled: frozenset[str] = NONE
    """Entries that are tuned from records alone: no candidate is built."""
    verified: frozenset[str] = NONE
    """Entries whose winner alone is verified again."""


def toml(old: str, new: str) -> Callable[[Space], None]:
    return lambda space: space.edit("workloads.toml", old, new)


def arch(old: str, new: str) -> Callable[[Space], None]:
    return lambda space: space.edit("archs/test-cpu.toml", old, new)


def text(name: str, old: str, new: str) -> Callable[[Space], None]:
    return lambda space: space.edit(name, old, new)


def rename_rule(space: Space) -> None:
    space.write({"rules/times.py": RULE.format(name="Times")})
    space.write({"workloads.toml": space.read("workloads.toml").replace('"scale"', '"times"')})


def rename_policy(space: Space) -> None:
    space.write({"policies/simple.py": POLICY})
    space.edit("workloads.toml", 'policy = "plain"', 'policy = "simple"')


def rename_template(space: Space) -> None:
    space.write({"templates/cut.py": TEMPLATE, "policies/plain.py": POLICY.replace("unrolled", "cut")})


def reorder(space: Space) -> None:
    first, *rest = ENTRIES.split("[[workload]]")[1:]
    space.write({"workloads.toml": HEAD + "".join(f"[[workload]]{table}" for table in [*rest, first])})


def only(*names: str) -> frozenset[str]:
    return frozenset(names)


SMALL, SCALED = only("small"), only("small", "large")
CHANGES = {
    # What lowering depends on: computations that are new are tuned, compiled and measured.
    "extent": Change(toml("n = 64", "n = 65"), "attrs.n", *[only("large")] * 4),
    "attribute": Change(toml("factor = 3.0", "factor = 4.0"), "attrs.factor", *[only("large")] * 4),
    "dtype": Change(toml("n = 64", 'n = 64\ndtype = "float16"'), "attrs.dtype", *[only("large")] * 4),
    "default spelled out": Change(toml("n = 64", 'n = 64\ndtype = "float32"'), "", linked=False),
    "rule's code": Change(text("rules/scale.py", "X[i] * {self", "X[i] + {self"), "rule", *[SCALED] * 4),
    "rule's tolerance": Change(
        text("rules/scale.py", "    def flops", "    def tolerance(self):\n        return 0.25\n\n    def flops"),
        "search.tolerance",
        lowered=SCALED,
        tuned=SCALED,
        recalled=SCALED,
    ),
    "rule's reference": Change(
        text("rules/scale.py", "return x * self.factor", "return self.factor * x"), "search.reference", tuned=SCALED, verified=SCALED
    ),
    "rule's comment": Change(text("rules/scale.py", "    n: Extent", "    n: Extent  # elements"), "", linked=False),
    "rule's words": Change(text("rules/scale.py", "    n: Extent", "    n: 'Extent'"), "rule", SCALED, SCALED, verified=SCALED),
    "file's content": Change(text("table.txt", "1 2 3", "1 2 4"), "files.table", *[only("tabled")] * 4),
    "file's name": Change(
        lambda space: (shutil.copy(space.root / "table.txt", space.root / "copy.txt"), toml("table.txt", "copy.txt")(space)),
        "attrs.table",
        lowered=only("tabled"),
    ),
    # What tuning depends on. The same code is neither compiled nor measured twice.
    "top_k": Change(toml("n = 64", "n = 64\ntop_k = 2"), "top_k", proposed=only("large"), tuned=only("large"), recalled=only("large")),
    "tolerance": Change(toml("n = 64", "n = 64\ntolerance = 0.01"), "search.tolerance", tuned=only("large"), recalled=only("large")),
    "generation": Change(toml("n = 64", "n = 64\ngeneration = 1"), "search.generation", tuned=only("large"), measured=only("large")),
    "policy's comment": Change(text("policies/plain.py", "UNROLLS =", "# factors\nUNROLLS ="), "", linked=False),
    "policy's words": Change(text("policies/plain.py", "(1, 2, 4, 8)", "(1, 2, 4, 2 * 4)"), "policies.plain", proposed=ALL, linked=False),
    "policy's order": Change(
        text("policies/plain.py", "(1, 2, 4, 8)", "(4, 2, 1, 8)"), "candidates.1.plain", proposed=ALL, tuned=ALL, recalled=ALL
    ),
    "policy's choice": Change(
        text("policies/plain.py", "(1, 2, 4, 8)", "(3, 5, 7)"), "candidates.1.plain", tuned=ALL, compiled=ALL, measured=ALL
    ),
    "policy's name": Change(rename_policy, "policies.simple", proposed=ALL, tuned=ALL, recalled=ALL),
    "template's comment": Change(text("templates/unrolled.py", "def", "# by hand\ndef"), "", linked=False),
    "template's words": Change(text("templates/unrolled.py", "def", "BY_HAND = 1\ndef"), "templates.unrolled", tuned=ALL),
    "template's code": Change(
        text("templates/unrolled.py", "times", "fold"), "templates.unrolled", tuned=ALL, compiled=ALL, measured=ALL, proposed=NONE
    ),
    "template's name": Change(rename_template, "templates.cut", proposed=ALL, tuned=ALL),
    # An arch's figures steer policies. Its model and its cores stand for a machine, its target is the compiler's business.
    "arch's cores": Change(arch("cores = 2\nvector", "cores = 1\nvector"), "arch.cores", proposed=ALL, tuned=ALL, measured=ALL),
    "arch's figure": Change(arch("fma_per_cycle = 2.0", "fma_per_cycle = 1.0"), "arch.cpu.fma_per_cycle", proposed=ALL, linked=False),
    "arch's target": Change(arch('"x86-64-v2"', '"x86-64-v3"'), "arch.target.mcpu", tuned=ALL, compiled=ALL, measured=ALL),
    "arch's model": Change(
        arch('model = ""', f"model = {json.dumps(host.detect().model)}"), "arch.model", proposed=ALL, tuned=ALL, measured=ALL
    ),
    "arch's comment": Change(arch("[cpu]", "# figures\n[cpu]"), "", linked=False),
    # Another compiler may yield the same code, which is known then.
    "toolchain's tvm": Change(toml("[target", '[toolchain]\ntvm = "9"\n[target'), "toolchain.tvm", ALL, ALL, ALL, proposed=NONE),
    "toolchain's tvm_ffi": Change(
        toml("[target", '[toolchain]\ntvm_ffi = "9"\n[target'), "toolchain.tvm_ffi", tuned=ALL, compiled=ALL, proposed=NONE
    ),
    # What only the artifact holds.
    "artifact's name": Change(toml('"fakes"', '"kernels"'), "artifact.name"),
    "artifact's version": Change(toml('"1.0"', '"1.1"'), "artifact.version"),
    "entry's name": Change(toml('"small"', '"tiny"'), "entries.tiny"),
    "entry's tags": Change(toml("n = 64", 'n = 64\ntags = ["fast"]'), "entries.large"),
    "rule's name": Change(rename_rule, "entries.small", SCALED, SCALED, verified=SCALED),
    "entry removed": Change(lambda space: space.write({"workloads.toml": HEAD + ENTRIES.rpartition("[[")[0]}), "entries.tabled"),
    # What is in no key. A CPU's kernels have nothing to do with CUDA.
    "toolchain's cuda": Change(toml("[target", '[toolchain]\ncuda = "9"\n[target'), "", linked=False),
    "order": Change(reorder, "", linked=False),
    "comments and white space": Change(toml("n = 64", "  n =\t64   # elements\n\n\n"), "", linked=False),
    "a rule that nobody uses": Change(lambda space: space.write({"rules/other.py": RULE.format(name="Other")}), "", linked=False),
}


TOLD = {
    "extent": "workloads.toml: n 64 -> 65",
    "attribute": "workloads.toml: factor 3.0 -> 4.0",
    "dtype": 'workloads.toml: dtype "float32" -> "float16"',
    "rule's code": "rules/scale.py: function Scale.lower",
    "rule's tolerance": "rules/scale.py: function Scale.tolerance",
    "rule's reference": "rules/scale.py: function Scale.reference",
    "rule's words": "rules/scale.py: class Scale",
    "rule's name": "rules/times.py: instead of rules/scale.py",
    "file's content": "table.txt: its content",
    "file's name": 'workloads.toml: table "table.txt" -> "copy.txt"',
    "top_k": "workloads.toml: top_k 3 -> 2",
    "tolerance": "workloads.toml: tolerance 0.0001 -> 0.01",
    "generation": "workloads.toml: generation 0 -> 1",
    "policy's words": "policies/plain.py: constant UNROLLS",
    "policy's order": "policies/plain.py: constant UNROLLS",
    "policy's choice": "policies/plain.py: constant UNROLLS",
    "policy's name": "policies of simple: simple is asked",
    "template's words": "templates/unrolled.py: constant BY_HAND",
    "template's code": "templates/unrolled.py: function apply",
    "template's name": "policies/plain.py: function propose",
    "arch's cores": "archs/test-cpu.toml: cpu.cores 2 -> 1",
    "arch's figure": "archs/test-cpu.toml: cpu.fma_per_cycle 2.0 -> 1.0",
    "arch's target": 'archs/test-cpu.toml: target.mcpu "x86-64-v2" -> "x86-64-v3"',
    "arch's model": f'archs/test-cpu.toml: model "" -> {json.dumps(host.detect().model)}',
    "toolchain's tvm": f'toolchain: tvm "{metadata.version("apache-tvm")}" -> "9"',
    "toolchain's tvm_ffi": f'toolchain: tvm_ffi "{metadata.version("apache-tvm-ffi")}" -> "9"',
    "artifact's name": 'workloads.toml: artifact.name "fakes" -> "kernels"',
    "artifact's version": 'workloads.toml: artifact.version "1.0" -> "1.1"',
    "entry's name": "entry tiny: was small",
    "entry's tags": "entry large: tags",
    "entry removed": "entry tabled: is gone",
}
"""What is told of each change that causes anything."""


@pytest.fixture(autouse=True)
def any_toolchain(monkeypatch: pytest.MonkeyPatch, fakes: Space) -> None:
    """Have whatever toolchain is declared be the installed one."""
    tools = {package: tool for tool, package in PACKAGES.items()}

    def declared(package: str) -> str:
        tool = tools[package]
        return str(tomli.loads(fakes.read("workloads.toml")).get("toolchain", {}).get(tool, PINS[tool]))

    monkeypatch.setattr(metadata, "version", declared)


@pytest.fixture(scope="module")
def built_fakes(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace that is up to date, to be copied."""
    root = tmp_path_factory.mktemp("fakes")
    space = Space(root).write(FAKES)
    assert not space.build().build.failures
    return space


def names_of(space: Space, cases: set[str]) -> frozenset[str]:
    """Return the names of the entries whose rule and attributes a runner was asked about."""
    if not cases:
        return NONE
    declared = {json.dumps([w.rule, dict(w.attrs)], sort_keys=True): w.name for w in space.open().declaration.workloads}
    return frozenset(declared[case] for case in cases)


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_causes_what_the_design_says(built_fakes: Space, fakes: Space, what: str) -> None:
    change = CHANGES[what]
    for folder in ("cache", "dist"):
        shutil.copytree(built_fakes.root / folder, fakes.root / folder)
    change.edit(fakes)
    explained = explained_lines(fakes)
    built = fakes.build()
    runner = built.runner
    assert isinstance(runner, FakeRunner)
    assert not built.build.failures
    assert names_of(fakes, runner.cases("lower")) == change.lowered
    assert {entry.partition("@")[0] for kind, entry in built.ran if kind == "tune"} == change.tuned
    assert runner.compiled == CANDIDATES * len(change.compiled) + recompiled(change)
    assert {entry.partition("@")[0] for kind, entry in built.ran if kind == "propose"} == proposed(change)
    assert names_of(fakes, runner.cases("build")) == change.tuned - change.recalled
    assert names_of(fakes, runner.cases("verify", "prepare")) == change.measured | change.verified
    assert names_of(fakes, runner.cases("sample")) == change.measured
    assert runner.counts["verify"] == CANDIDATES * len(change.measured) + len(change.verified)
    assert built.links == change.linked
    # The plan before the build, or the plans during it, name the line; so does what is kept for `why` afterwards.
    state = read_state(fakes.root / "cache" / "state.json")
    kept = {line[0] for actions in state.why.values() for action in actions for line in action["changed"]}
    assert change.line in explained | kept | {""}
    told = {str(cause) for action in built.build.ran for cause in action.causes}
    assert TOLD.get(what, "") in told | {""}
    assert (what in TOLD) == bool(change.line)
    assert not [text for text in told if re.search("[0-9a-f]{12}", text)], "nobody can read digests"
    assert fakes.build(DieRunner()).links == 0


FIGURES = {
    "cores": ("2\nvector", "1\nvector"),
    "vector_bytes": ("16", "8"),
    "vector_registers": ("16", "15"),
    "fma_per_cycle": ("2.0", "1.0"),
    "l1d_bytes": ("32768", "16384"),
    "l2_bytes": ("262144", "131072"),
    "l3_bytes": ("0", "1048576"),
    "line_bytes": ("64", "32"),
    "clock_hz": ("2.0e9", "1.0e9"),
    "l1_bytes_per_cycle": ("32.0", "16.0"),
    "l2_bytes_per_cycle": ("32.0", "16.0"),
    "l3_bytes_per_cycle": ("16.0", "8.0"),
    "dram_bytes_per_s": ("1.0e10", "2.0e10"),
    "parallel_secs": ("5.0e-6", "6.0e-6"),
}


def test_each_of_an_archs_figures_is_part_of_the_key(built_fakes: Space, fakes: Space) -> None:
    """What a change of a figure causes is told above; here that no figure is overlooked: every entry is to be tuned, and told why."""
    for folder in ("cache", "dist"):
        shutil.copytree(built_fakes.root / folder, fakes.root / folder)
    assert set(FIGURES) == {field.name for field in fields(Cpu)}
    for name, (old, new) in FIGURES.items():
        arch(f"{name} = {old}", f"{name} = {new}")(fakes)
        assert {action.entry.partition("@")[0] for action in fakes.plan().misses if action.kind == "tune"} == ALL, name
        assert f"arch.cpu.{name}" in explained_lines(fakes)
        arch(f"{name} = {new}", f"{name} = {old}")(fakes)


def recompiled(change: Change) -> int:
    """Return how often code that is known is compiled again: to be measured once more, else for the winner's object alone."""
    known = change.tuned - change.compiled - change.recalled
    return CANDIDATES * len(known & change.measured) + len(known - change.measured)


def proposed(change: Change) -> frozenset[str]:
    return change.compiled if change.proposed is None else change.proposed


def explained_lines(space: Space) -> set[str]:
    plan, last = space.plan(), read_state(space.root / "cache" / "state.json")
    told = [report.why_json(entry, plan.links[0], last, "", {}) for entry in plan.entries]
    return {line[0] for json in told for action in json["actions"] for line in action["changed"] if json["pending"]}


# Sharing


def two_entries(space: Space, **second: object) -> Space:
    """Declare two entries that differ in their names, and in what is given for the second."""
    table = {"name": "second", "rule": "scale", "n": 8, **second}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items())
    return space.write({"workloads.toml": f'{HEAD}\n[[workload]]\nname = "first"\nrule = "scale"\nn = 8\n\n[[workload]]\n{lines}'})


def test_one_computation_under_two_names_is_tuned_once(fakes: Space) -> None:
    built = two_entries(fakes).build()
    assert (built.counts["lower"], built.counts["compile"], built.counts["verify"]) == (1, CANDIDATES, CANDIDATES)
    manifest = json.loads((fakes.artifact("box") / "manifest.json").read_text())
    assert [entry["name"] for entry in manifest["entries"]] == ["first", "second"]
    assert len({entry["symbol"] for entry in manifest["entries"]}) == 1
    assert fakes.build(DieRunner()).links == 0


def test_one_computation_from_two_rules_is_tuned_once(fakes: Space) -> None:
    """The rules differ in words, and in their names."""
    fakes.write({"rules/double.py": f"AUTHOR = 'another'\n{RULE.format(name='Double')}"})
    built = two_entries(fakes, rule="double").build()
    # Each rule's own reference judges the winner.
    assert (built.counts["lower"], built.counts["sample"], built.counts["verify"]) == (2, CANDIDATES, CANDIDATES + 1)


def test_one_computation_for_a_detected_and_a_declared_arch_has_a_record_in_each_part_of_the_store(fakes: Space) -> None:
    fakes.edit("workloads.toml", "[defaults]", '[target.host]\narch = "host"\n\n[defaults]')
    built = fakes.build()
    assert not built.build.failures
    assert {path.parent.name for path in (fakes.root / "dist").glob("*/*/manifest.json")} == {"box", "host"}
    places = {(path.parts[-3], path.parts[-2]) for kind in ("lower", "tune") for path in fakes.records(kind)}
    assert places == {("record", "lower"), ("record", "tune"), ("local", "lower"), ("local", "tune")}
    assert fakes.build(DieRunner()).links == 0


@pytest.mark.parametrize("widths", [(1, 3), (3, 1)])
def test_two_searches_of_one_computation_make_one_kernel_that_both_entries_tell_of(fakes: Space, widths: tuple[int, int]) -> None:
    """One symbol can stand for one kernel only: the better one, whichever entry found it."""
    sizes = "n = [8, 9, 10, 11, 12, 13, 14, 15]"
    two_entries(fakes, top_k=widths[1]).edit("workloads.toml", "n = 8\n\n", f"{sizes}\ntop_k = {widths[0]}\n\n")
    fakes.edit("workloads.toml", "n = 8\n", f"{sizes}\n")
    built = fakes.build()
    found: dict[str, set[float]] = {}
    for entry in built.build.plan.entries:
        assert entry.tuned is not None
        found.setdefault(entry.tuned.symbol, set()).add(entry.tuned.run_secs)
    assert max(map(len, found.values())) == 2, "searching further must have paid somewhere"
    for entry in json.loads((fakes.artifact("box") / "manifest.json").read_text())["entries"]:
        assert entry["run_secs"] == min(found[entry["symbol"]])


def test_a_kernel_that_two_entries_share_is_within_the_tolerance_of_both(fakes: Space) -> None:
    """The looser search finds a faster kernel, which the stricter one has refused."""
    fakes.edit("templates/unrolled.py", "unrolled", "{'wrong' if params['unroll'] != 4 else 'unrolled'}")
    assert not two_entries(fakes, tolerance=0.9).build().build.failures
    entries = json.loads((fakes.artifact("box") / "manifest.json").read_text())["entries"]
    assert [entry["winner"]["params"] for entry in entries] == [{"unroll": 4}] * 2
    assert [entry["verdict"]["tolerance"] for entry in entries] == [1e-4, 0.9]


@pytest.mark.parametrize("entries", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_one_of_many_entries_is_compiled_and_linked_alone(fakes: Space, entries: int) -> None:
    """Ten tables of the same sizes: a tenth as many computations as entries, so that the test is quick."""
    sizes = ", ".join(str(n) for n in range(1, entries // 10 + 1))
    tables = "".join(f'\n[[workload]]\nname = "table_{i}"\nrule = "scale"\nn = [{sizes}]\ntop_k = 2\n' for i in range(9))
    last = f'\n[[workload]]\nname = "last"\nrule = "scale"\ntop_k = 2\nn = [{sizes}, 1000]\n'.replace("[1, ", "[")
    fakes.write({"workloads.toml": HEAD + tables + last})
    assert len(fakes.build().build.plan.entries) == entries
    fakes.edit("workloads.toml", ", 1000]", ", 5000]")
    built = fakes.build()
    asked = {name: count for name, count in built.counts.items() if name != "measured_peaks"}
    assert asked == {"lower": 1, "propose": 1, "compile": 2, "prepare": 1, "verify": 2, "sample": 2, "confirm": 1, "describe": 1}
    changed = json.dumps(["scale", {"dtype": "float32", "factor": 2.0, "n": 5000, "table": ""}], sort_keys=True)
    assert built.runner.cases("lower", "build", "verify") == {changed}  # type: ignore[union-attr]
    assert built.links == 1


# Early cut-off


def test_a_candidate_that_is_new_is_compiled_and_measured_alone(fakes: Space) -> None:
    fakes.build()
    fakes.edit("policies/plain.py", "(1, 2, 4, 8)", "(2, 16, 4)")
    built = fakes.build()
    assert built.counts["verify"] == built.counts["sample"] == 3
    assert built.counts["compile"] <= 2 * 3, "one is new in each entry, and a winner's object may be made again"


def test_a_winner_that_stays_does_not_link_anything_else(fakes: Space) -> None:
    fakes.build()
    before = fakes.artifact_files()
    fakes.edit("policies/plain.py", "(1, 2, 4, 8)", "(4, 2, 1, 8)")
    fakes.build()
    changed = {name.rpartition("/")[2] for name, digest in fakes.artifact_files().items() if before.get(name) != digest}
    assert changed == {"manifest.json"}, "it names the records, which have other keys"


# Failures


def test_a_failed_candidate_is_kept_with_its_reason_and_others_win(fakes: Space) -> None:
    fakes.edit("templates/unrolled.py", "unrolled", "{'wrong' if params['unroll'] == 1 else 'unrolled'}")
    fakes.edit("templates/unrolled.py", "    return", "    if params['unroll'] == 2:\n        return None\n    return")
    assert not fakes.build().build.failures
    for path in fakes.records("tune"):
        result = json.loads(path.read_text())["result"]
        failures = {m["candidate"]["params"]["unroll"]: m.get("failure") for m in result["trials"]}
        assert failures == {1: "wrong: relative error 0.5 over 0.0001", 2: "the template does not apply", 4: None, 8: None}
        assert result["winner"]["params"]["unroll"] in {4, 8}


def test_a_crash_is_not_remembered_but_a_verdict_is(fakes: Space) -> None:
    """A candidate that crashed may have met a machine without memory: the next search tries it again."""
    fakes.edit("templates/unrolled.py", "unrolled", "{['', 'crashing', 'wrong', '', 'unrolled'][params['unroll']]}")
    fakes.build()
    fakes.edit("policies/plain.py", "(1, 2, 4, 8)", "(4, 2, 1, 8)")
    counts = fakes.build().counts
    assert counts["verify"] == 3


@pytest.mark.parametrize("how_often", [1, 2])
@pytest.mark.parametrize("failure", ["its process was killed by SIGKILL", "took more than 20 s"])
def test_what_the_machine_fails_at_is_tried_again_and_not_held_against_the_candidate(fakes: Space, failure: str, how_often: int) -> None:
    class Killed(FakeRunner):
        left = how_often

        def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
            if request["action"] == "verify" and "unrolled 2 times" in Path(request["library"]).read_text() and self.left:
                self.left -= 1
                return {"failure": failure}
            return super()._answer(request)

    assert not fakes.build(Killed(), patterns=["small"]).build.failures
    (path,) = fakes.records("tune")
    result = json.loads(path.read_text())["result"]
    assert (result["measured"], result["wanted"]) == ((3, 3) if how_often == 1 else (2, 3))
    assert not any("failure" in trial for trial in result["trials"])


def failing(fakes: Space) -> Space:
    """Have every candidate of the entries `small` and `tabled` be wrong."""
    fakes.edit("templates/unrolled.py", "unrolled", "{'wrong' if '(8,)' in mod else 'unrolled'}")
    return fakes


def test_an_entry_without_a_verified_candidate_fails_with_counts_and_the_others_are_kept(fakes: Space) -> None:
    built = failing(fakes).build(keep_going=True)
    reason = "none of 3 candidates passed: wrong: relative error 0.5 over 0.0001" + DOUBT
    assert built.build.failures == {"small@box": reason, "tabled@box": reason}
    assert len(fakes.records("tune")) == 1
    failed = [event for event in built.events if isinstance(event, Finished) and event.has_failed]
    assert {(event.entry, event.text) for event in failed} == set(built.build.failures.items())
    # What succeeded is not done again; what failed is.
    again = fakes.build(keep_going=True)
    assert names_of(fakes, again.runner.cases("build")) == {"small", "tabled"}  # type: ignore[union-attr]
    assert (again.counts["compile"], again.counts["verify"]) == (0, 0), "objects and verdicts are known"


def manifest_of(fakes: Space) -> dict[str, Any]:
    manifest: dict[str, Any] = fakes.json("dist/fakes-1.0/box/manifest.json")
    return manifest


def test_an_artifact_is_linked_without_the_entries_that_failed(fakes: Space) -> None:
    built = failing(fakes).build()
    assert built.links == 1
    manifest = manifest_of(fakes)
    assert [entry["name"] for entry in manifest["entries"]] == ["large"]
    assert manifest["missing"] == {name.removesuffix("@box"): reason for name, reason in built.build.failures.items()}
    assert fakes.build().links == 0, "nothing has changed"


def test_an_incomplete_artifact_is_never_up_to_date(fakes: Space) -> None:
    done = failing(fakes).command("build", runner=FakeRunner())
    assert done.code == 1
    assert "artifact for box" in done.out
    assert "without the failed entries" in done.out
    again = fakes.command("build", runner=FakeRunner())
    assert (again.code, again.links) == (1, 0)
    assert fakes.command("check", "--stale").code == 3
    for command in (["plan"], ["why", "small@box"], ["show", "small@box"]):
        assert "it failed in the last build: none of 3 candidates passed" in fakes.command(*command).out


def test_a_mended_entry_joins_the_artifact(fakes: Space) -> None:
    before = fakes.read("templates/unrolled.py")
    failing(fakes).build()
    fakes.write({"templates/unrolled.py": before})
    assert fakes.command("build", runner=FakeRunner()).code == 0
    manifest = manifest_of(fakes)
    assert manifest["missing"] == {}
    assert [entry["name"] for entry in manifest["entries"]] == ["large", "small", "tabled"]
    assert fakes.command("build").code == 0, "and then nothing runs"
    explained = {action["kind"]: action["changed"] for action in read_state(fakes.root / "cache/state.json").why["box"]}
    assert ["missing.small", '"none of 3 candidates passed: wrong: relative error 0.5 over 0.0001' + DOUBT + '"', None] in explained["link"]


def test_an_entry_that_fails_leaves_an_artifact_that_was_complete(fakes: Space) -> None:
    fakes.command("build", runner=FakeRunner())
    complete = fakes.artifact_files()
    text = fakes.read("workloads.toml")
    fakes.edit("workloads.toml", "factor = 3.0", "factor = 0.0")
    assert fakes.command("build", runner=FakeRunner()).code == 1
    assert [entry["name"] for entry in manifest_of(fakes)["entries"]] == ["small", "tabled"]
    # The stamp of the complete build must not speak for the artifact that lacks an entry.
    fakes.write({"workloads.toml": text})
    assert fakes.command("build", runner=FakeRunner()).links == 1
    assert fakes.artifact_files() == complete


def test_all_entries_can_be_required(fakes: Space) -> None:
    assert failing(fakes).command("build", "--require-all", runner=FakeRunner()).code == 1
    assert not (fakes.root / "dist").exists()
    assert not (fakes.root / "workloads.lock").exists()


def test_where_every_entry_fails_there_is_no_artifact(fakes: Space) -> None:
    fakes.edit("templates/unrolled.py", "unrolled", "wrong")
    assert fakes.command("build", runner=FakeRunner()).code == 1
    assert not (fakes.root / "dist").exists()


def test_entries_that_were_not_asked_for_are_not_missing(fakes: Space) -> None:
    """They have not failed in this build: an artifact without them would be a surprise."""
    assert fakes.build(patterns=["large"]).links == 0


def test_a_locked_build_passes_over_what_the_lock_holds_as_missing(fakes: Space) -> None:
    failing(fakes).build()
    fresh = fakes.copy_of(fakes.root / "fresh", "workloads.lock", "cache/record")
    locked_build = fresh.command("build", "--locked", runner=FakeRunner())
    assert (locked_build.code, locked_build.links) == (1, 1), locked_build.err
    fakes.edit("templates/unrolled.py", "'wrong' if '(8,)' in mod else ", "")
    with pytest.raises(StaleError, match=r"workloads\.lock would change"):
        fakes.build(locked=True)


def test_fail_fast_ends_with_the_first_failure(fakes: Space) -> None:
    built = failing(fakes).build(keep_going=False)
    assert set(built.build.failures) == {"small@box"}
    assert names_of(fakes, built.runner.cases("build")) == {"small"}  # type: ignore[union-attr]


def test_an_entry_that_cannot_be_lowered_fails_alone(fakes: Space) -> None:
    fakes.edit("workloads.toml", "factor = 3.0", "factor = 0.0")
    built = fakes.build(keep_going=True)
    assert built.build.failures == {"large@box": "lowering failed: ValueError: nothing to compute"}
    assert len(fakes.records("tune")) == 2


def test_an_entry_that_is_tuned_and_fails_afterwards_counts_once(fakes: Space) -> None:
    built = fakes.build(keep_going=True)
    built.build.failures["small@box"] = "no kernel of other numbers of rows"
    found = build_json(built.build)
    assert "small@box" not in {winner["entry"] for winner in found["winners"]}
    assert build_text(found).splitlines()[-1].startswith("3 entries: 2 tuned, 1 failed")


def test_one_failure_is_told_of_every_entry_that_shares_it(fakes: Space) -> None:
    fakes.edit("templates/unrolled.py", "unrolled", "wrong")
    assert set(two_entries(fakes).build(keep_going=True).build.failures) == {"first@box", "second@box"}


def test_a_budget_that_allows_no_candidate_is_a_failure_of_its_own(fakes: Space) -> None:
    fakes.edit("workloads.toml", "n = 64", "n = 64\nbudget = { seconds = 1e-9 }")
    found = fakes.build(keep_going=True).build.failures
    assert found == {"large@box": "its budget was spent before a candidate was measured; give it more `seconds`, or none"}


def test_a_policy_without_proposals_is_a_failure(fakes: Space) -> None:
    fakes.edit("policies/plain.py", "(1, 2, 4, 8)", "()")
    assert set(fakes.build(keep_going=True).build.failures.values()) == {"no policy proposes a candidate for it"}


def test_a_declared_cpu_that_is_not_here_is_linked_unmeasured_unless_measurements_are_required(fakes: Space) -> None:
    fakes.edit("archs/test-cpu.toml", 'model = ""', 'model = "Cray-1"')
    required = fakes.build(keep_going=True, require_measured=True)
    reason = f"it must be measured on Cray-1; this is {host.detect().model}"
    assert all(failure.startswith(f"{reason}; measure it there: ") for failure in required.build.failures.values())
    assert set(required.build.failures) == {"small@box", "large@box", "tabled@box"}
    built = fakes.build()
    assert not built.build.failures
    assert built.counts["measure"] == 0
    assert all(entry.tuned and not entry.tuned.is_measured for entry in built.build.plan.entries)


def test_other_tools_than_the_declared_ones_run_nothing(fakes: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.1")
    with pytest.raises(ToolchainError, match=r"workloads.toml asks for tvm \S+, but apache-tvm 0.1 is installed"):
        fakes.build(DieRunner())


def test_a_toolchain_that_is_not_installed_is_named(fakes: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ToolchainError, match="apache-tvm is not installed"):
        fakes.build(DieRunner())


def test_workers_start_before_they_are_asked_where_something_is_to_be_tuned(fakes: Space, tmp_path: Path) -> None:
    """On a CPU one entry is tuned after the other."""
    tuning, making = FakeRunner(), FakeRunner()
    fakes.build(tuning)
    assert tuning.started == CANDIDATES
    fakes.copy_of(tmp_path / "clone", "cache/record", "cache/local").build(making)
    assert making.counts["compile"] == 3
    assert not making.started
    shutil.rmtree(fakes.root / "dist")
    assert fakes.build(DieRunner()).links == 1


# Records without blobs, blobs without sense


def test_objects_are_made_from_records_where_blobs_are_gone(fakes: Space, tmp_path: Path) -> None:
    fakes.build()
    clone = fakes.copy_of(tmp_path / "clone", "cache/record", "cache/local")
    built = clone.build()
    assert {kind for kind, _ in built.ran} == {"build", "link"}
    assert (built.counts["compile"], built.counts["verify"]) == (3, 0)
    assert clone.artifact_files() == fakes.artifact_files()


def test_objects_are_not_made_while_the_artifact_is_whole(fakes: Space) -> None:
    fakes.build()
    shutil.rmtree(fakes.root / "cache" / "blob")
    assert fakes.build(DieRunner()).links == 0


@pytest.mark.parametrize("content", [b"", b"other"])
def test_damaged_blobs_are_made_again_when_they_are_needed(fakes: Space, content: bytes) -> None:
    fakes.build()
    before = fakes.artifact_files()
    for path in (fakes.root / "cache" / "blob").glob("*/*"):
        path.write_bytes(content)
    shutil.rmtree(fakes.root / "dist")
    built = fakes.build()
    assert not built.build.failures
    assert fakes.artifact_files() == before


def test_building_some_entries_links_nothing_that_lacks_others_objects(fakes: Space) -> None:
    fakes.build()
    before = fakes.artifact_files()
    for folder in ("dist", "cache/blob"):
        shutil.rmtree(fakes.root / folder)
    assert fakes.build(patterns=["small"]).links == 0
    assert fakes.build(patterns=["large", "tabled"]).links == 1
    assert fakes.artifact_files() == before


def test_a_record_that_gives_another_object_is_refused(fakes: Space) -> None:
    """As after a change of what no key holds: the compiler's environment, say."""
    fakes.build()
    store = fakes.open().store
    entry = fakes.plan().entries[0]
    assert entry.tuned is not None
    path = store.record_path("tune", entry.tuned.key, is_local=False)
    path.unlink()
    store.write("tune", entry.action("tune").manifest, {**entry.tuned.json, "object": "0" * 64}, is_local=False)
    failures = fakes.build(keep_going=True).build.failures
    assert failures == {
        "small@box": "the recorded winner gives another object here; --retune small@box or a higher `generation` tunes it again",
    }


def test_a_damaged_record_is_tuned_again_and_the_plan_says_why(fakes: Space) -> None:
    fakes.build()
    path = fakes.records("tune")[0]
    path.write_bytes(path.read_bytes()[:-100])
    (miss,) = [action for action in fakes.plan().misses if action.kind == "tune"]
    assert "is not JSON" in miss.reason
    assert fakes.build().counts["verify"] == 0, "its measurements are there"


# Locks


def locked(fakes: Space) -> None:
    fakes.build(DieRunner(), locked=True)


def test_a_locked_build_that_changes_nothing_passes(fakes: Space) -> None:
    fakes.build()
    locked(fakes)
    shutil.rmtree(fakes.root / "dist")
    assert fakes.build(DieRunner(), locked=True).links == 1


@pytest.mark.parametrize(
    "edit",
    [
        toml("n = 64", "n = 65"),
        toml("n = 64", "n = 64\ntop_k = 2"),
        toml('"small"', '"tiny"'),
        toml('"1.0"', '"1.1"'),
        lambda space: (space.root / "workloads.lock").unlink(),
        lambda space: space.edit("workloads.lock", "small@box", "small@vox"),
        lambda space: [path.unlink() for path in space.records("tune")],
    ],
)
def test_a_locked_build_stops_before_anything_is_tuned_if_the_lock_would_change(fakes: Space, edit: Callable[[Space], object]) -> None:
    fakes.build()
    edit(fakes)
    before, runner = fakes.artifact_files(), FakeRunner()
    with pytest.raises(StaleError, match=r"workloads\.lock would change"):
        fakes.build(runner, locked=True)
    assert runner.counts.keys() <= {"lower", "propose"}
    assert runner.started == 0
    assert fakes.artifact_files() == before


@pytest.mark.parametrize(
    "edit",
    [
        text("rules/scale.py", "    n: Extent", "    n: Extent  # elements"),
        text("policies/plain.py", "(1, 2, 4, 8)", "(1, 2, 4, 2 * 4)"),
        text("archs/test-cpu.toml", "fma_per_cycle = 2.0", "fma_per_cycle = 1.0"),
    ],
)
def test_a_locked_build_passes_where_the_same_is_proposed(fakes: Space, edit: Callable[[Space], object]) -> None:
    fakes.build()
    edit(fakes)
    built = fakes.build(locked=True)
    assert not built.build.failures
    assert built.counts.keys() <= {"propose"}
    assert built.links == 0


def test_a_build_that_does_not_want_to_wait_names_the_holder(fakes: Space) -> None:
    with (
        exclusive(fakes.root / "cache" / "tune.lock", "tuning in this workspace", print),
        pytest.raises(LockHeldError, match=r"process \d+ on .* is tuning in this workspace"),
    ):
        fakes.build(wait=False)


# Progress


def test_progress_is_reported_from_start_to_finish(fakes: Space) -> None:
    events = fakes.build().events
    assert events[0] == Started(entries=3, lower=3, tune=3, build=3)
    steps = [event for event in events if isinstance(event, Step) and event.entry == "small@box"]
    assert [(step.done, step.total) for step in steps if step.doing == "built"] == [(1, 3), (2, 3), (3, 3)]
    assert [(step.done, step.total) for step in steps if step.doing == "verified"] == [(1, 3), (2, 3), (3, 3)]
    best = [step.best_secs for step in steps if step.doing == "verified"]
    assert best == sorted(best, reverse=True)  # type: ignore[type-var]
    finished = [(event.kind, event.entry) for event in events if isinstance(event, Finished)]
    assert finished == [("tune", "small@box"), ("tune", "large@box"), ("tune", "tabled@box"), ("link", "box")]


def test_the_stages_are_a_visible_tuple_in_the_order_of_the_design() -> None:
    assert [stage.__name__ for stage in flow.STAGES] == [
        "check_lock",
        "check_toolchain",
        "tune_as_proposed",
        "lower_entries",
        "exchange",
        "propose_entries",
        "exchange",
        "check_lock",
        "tune_entries",
        "rebuild_objects",
        "write_headers",
        "choose_rows",
        "link_artifacts",
        "write_lock",
    ]


def test_a_blob_that_vanishes_under_the_linker_is_an_error_that_says_what_to_do(fakes: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.build()
    shutil.rmtree(fakes.root / "dist")
    links = link.link

    def after_a_clean_up(*args: object) -> None:
        shutil.rmtree(fakes.root / "cache" / "blob")
        links(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(link, "link", after_a_clean_up)
    with pytest.raises(ArtifactError, match="build again to make it"):
        fakes.build()
    assert not list((fakes.root / "dist").rglob("manifest.json"))


def test_tuning_records_tell_where_and_when(fakes: Space) -> None:
    built: Built = fakes.build()
    tuned = built.build.plan.entries[0].tuned
    assert isinstance(tuned, TuneResult)
    assert set(tuned.provenance) == {"date", "host", "kernel"}


def test_the_candidates_of_a_failed_entry_are_shown_with_their_reasons(fakes: Space) -> None:
    fakes.edit("templates/unrolled.py", 'times"', "times\" + ' wrong' * ('* 3.0' in mod)")
    done = fakes.command("build", runner=FakeRunner())
    assert done.code == 1
    assert "`kerneldecl show 'large@box'` says what became of its candidates" in done.out
    shown = fakes.command("show", "large")
    assert shown.code == 0
    assert shown.out.count("wrong: relative error 0.5 over 0.0001") == 1 + 3, "the reason, and each candidate's"
    assert "unrolled(unroll=4)" in shown.out
    found = json.loads(fakes.command("show", "large", "--json").out)
    assert [candidate["error"] for candidate in found["candidates"]] == [0.5] * 3
    assert "lists its candidates" not in fakes.command("show", "small").out


# Tuned again on request


def test_retune_measures_what_is_up_to_date_and_nothing_else(fakes: Space) -> None:
    fakes.command("build", runner=FakeRunner())
    before, records = fakes.artifact_files(), {path.name for path in fakes.records("tune")}
    runner = FakeRunner()
    done = fakes.command("build", "--retune", "small", runner=runner)
    assert done.code == 0, done.err
    assert names_of(fakes, runner.cases("verify")) == names_of(fakes, runner.cases("sample")) == {"small"}
    assert (runner.counts["verify"], runner.counts["sample"]) == (CANDIDATES, CANDIDATES)
    assert "3 entries: 1 tuned, 2 up to date in " in done.out
    assert {path.name for path in fakes.records("tune")} == records
    assert fakes.artifact_files() == before, "times are those that they were"
    assert fakes.command("build").code == 0, "once is enough"


def test_retune_is_for_entries_that_patterns_leave_out_too(fakes: Space) -> None:
    fakes.build()
    runner = FakeRunner()
    assert fakes.command("build", "large", "--retune", "small", runner=runner).code == 0
    assert names_of(fakes, runner.cases("verify")) == {"small"}


class Faulty(FakeRunner):
    """Finds every kernel wrong."""

    def _answer(self, request: Request) -> Answer:
        answer = super()._answer(request)
        return {**answer, "error": 0.5} if request["action"] == "verify" else answer


def test_verdicts_of_a_machine_at_fault_are_found_out_again(fakes: Space) -> None:
    """No key holds that the machine was at fault, so they are remembered as the candidates' own."""
    failed = fakes.command("build", runner=Faulty())
    assert failed.code == 1
    assert "kerneldecl build --retune ENTRY" in failed.out
    assert fakes.command("build", runner=FakeRunner()).code == 1
    shown = fakes.command("show", "small").out
    assert "  failed  unrolled(unroll=1)  wrong: relative error 0.5 over 0.0001" in shown
    assert "kerneldecl build --retune small@box" in shown
    assert fakes.command("build", "--retune", "*", runner=FakeRunner()).code == 0
    assert fakes.command("build").code == 0


def test_an_entry_that_is_wrong_when_tuned_again_is_linked_no_more(fakes: Space) -> None:
    fakes.command("build", runner=FakeRunner())
    assert fakes.command("build", "--retune", "small", runner=Faulty()).code == 1
    assert [entry["name"] for entry in manifest_of(fakes)["entries"]] == ["large", "tabled"]
    assert fakes.command("build", runner=FakeRunner()).code == 1


@pytest.mark.parametrize("other", ["--locked", "--no-measure"])
def test_retune_says_what_it_does_not_go_with(fakes: Space, other: str) -> None:
    refused = fakes.command("build", "--retune", "small", other)
    assert refused.code == 2
    assert f"leave out {other}" in refused.err


def test_what_was_measured_elsewhere_is_not_tuned_again_here(fakes: Space) -> None:
    fakes.edit("archs/test-cpu.toml", 'model = ""', 'model = "another machine"')
    refused = fakes.command("build", "--retune", "small")
    assert refused.code == 10
    assert "small@box cannot be tuned again here: it must be measured on another machine" in refused.err


def test_an_interrupted_build_links_what_is_tuned_and_the_next_one_goes_on(tmp_path: Path) -> None:
    space, runner = Space(tmp_path).write(FAKES), FakeRunner()
    first = space.build(runner, is_interrupted=lambda: runner.counts["sample"] > 0)  # type: ignore[arg-type]  # a function of the options
    assert first.build.failures.keys() == {"large@box", "tabled@box"}
    assert set(first.build.failures.values()) == {INTERRUPTED}
    assert list(first.build.artifacts) == ["box"]
    assert len(space.records("tune")) == 1
    assert not (space.root / "workloads.lock").exists()
    again = space.build()
    assert again.counts["sample"] == 2 * CANDIDATES
    assert not again.build.failures
    assert (space.root / "workloads.lock").exists()


def test_a_search_that_is_cut_is_linked_and_not_recorded(tmp_path: Path) -> None:
    space, runner = Space(tmp_path).write(FAKES), FakeRunner()
    space.edit("workloads.toml", 'policy = "plain"', 'policy = ["plain", "more"]')
    space.write({"policies/more.py": POLICY})
    first = space.build(runner, ["small"], is_interrupted=lambda: runner.counts["sample"] > 0)  # type: ignore[arg-type]  # a function
    assert len(first.build.interim) == 1
    assert not first.build.failures
    assert not space.records("tune")
    (record,) = first.build.interim.values()
    assert len(record.result["trials"]) == CANDIDATES
    again = space.build(patterns=["small"])
    assert len(space.records("tune")) == 1
    # The other list has the same candidates: nothing is timed but the last race, of all that both have found.
    assert again.counts["verify"] == 0
    assert again.counts["sample"] <= CANDIDATES
