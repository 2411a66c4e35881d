"""Owns the tests of the real command from init to verify: exit codes, what is printed where, and the shape of JSON.

Knows nothing of how results come about.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.spaces import REAL, Space, clean_environment
from support.thinned import at

from kerneldecl.hardware.host import detect

SMALL_INIT = {"m = [16, 512]": "m = [4, 8]", "n = 512": "n = 16", "k = 512": "k = 8", "top_k = 20": "top_k = 2"}
ENTRIES = {"add[shape=24x32]@host", "add[shape=7x9]@host", "relu@host", "gemm@host"}


def test_from_init_to_verify(space: Space) -> None:
    """One workspace through every command, as its owner would go."""
    wrote = space.run("init")
    assert "wrote workloads.toml" in wrote.stdout
    assert "there is one already" in space.run_here("init", code=2).stderr
    for old, new in SMALL_INIT.items():
        space.edit("workloads.toml", old, new)

    assert space.run_here("check").stdout == "2 entries declared, no mistakes\n"
    stale = space.run_here("check", "--stale", code=3)
    assert "2 out of date: projection[m=4]@host, projection[m=8]@host" in stale.stderr

    planned = space.run_json_here("plan")
    assert planned["summary"] == {"hit": 0, "miss": 9}
    assert {tuple(sorted(action)) for action in planned["actions"]} == {
        ("causes", "key", "kind", "reason", "state", "steps", "target", "workload")
    }
    assert [a["kind"] for a in planned["actions"]] == ["lower", "propose", "tune", "build"] * 2 + ["link"]
    assert not (space.root / "dist").exists(), "a plan runs nothing"

    built = space.run("build")
    assert "2 entries: 2 tuned in " in built.stdout
    tuned = [line for line in built.stderr.splitlines() if line.startswith("tuned [")]
    assert [line[:9] for line in tuned] == ["tuned [1/", "tuned [2/"]
    before = space.artifact_files()

    again = space.run("build")
    assert (again.stdout, again.stderr) == ("2 entries: 2 up to date\n", "")
    assert space.run("build", "--locked").stdout == again.stdout
    assert space.artifact_files() == before
    assert space.run_json_here("plan")["summary"] == {"hit": 9, "miss": 0}
    space.run_here("check", "--stale")

    verified = space.run_json("verify")
    assert [(entry["name"], entry["ok"]) for entry in verified["artifacts"][0]["entries"]] == [
        ("projection[m=4]", True),
        ("projection[m=8]", True),
    ]


@pytest.fixture(scope="module")
def shown(built_real: Space, tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace that is up to date, for commands that change nothing."""
    return built_real.copy_of(tmp_path_factory.mktemp("shown") / "real", "cache", "dist", "workloads.lock")


def test_show_tells_of_every_candidate(shown: Space) -> None:
    json_ = shown.run_json_here("show", "gemm")
    assert (json_["schema"], json_["entry"], json_["rule"], json_["policy"]) == (1, "gemm@host", "matmul", "plain")
    assert json_["flops"] == 2 * 16 * 24 * 32
    assert json_["least_bytes"] == 4 * (16 * 32 + 32 * 24 + 16 * 24)
    assert len(json_["candidates"]) == 2
    for candidate in json_["candidates"]:
        assert candidate["verdict"] == "verified"
        assert candidate["gflop_per_s"] == pytest.approx(json_["flops"] / candidate["run_secs"] / 1e9)
        assert 0 <= candidate["error"] <= json_["tolerance"]
    text = shown.run_here("show", "gemm").stdout
    assert "all plain\n" in text
    assert {line.split()[-1] for line in text.splitlines() if " us " in line} == {"0", "1"}
    assert "2 verified, 0 failed" in text


def test_show_and_query_list_entries(shown: Space) -> None:
    assert {entry["entry"] for entry in shown.run_json_here("show")["entries"]} == ENTRIES
    found = shown.run_json_here("query", "tag:activation")["entries"]
    assert [(entry["entry"], entry["rule"], entry["tags"]) for entry in found] == [("relu@host", "elementwise", ["activation"])]
    assert set(found[0]["keys"]) == {"lower", "propose", "tune", "build"}
    _, *lines = shown.run_here("query", "add*").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["add[shape=24x32]@host", "add[shape=7x9]@host"]


def test_why_tells_of_the_last_build_that_ran_something(shown: Space) -> None:
    reason = shown.run_json_here("why", "relu")
    assert (reason["entry"], reason["pending"]) == ("relu@host", False)
    assert [action["kind"] for action in reason["actions"]][:2] == ["lower", "propose"]
    assert "is up to date. The last build that ran something for it:" in shown.run_here("why", "relu").stdout


