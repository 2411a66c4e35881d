"""Owns the tests of the short ways to "nothing to do": what they see, what they import, what they must not overlook.

Knows nothing of what a full plan finds, except that the short ways must agree with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fakes import ARCH, POLICY, RULE, TEMPLATE, FakeLinker, FakeRunner
from support.spaces import FAKES, Space, clean_environment
from support.thinned import second

from kerneldecl import api
from kerneldecl.null_build.quick_plan import quick_plan
from kerneldecl.null_build.stamp import STAMP, context, is_fresh, restamp, surroundings

Edit = Callable[[Space], object]
HEAVY = {"tvm", "tvm_ffi", "numpy", "pydantic", "rich", "click", "filelock", "tomli", "psutil", "ml_dtypes"}
IMPORTS = """
import sys
sys.argv = ["kerneldecl", *sys.argv[1:]]
from kerneldecl.__main__ import main
code = main()
print(" ".join(sorted({name.partition(".")[0] for name in sys.modules})))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace that is complete, to be copied."""
    imports = "from ._lanes import LANES\nfrom .deep.more import MORE\n"
    space = Space(tmp_path_factory.mktemp("fresh")).write(FAKES)
    space.write({"policies/_lanes.py": "LANES = (1, 2, 4, 8)\n", "policies/deep/more.py": "MORE = ()\n"})
    space.write({"policies/plain.py": imports + POLICY.replace("(1, 2, 4, 8)", "LANES + MORE")})
    unused = "\n\ndef unused():\n    import near.more\n"
    space.write({"templates/_words.py": 'TIMES = "times"\n', "templates/unrolled.py": f"from ._words import TIMES\n{TEMPLATE}{unused}"})
    space.write({"near/more.py": "MORE = 1\n"})
    assert space.command("build", runner=FakeRunner()).code == 0
    return space


@pytest.fixture
def built(built_once: Space, fakes: Space) -> Space:
    """Return a workspace of one's own that is complete; its stamp is of its own files."""
    shutil.rmtree(fakes.root)
    shutil.copytree(built_once.root, fakes.root)
    assert fakes.command("build").code == 0
    assert is_fresh(str(fakes.root)) == 3
    return fakes


def modules_of(space: Space, *arguments: str) -> tuple[str, set[str]]:
    command = [sys.executable, "-c", IMPORTS, *arguments]
    done = subprocess.run(command, cwd=space.root, env=clean_environment(), capture_output=True, text=True, check=True)
    *out, modules = done.stdout.splitlines()
    return "\n".join(out), set(modules.split())


@pytest.mark.parametrize("arguments", [["build"], ["build", "--locked"], ["-q", "build"], ["build", "-q"]])
def test_a_null_build_imports_nothing_heavy(built: Space, arguments: list[str]) -> None:
    out, modules = modules_of(built, *arguments)
    assert modules & HEAVY == set()
    assert out == ("" if "-q" in arguments else "3 entries: 3 up to date")