def test_why_says_which_rule_shadows_a_standard_one(real: Space) -> None:
    from kerneldecl.plugins.find import plugin_file

    standard = plugin_file("rules", real.root, "elementwise")
    (real.root / "rules").mkdir()
    shutil.copy(standard, real.root / "rules")
    assert real.run_json_here("why", "relu")["shadows"] == str(standard)


def test_stats_count_the_store(shown: Space) -> None:
    stats = shown.run_json_here("cache", "stats")
    counts = {row["kind"]: row["count"] for row in stats["kinds"]}
    assert (counts["local/lower"], counts["local/tune"], stats["damaged"]) == (4, 4, [])
    assert counts["blob"] == len(list((shown.root / "cache/blob").glob("*/*")))
    assert shown.run_here("cache", "stats").stdout.endswith("0 damaged\n")


def test_the_schema_describes_this_workspaces_rules(shown: Space) -> None:
    schema = json.loads(shown.run_here("schema").stdout)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert "matmul" in json.dumps(schema)


def test_the_doctor_looks_at_tools_and_machine(shown: Space) -> None:
    rows = {row["name"]: row for row in shown.run_json_here("doctor")["checks"]}
    assert {"python", "tvm", "tvm_ffi", "tvm with tvm_ffi", "C++ compiler", "host", "disk"} <= rows.keys()
    assert rows["tvm with tvm_ffi"]["is_ok"]
    assert detect().model in rows["host"]["found"]


def test_the_doctor_imports_nothing_from_the_working_folder(real: Space) -> None:
    """A clone may hold a tvm.py; `-P` is what the installed command does, which Python starts by its own path."""
    trap = "import pathlib; pathlib.Path('trapped').touch(); raise SystemExit(__name__)\n"
    real.write({f"{name}.py": trap for name in ("tvm", "tvm_ffi", "numpy", "ml_dtypes", "psutil", "pydantic")})
    environment = {**clean_environment(), "PYTHONSAFEPATH": ""}
    done = subprocess.run([sys.executable, "-P", "-m", "kerneldecl", "doctor"], cwd=real.root, env=environment, check=False)
    assert done.returncode == 0
    assert not (real.root / "trapped").exists()


def test_a_machine_without_a_compiler_is_told_what_to_do(shown: Space, tmp_path: Path) -> None:
    done = shown.run_here("doctor", code=10, PATH=str(tmp_path))
    assert "C++ compiler" in done.stdout
    assert "apt-get install g++" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["build", "nothing*"], 4, "no entry matches"),
        (["show", "rellu"], 4, 'did you mean "relu"?'),
        (["why", "gemm@gpu"], 4, "gemm is declared for host"),
        (["frobnicate"], 2, "No such command"),
        (["build", "--jobs", "0"], 2, "--jobs"),
        (["-C", "/nowhere", "plan"], 2, "no such file"),
        (["verify", "/nowhere"], 6, ""),
    ],
)
def test_every_way_to_fail_has_its_exit_code(shown: Space, arguments: list[str], code: int, words: str) -> None:
    done = shown.run_here(*arguments, code=code)
    assert words in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_mistakes_are_all_told_and_nothing_is_written(space: Space) -> None:
    space.write({"workloads.toml": REAL["workloads.toml"].replace('"relu"\nshape', '"rellu"\nshape').replace("m = 16", "m = 0")})
    before = sorted(path for path in space.root.rglob("*"))
    done = space.run_here("build", code=2)
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: workloads.toml:")]) >= 2
    assert 'did you mean "relu"' in done.stderr
    assert sorted(path for path in space.root.rglob("*")) == before


@pytest.mark.parametrize("command", at({0, 2}, [["build"], ["plan"], ["show"], ["check", "--stale"], ["why", "relu"], ["query", "relu"]]))
def test_it_works_from_anywhere(shown: Space, command: list[str], tmp_path: Path) -> None:
    elsewhere = Space(tmp_path)
    expected = shown.run_here(*command).stdout
    assert elsewhere.run_here("-C", str(shown.root), *command).stdout == expected
    assert elsewhere.run_here(*command, "-C", os.path.relpath(shown.root, tmp_path)).stdout == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_quiet_is_quiet_and_colour_is_for_terminals(real: Space) -> None:
    real.edit("workloads.toml", "shape = [[24, 32], [7, 9]]", "shape = [[24, 32], [7, 10]]")
    quiet = real.run("build", "-q", FORCE_COLOR="")
    assert (quiet.stdout, quiet.stderr) == ("", "")
    real.edit("workloads.toml", "[7, 10]", "[7, 11]")
    assert "\x1b" not in real.run("build", "--color", "never").stderr