@pytest.mark.parametrize(
    "arguments", [["plan"], ["plan", "--json"], ["build"], ["check"], ["check", "--stale"], ["why", "small"], ["show"]]
)
def test_nothing_that_only_reads_imports_tvm_or_numpy(built: Space, arguments: list[str]) -> None:
    built.edit("workloads.toml", 'name = "small"', 'name = "small" # a comment')
    _, modules = modules_of(built, *arguments)
    assert modules & {"tvm", "tvm_ffi", "numpy", "rich"} == set()


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, kerneldecl; print(' '.join(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(), capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} & HEAVY == set()


def test_an_edit_in_a_nested_folder_of_the_package_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    deep = package / "policies" / "shared" / "traffic.py"
    deep.parent.mkdir(parents=True)
    deep.write_text("A = 1\n", encoding="utf-8")
    monkeypatch.setattr("kerneldecl.null_build.stamp._PACKAGE", str(package))
    before = context(str(tmp_path), ())
    deep.write_text("A = 12\n", encoding="utf-8")
    assert context(str(tmp_path), ()) != before


def first(pattern: str) -> Callable[[Space], Path]:
    return lambda space: min(space.root.glob(pattern))


def append(name: str, text: str = "# more\n") -> Edit:
    return lambda space: space.write({name: space.read(name) + text})


def rewrite(pattern: str) -> Edit:
    """Write the same bytes again: who did it may have done more."""
    return lambda space: first(pattern)(space).write_bytes(first(pattern)(space).read_bytes())


def truncate(pattern: str) -> Edit:
    return lambda space: os.truncate(first(pattern)(space), 10)


def remove(pattern: str) -> Edit:
    return lambda space: first(pattern)(space).unlink()


def backdated(pattern: str) -> Edit:
    """Change a byte and set size and time back to what they were."""

    def edit(space: Space) -> None:
        path = first(pattern)(space)
        status, content = path.stat(), path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return edit


def stamp(pattern: str, line: str) -> Edit:
    """Change the lines of the stamp that match."""

    def edit(space: Space) -> None:
        text, count = re.subn(pattern, line, space.read(STAMP), flags=re.MULTILINE)
        assert count
        space.write({STAMP: text})

    return edit


CHANGES: dict[str, Edit] = {
    "workloads.toml edited": append("workloads.toml"),
    "workloads.toml removed": remove("workloads.toml"),
    "lock edited": append("workloads.lock"),
    "lock removed": remove("workloads.lock"),
    "rule edited": append("rules/scale.py"),
    "rule removed": remove("rules/scale.py"),
    "rule added that shadows": lambda space: space.write({"rules/matmul.py": RULE.format(name="Matmul")}),
    "neighbour added that shadows": lambda space: space.write({"rules/shared/precision.py": ""}),
    "file of an attribute edited": append("table.txt"),
    "file of an attribute removed": remove("table.txt"),
    "policy edited": append("policies/plain.py"),
    "neighbour of a policy edited": append("policies/_lanes.py"),
    "file below a policy edited": append("policies/deep/more.py"),
    "template edited": append("templates/unrolled.py"),
    "neighbour of a template edited": append("templates/_words.py"),
    "what a template imports from elsewhere edited": append("near/more.py"),
    "arch edited": append("archs/test-cpu.toml"),
    "arch added": lambda space: space.write({"archs/other.toml": ARCH}),
    "record truncated": truncate("cache/record/tune/*.json"),
    "record removed": remove("cache/record/tune/*.json"),
    "record added": lambda space: shutil.copy(first("cache/record/tune/*.json")(space), space.root / "cache/record/tune/0.json"),
    "record written again": rewrite("cache/record/tune/*.json"),
    "record changed and backdated": backdated("cache/record/tune/*.json"),
    "records removed": lambda space: shutil.rmtree(space.root / "cache/record"),
    "library changed and backdated": backdated("dist/*/box/lib/*.so"),
    "library touched": rewrite("dist/*/box/lib/*.so"),
    "library removed": remove("dist/*/box/lib/*.so"),
    "database truncated": truncate("dist/*/box/database/database_workload.json"),
    "manifest touched": rewrite("dist/*/box/manifest.json"),
    "objects and sources removed": remove("dist/*/box/kernels.zip"),
    "objects and sources changed and backdated": backdated("dist/*/box/kernels.zip"),
    "artifact removed": lambda space: shutil.rmtree(space.root / "dist"),
    "stamp removed": remove(STAMP),
    "stamp cut off": truncate(STAMP),
    "stamp of no sense": lambda space: space.write({STAMP: "nonsense"}),
    "stamp empty": lambda space: space.write({STAMP: ""}),
    "stamp of another schema": stamp("^stamp .*", "stamp 99"),
    "stamp without folders": stamp("^folder .*\n", ""),
    "stamp of other folders": stamp("^folder .*", "folder dist/other"),
    "stamp with folders of no sense": stamp("^folder .*", "folder a\\0b"),
    "stamp that names a folder as a file": stamp("^extra .*", "extra rules"),
    "stamp with many entries": stamp("^entries .*", "entries many"),
    "stamp with two numbers of entries": stamp("^entries .*", "entries 3\nentries 4"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_is_seen(built: Space, what: str) -> None:
    time.sleep(0.01)  # the clock of files has ticks of a few milliseconds
    CHANGES[what](built)
    assert is_fresh(str(built.root)) is None


@pytest.mark.parametrize(
    "what", second(what for what in CHANGES if what.startswith(("stamp", "artifact", "library", "database", "objects", "record", "lock")))
)
def test_after_damage_the_next_build_is_complete_and_the_one_after_it_is_null(built: Space, what: str) -> None:
    before = built.artifact_files(), built.read("workloads.lock")
    time.sleep(0.01)
    CHANGES[what](built)
    done = built.command("build", runner=FakeRunner())
    assert done.code == 0, done.err
    assert is_fresh(str(built.root)) == 3
    assert (built.artifact_files(), built.read("workloads.lock")) == before


def test_times_of_declarations_do_not_matter(built: Space) -> None:
    for name in ("workloads.toml", "workloads.lock", "rules/scale.py", "policies/plain.py", "table.txt"):
        os.utime(built.root / name)
    assert is_fresh(str(built.root)) == 3


def test_what_nobody_depends_on_does_not_matter(built: Space) -> None:
    built.write({"notes.txt": "x", "rules/README.md": "x", "dist/fakes-0.9/box/manifest.json": "{}", "cache/record/README.md": "x"})
    assert is_fresh(str(built.root)) == 3


@pytest.mark.parametrize("edit", [append("workloads.toml"), append("workloads.toml", "\n\n"), remove("cache/state.json")])
def test_comments_take_the_second_short_way_and_then_the_first(built: Space, edit: Edit) -> None:
    edit(built)
    done = built.command("build")
    assert (done.code, done.out, done.links) == (0, "3 entries: 3 up to date\n", 0)
    assert is_fresh(str(built.root)) == 3


def test_a_comment_is_seen_for_what_it_is_without_a_full_plan(built: Space) -> None:
    append("workloads.toml")(built)
    assert restamp(str(built.root), 3) == 3
    assert is_fresh(str(built.root)) == 3


@pytest.mark.parametrize("name", ["rules/scale.py", "policies/plain.py", "archs/test-cpu.toml", "table.txt"])
def test_a_new_stamp_is_not_given_for_other_sources(built: Space, name: str) -> None:
    append(name)(built)
    assert restamp(str(built.root), 3) == 0


@pytest.mark.parametrize("kind", ["local/tune", "local/rank"])
def test_records_of_this_machine_are_watched_too(built: Space, kind: str) -> None:
    folder = built.root / "cache" / kind
    folder.mkdir(parents=True, exist_ok=True)
    assert built.command("build").code == 0
    (folder / "0.json").write_text("{}")
    assert is_fresh(str(built.root)) is None


CPU_INFO = (
    "processor : {at}\ncpu MHz : {mhz}\nmodel name : {model}\nbogomips : {mhz}\ncore id : {at}\napicid : {at}\ninitial apicid : {at}\n"
)


def machine(monkeypatch: pytest.MonkeyPatch, limit: str = "max", **fields: str) -> str:
    """Return the digest of a machine's description, as it may be read from one moment to the next."""
    told = {"at": "0", "mhz": "2000.0", "model": "a", **fields}
    files = {"/proc/cpuinfo": CPU_INFO.format(**told).encode(), "/sys/fs/cgroup/cpu.max": limit.encode()}
    monkeypatch.setattr("kerneldecl.null_build.stamp._content", lambda path: files.get(path, b""))
    return surroundings()


def test_another_machine_is_seen_and_another_reading_of_the_same_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine(monkeypatch)
    assert machine(monkeypatch, mhz="3000.0") == before
    assert machine(monkeypatch, at="1") == before, "the lines of a core may come in another order"
    assert machine(monkeypatch, model="b") != before
    assert machine(monkeypatch, limit="100000 100000") != before


def test_bytecode_is_no_change_of_the_package_and_each_edit_of_a_file_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python puts bytecode beside modules when they are first imported, which happens while a first build runs."""
    monkeypatch.setattr("kerneldecl.null_build.stamp._PACKAGE", str(tmp_path))
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "module.py").write_text("a = 1\n")
    before = surroundings()
    for folder in (tmp_path, tmp_path / "room"):
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "module.pyc").write_bytes(b"")
    assert surroundings() == before
    (tmp_path / "room" / "module.py").write_text("a = 2\n")
    edited = surroundings()
    (tmp_path / "room" / "other.py").touch()
    added = surroundings()
    (tmp_path / "room" / "other.py").unlink()
    assert len({before, edited, added}) == 3
    assert surroundings() == edited


def test_a_new_stamp_is_not_given_for_a_new_lock(built: Space) -> None:
    """The command knows then that the text declares what it did; it does not know what became of the lock."""
    append("workloads.lock")(built)
    assert restamp(str(built.root), 3) == 0


# The quick plan must agree with the full one.


def both_plans(space: Space) -> tuple[object, object]:
    quick = json.loads(space.command("plan", "--json").out)
    memo = space.root / "cache" / "memo.json"
    content = memo.read_bytes()
    memo.unlink()
    full = json.loads(space.command("plan", "--json").out)
    memo.write_bytes(content)
    return quick, full


def states(plan: object) -> list[tuple[str, ...]]:
    return sorted((a["workload"], a["target"], a["kind"], a["state"], a["reason"]) for a in plan["actions"])  # type: ignore[index]


@pytest.mark.parametrize(
    "edit",
    [
        lambda _: None,
        append("workloads.toml"),
        lambda space: space.edit("workloads.toml", "n = 64", "n = 65"),
        lambda space: space.edit("workloads.toml", "n = 64", "n = [64, 65]"),
        lambda space: space.edit("workloads.toml", '"small"', '"tiny"'),
        lambda space: space.edit("workloads.toml", "n = 64", 'n = 64\ntags = ["fast"]'),
        lambda space: space.edit("workloads.toml", '"1.0"', '"1.1"'),
        lambda space: space.edit("workloads.toml", "n = 64", "n = 64\ntop_k = 1"),
        append("workloads.toml", '[[workload]]\nname = "more"\nrule = "scale"\nn = 8\n'),
        append("table.txt"),
        append("rules/scale.py"),
        append("policies/deep/more.py"),
        rewrite("cache/record/tune/*.json"),
        remove("cache/record/tune/*.json"),
        remove("dist/*/box/lib/*.so"),
        truncate("dist/*/box/lib/*.so"),
        rewrite("dist/*/box/lib/*.so"),
        truncate("cache/memo.json"),
        lambda space: shutil.rmtree(space.root / "dist"),
    ],
)
def test_the_quick_plan_says_what_the_full_plan_says(built: Space, edit: Edit) -> None:
    time.sleep(0.01)
    edit(built)
    quick, full = both_plans(built)
    assert states(quick) == states(full)


@pytest.mark.parametrize(
    ("edit", "is_quick"),
    [
        (lambda _: None, True),
        (append("workloads.toml"), True),
        (lambda space: space.edit("workloads.toml", "n = 64", "n = [64, 65]"), True),
        (lambda space: space.edit("workloads.toml", '"small"', '"tiny"'), True),
        (remove("dist/*/box/lib/*.so"), True),
        (lambda space: space.edit("workloads.toml", "n = 64", "n = 0"), False),
        (append("workloads.toml", "= =\n"), False),
        (lambda space: space.edit("workloads.toml", '"large"', '"small"'), False),
        (lambda space: space.edit("workloads.toml", '"1.0"', '"1.1"'), False),
        (append("rules/scale.py"), False),
        (remove("cache/record/tune/*.json"), False),
    ],
    ids=["nothing", "comment", "extent", "name", "library", "mistake", "no TOML", "one name twice", "version", "rule", "record"],
)
def test_the_quick_plan_is_made_where_the_memo_holds_and_only_there(built: Space, edit: Edit, is_quick: bool) -> None:
    time.sleep(0.01)
    edit(built)
    assert (quick_plan(built.root) is not None) == is_quick


def test_tables_on_one_line_are_told_apart(fakes: Space) -> None:
    """An array of inline tables gives no line for each."""
    head = fakes.read("workloads.toml").partition("[[workload]]")[0].replace("[artifact]", "WORKLOADS[artifact]")
    tables = 'workload = [{name = "a", rule = "scale", n = 8}, {name = "b", rule = "scale", n = 9}]\n'
    fakes.write({"workloads.toml": head.replace("WORKLOADS", tables)})
    done = fakes.command("build", runner=FakeRunner())
    assert done.code == 0, done.err
    again = fakes.command("build")
    assert (again.code, again.out) == (0, "2 entries: 2 up to date\n")
    fakes.edit("workloads.toml", "n = 9", "n = 10")
    quick, full = both_plans(fakes) if (fakes.root / "cache/memo.json").exists() else (fakes.run_json("plan"),) * 2
    assert states(quick) == states(full)


def test_a_build_during_which_the_file_is_edited_leaves_no_stamp(fakes: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = FakeRunner._answer

    def answer_late(runner: FakeRunner, request: dict[str, object]) -> dict[str, object]:
        if request["action"] == "lower" and "# edited" not in fakes.read("workloads.toml"):
            append("workloads.toml", "# edited\n")(fakes)
        return answer(runner, request)

    monkeypatch.setattr(FakeRunner, "_answer", answer_late)
    assert fakes.command("build", runner=FakeRunner()).code == 0
    assert is_fresh(str(fakes.root)) is None


def test_nor_does_one_from_python_that_reads_the_workspace_itself(fakes: Space) -> None:
    """It plans with the file as it was, and would stamp the file as it is."""
    runner, workspace = FakeRunner(), fakes.open()
    append("workloads.toml", "# edited\n")(fakes)
    linkers = dict.fromkeys(("cpu", "cuda"), FakeLinker())
    done = api.run_build(workspace, (), api.Options(), lambda _: None, runners=lambda: contextlib.nullcontext(runner), linkers=linkers)
    assert not done.failures
    assert is_fresh(str(fakes.root)) is None
    assert quick_plan(fakes.root) is None


def test_a_stamp_is_of_kerneldecl_as_it_was_when_the_build_began(built: Space) -> None:
    with api.frozen_workspace(built.root) as now:
        for workspace, entries in ((dataclasses.replace(now, surroundings="another version"), None), (now, 3)):
            linkers = dict.fromkeys(("cpu", "cuda"), FakeLinker())
            assert not api.run_build(workspace, (), api.Options(), lambda _: None, linkers=linkers).failures
            assert is_fresh(str(built.root)) == entries


def test_a_build_of_some_entries_leaves_no_stamp(fakes: Space) -> None:
    assert fakes.command("build", "small", runner=FakeRunner()).code == 0
    assert is_fresh(str(fakes.root)) is None


def test_there_is_nothing_fresh_about_no_workspace(tmp_path: Path) -> None:
    assert is_fresh(str(tmp_path)) is None
    assert is_fresh(str(tmp_path / "nowhere")) is None