def test_changing_one_shape_runs_exactly_its_actions(real: Space) -> None:
    before = {path: path.read_bytes() for path in (real.root / "cache/local").rglob("*.json")}
    real.edit("workloads.toml", "m = 16", "m = 17")
    pending = real.run_json_here("plan")
    misses = [(a["workload"], a["kind"]) for a in pending["actions"] if a["state"] == "miss"]
    assert misses == [("gemm", "lower"), ("gemm", "propose"), ("gemm", "tune"), ("gemm", "build"), ("", "link")]
    assert next(a["reason"] for a in pending["actions"] if a["state"] == "miss") == "workloads.toml: m 16 -> 17"
    explained = real.run_here("why", "gemm").stdout
    assert "lower: workloads.toml: m 16 -> 17" in explained
    done = real.run_here("build")
    assert "4 entries: 1 tuned, 3 up to date in " in done.stdout
    assert all(path.read_bytes() == content for path, content in before.items())
    added = [path.parent.name for path in (real.root / "cache/local").rglob("*.json") if path not in before]
    assert sorted(added) == ["build", "build", "link", "lower", "measure", "measure", "propose", "tune"]
    assert real.run_json_here("verify")["artifacts"][0]["exit_code"] == 0


def test_renaming_an_entry_only_links(real: Space) -> None:
    real.edit("workloads.toml", '"relu"\nrule', '"rectify"\nrule')
    done = real.run_here("build")
    assert done.stderr.splitlines() == ["linked host: dist/mini-0.1.0/host"]
    assert re.match(r"artifact for host: dist/mini-0.1.0/host\n4 entries: 4 up to date in .*; next: kerneldecl.load", done.stdout)


@pytest.mark.slow
def test_a_comment_in_a_rule_tunes_nothing(real: Space) -> None:
    from kerneldecl.plugins.find import plugin_file

    source = plugin_file("rules", real.root, "elementwise").parent
    (real.root / "rules" / "shared").mkdir(parents=True)
    for path in [*source.glob("shared/*.py"), source / "elementwise.py"]:
        (real.root / "rules" / path.relative_to(source)).write_text(f"{path.read_text()}\n# a comment\n")
    before = real.artifact_files()
    done = real.run("build")
    assert "tuned" not in done.stderr
    assert real.artifact_files() == before


def test_a_damaged_artifact_is_found_and_linked_again(real: Space) -> None:
    before = real.artifact_files()
    library = next(real.artifact().glob("lib/*.so"))
    library.write_bytes(library.read_bytes()[:100])
    assert "has other content than its manifest says" in real.run_here("verify", code=6).stdout
    assert real.run_here("build").stderr.splitlines() == ["linked host: dist/mini-0.1.0/host"]
    assert real.artifact_files() == before
    real.run_here("verify")


def test_a_kernel_that_is_wrong_is_found(real: Space, tmp_path: Path) -> None:
    """The files match the manifest, but the manifest describes other kernels."""
    from kerneldecl.artifact.manifest import with_digest

    folder = shutil.copytree(real.artifact(), tmp_path / "artifact")
    manifest = json.loads((folder / "manifest.json").read_text())
    add = next(entry for entry in manifest["entries"] if entry["name"] == "add[shape=24x32]")
    add["attrs"]["op"] = "mul"
    (folder / "manifest.json").write_bytes(with_digest(manifest))
    done = real.run_here("verify", str(folder), code=7)
    assert "WRONG  add[shape=24x32]" in done.stdout
    assert "3 of 4 kernels correct" in done.stdout


@pytest.mark.slow
def test_two_builds_from_the_same_records_are_byte_equal(built_real: Space, tmp_path: Path) -> None:
    clones = [built_real.copy_of(tmp_path / name, "cache/record", "cache/local") for name in ("first", "a/deeper/second")[:1]]
    clones.append(built_real.copy_of(tmp_path / "another" / "place", "cache/record", "cache/local"))
    for clone in clones:
        done = clone.run("build")
        assert "4 entries: 4 built in " in done.stdout
        assert "tuned" not in done.stderr
    assert clones[0].artifact_files() == clones[1].artifact_files() == built_real.artifact_files()
