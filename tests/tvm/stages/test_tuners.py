"""Owns the tests of tuners end to end on this CPU: real kernels, built, verified and timed, whatever killed the build before.

Knows nothing of which candidates are fast.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.spaces import Space

import kerneldecl

WORKSPACE = """
edition = 1

[artifact]
name = "tuned"
version = "1"

[target.host]
arch = "host"

[[workload]]
name = "mm"
rule = "matmul"
m = 24
n = 32
k = 16
top_k = 2
policy = POLICY
"""


Make = Callable[[str], Space]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(policy: str) -> Space:
        space = Space(tmp_path)
        return space.write({"workloads.toml": WORKSPACE.replace("POLICY", policy)})

    return made


def trials_of(space: Space) -> list[dict[str, Any]]:
    """Return the trials of the entry's newest tuning."""
    return tuned(space)["trials"]  # type: ignore[no-any-return]


def tuned(space: Space) -> dict[str, Any]:
    """Return the newest tune record's result."""
    newest = max(space.records("tune"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(newest.read_text(encoding="utf-8"))["result"]  # type: ignore[no-any-return]


def measured(space: Space) -> dict[str, int]:
    """Return when each kernel was measured, by its record's name."""
    return {path.name: path.stat().st_mtime_ns for path in space.records("measure")}


def computes(space: Space) -> bool:
    rng = np.random.default_rng(1)
    a, b, out = rng.random((24, 16), np.float32), rng.random((16, 32), np.float32), np.empty((24, 32), np.float32)
    kerneldecl.load(space.artifact())["mm"](a, b, out)
    return bool(np.allclose(out, a @ b, atol=1e-4))


def test_a_list_measures_what_each_policy_proposes_and_the_next_build_has_nothing_to_do(make: Make) -> None:
    space = make('["default", "auto", { name = "random", trials = 5, seed = 1 }]')
    space.run_here("build")
    trials = trials_of(space)
    templates = [trial["candidate"]["template"] for trial in trials]
    assert templates.count("tvm_default") == 1
    assert len(trials) == 1 + 2 + 5
    assert all(trial["error"] < 1e-3 for trial in trials)
    assert computes(space)
    assert "1 up to date" in space.run_here("build").stdout


@pytest.mark.slow
def test_what_one_policy_has_measured_no_other_measures_again(make: Make) -> None:
    space = make('{ name = "random", trials = 12, seed = 1 }')
    space.run("build")
    before, first = measured(space), {json.dumps(trial["candidate"], sort_keys=True) for trial in trials_of(space)}
    space.edit("workloads.toml", "trials = 12", "trials = 16")
    space.run("build")
    after = measured(space)
    assert before.items() <= after.items()
    assert len(after) - len(before) <= 4
    assert first < {json.dumps(trial["candidate"], sort_keys=True) for trial in trials_of(space)}
    space.edit("workloads.toml", '{ name = "random", trials = 16, seed = 1 }', '[{ name = "random", trials = 16, seed = 1 }, "auto"]')
    space.run("build")
    assert after.items() <= measured(space).items()
    assert len(measured(space)) - len(after) <= 2


@pytest.mark.slow
def test_a_new_configuration_measures_itself_only(make: Make) -> None:
    space = make('{ name = "configs", grid = { template = "cpu_matmul", tile_m = [2, 4], tile_n = [16, 32], order = ["mn"] } }')
    space.run("build")
    before = measured(space)
    assert len(trials_of(space)) == 4
    space.edit("workloads.toml", "tile_m = [2, 4]", "tile_m = [2, 4, 3]")
    space.run("build")
    assert len(trials_of(space)) == 6
    assert before.items() <= measured(space).items()
    assert len(measured(space)) <= len(before) + 2


@pytest.mark.slow
def test_a_build_that_was_killed_goes_on_where_it_was(make: Make) -> None:
    space = make('{ name = "exhaustive", trials = 48 }')
    process = space.start("build")
    end = time.monotonic() + 120
    while not measured(space) and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = measured(space)
    assert before, "a batch was measured"
    assert not space.records("tune")
    space.run("build")
    assert before.items() <= measured(space).items()
    assert len(trials_of(space)) == 48
    assert computes(space)


OTHER = """
[[workload]]
name = "other"
rule = "matmul"
m = 8
n = 32
k = 16
policy = { name = "exhaustive", trials = 48 }
"""


@pytest.mark.slow
def test_an_interrupted_build_leaves_an_artifact_of_the_best_so_far_where_that_is_asked_for(make: Make) -> None:
    space = make('{ name = "exhaustive", trials = 48 }')
    space.write({"workloads.toml": space.read("workloads.toml") + OTHER})
    process = space.start("build", "--best-so-far", "--json")
    end = time.monotonic() + 120
    while not measured(space) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    found = json.loads(out)
    assert found["interrupted"] == ["mm@host"]
    assert found["failed"] == [
        {"entry": "other@host", "reason": "interrupted before any candidate of it was right; the next build goes on"}
    ]
    assert "interrupted: the batch under way is finished and the best so far is linked" in err
    assert computes(space)
    assert set(kerneldecl.load(space.artifact())) == {"mm"}
    assert not space.records("tune")
    before = measured(space)
    assert 0 < len(before) < 48
    space.run("build")
    assert before.items() <= measured(space).items()
    assert [len(json.loads(path.read_text(encoding="utf-8"))["result"]["trials"]) for path in space.records("tune")] == [48, 48]
    assert set(kerneldecl.load(space.artifact())) == {"mm", "other"}


@pytest.mark.slow
def test_seconds_for_all_entries_are_dealt_out_and_the_next_build_has_nothing_to_do(make: Make) -> None:
    space = make('{ name = "exhaustive", trials = 2000 }')
    space.write({"workloads.toml": space.read("workloads.toml") + OTHER.replace("48", "2000") + "\n[budget]\nseconds = 8\n"})
    begun = time.monotonic()
    space.run("build")
    assert time.monotonic() - begun < 120  # where 4000 candidates take many minutes
    counts = [len(json.loads(path.read_text(encoding="utf-8"))["result"]["trials"]) for path in space.records("tune")]
    assert len(counts) == 2
    assert all(8 <= count < 2000 for count in counts)
    assert computes(space)
    assert "2 up to date" in space.run("build").stdout
    space.edit("workloads.toml", "seconds = 8", "seconds = 9")
    assert "shared_seconds" in space.run("plan").stdout


def tiles(shown: dict[str, Any]) -> list[str]:
    """Return the values that a winner has of the grid's parameters: what the grid leaves open depends on the shape."""
    return [part for part in shown["candidates"][0]["candidate"].split() if part.startswith("tile")]


@pytest.mark.slow
def test_entries_of_one_key_share_the_winner_of_the_first(make: Make) -> None:
    grid = 'grid = { template = "cpu_matmul", tile_m = [2, 4], tile_n = [16, 32], order = ["mn"] }'
    space = make(f'{{ name = "configs", key = ["n", "k"], {grid} }}')
    space.edit("workloads.toml", "m = 24", "m = [24, 48]")
    space.run("build")
    first, second = (space.run_json("show", f"mm[m={m}]") for m in (24, 48))
    assert len(first["candidates"]) == 4
    assert len(second["candidates"]) == 1
    assert tiles(second) == tiles(first)
    assert second["idea_of"]["entry"] == "mm[m=24]@host"
    assert not first["idea_of"]
    assert "2 up to date" in space.run("build").stdout
    space.edit("workloads.toml", 'key = ["n", "k"]', 'key = ["m"]')
    space.run("build")
    assert [len(space.run_json("show", f"mm[m={m}]")["candidates"]) for m in (24, 48)] == [4, 4]
    space.edit("workloads.toml", 'key = ["m"]', 'key = ["rows"]')
    assert 'unknown attribute "rows" of rule matmul in the key of policy configs' in space.run("check", code=2).stderr


@pytest.mark.slow
def test_a_second_interrupt_ends_the_build_at_once(make: Make) -> None:
    space = make('{ name = "exhaustive", trials = 200 }')
    process = space.start("build", "--best-so-far")
    end = time.monotonic() + 120
    while not measured(space) and time.monotonic() < end:
        time.sleep(0.05)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    begun = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - begun < 10
    assert process.returncode == 130
    assert not list(space.root.glob("dist/*/host"))


@pytest.mark.slow
def test_a_search_ends_at_the_share_of_the_peak_that_is_asked_for(make: Make) -> None:
    space = make('{ name = "exhaustive", stop_at = 0.00001 }')
    space.run("build")
    assert len(trials_of(space)) == 8
    space.edit("workloads.toml", "{ name", '["default", { name')
    space.edit("workloads.toml", "0.00001 }", "0.00001 }]\nbudget = { trials = 3 }")
    space.run("build")
    assert len(trials_of(space)) == 3


@pytest.mark.slow
def test_another_policy_on_the_command_line_tunes_by_it_and_leaves_the_declared_one_to_the_next_build(make: Make) -> None:
    space = make('"auto"')
    space.run("build", "--policy", '{ name = "random", trials = 3 }')
    assert tuned(space)["policy"] == "random"
    assert len(tuned(space)["trials"]) == 3
    assert "1 tuned" in space.run("build").stdout
    assert tuned(space)["policy"] == "cpu_matmul"


@pytest.mark.slow
def test_the_cost_model_learns_from_what_was_measured_of_another_shape(make: Make) -> None:
    space = make('{ name = "random", trials = 40, seed = 1 }')
    space.run("build")
    space.edit("workloads.toml", "m = 24", "m = 48")
    space.edit("workloads.toml", '{ name = "random", trials = 40, seed = 1 }', '{ name = "cost_model", trials = 24 }')
    space.run("build")
    assert len(trials_of(space)) == 24
    assert tuned(space)["policy"] == "cost_model"


@pytest.mark.slow
def test_metaschedule_keeps_a_database_from_which_it_goes_on_and_which_stock_tvm_opens(make: Make, tmp_path: Path) -> None:
    space = make('{ name = "metaschedule", trials = 40, population = 32, cost_model = "random" }')
    space.run("build")
    assert {trial["candidate"]["template"] for trial in trials_of(space)} == {"trace"}
    assert computes(space)
    (folder,) = (space.root / "cache/metaschedule").iterdir()
    assert best_of_stock_tvm(space, folder) == pytest.approx(min(secs(trial) for trial in trials_of(space)), rel=0.5)
    assert len((folder / "database_tuning_record.json").read_text().splitlines()) == 40
    before = measured(space)
    space.edit("workloads.toml", "trials = 40", "trials = 44")
    space.run("build")
    assert before.items() <= measured(space).items()
    assert len(measured(space)) <= len(before) + 4
    text = space.read("workloads.toml").replace("trials = 44", 'trials = 3, database = "db"')
    other = Space(tmp_path / "other").write({"workloads.toml": text})
    (other.root / "db").mkdir()
    for path in folder.iterdir():
        (other.root / "db" / path.name).write_bytes(path.read_bytes())
    other.run("build")
    known = {trial["candidate"]["params"]["trace"] for trial in trials_of(space)}
    assert {trial["candidate"]["params"]["trace"] for trial in trials_of(other)} <= known


def secs(trial: dict[str, Any]) -> float:
    return float(np.median(trial["samples"])) if trial.get("samples") else float("inf")


def best_of_stock_tvm(space: Space, folder: Path) -> float:
    """Return the least time in a database, opened by TVM without kerneldecl, whose best schedule compiles there."""
    script = f"""
import tvm
from tvm.s_tir import meta_schedule as ms
database = ms.database.JSONDatabase(work_dir={str(folder)!r})
records = database.get_all_tuning_records()
best = min(records, key=lambda record: min(float(secs) for secs in record.run_secs))
schedule = tvm.s_tir.Schedule(best.workload.mod)
best.trace.apply_to_schedule(schedule, remove_postproc=False)
tvm.compile(schedule.mod, target=best.target)
print(min(float(secs) for secs in best.run_secs))
"""
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, cwd=space.root, check=True)
    return float(done.stdout)


LARGER = """
[[workload]]
name = "larger"
rule = "matmul"
m = 48
n = 32
k = 16
policy = { name = "nearest", count = 2 }
"""


@pytest.mark.slow
def test_what_was_fastest_for_another_shape_is_tried_and_the_record_says_whose_it_was(make: Make) -> None:
    space = make('{ name = "random", trials = 6, seed = 1 }')
    space.run("build")
    first, before = tuned(space), measured(space)
    source = max(space.records("tune"), key=lambda path: path.stat().st_mtime_ns).stem
    space.write({"workloads.toml": space.read("workloads.toml") + LARGER})
    space.run("build")
    assert tuned(space)["policy"] == "nearest"
    assert 1 <= len(trials_of(space)) <= 2  # where six were drawn
    assert len(measured(space)) <= len(before) + 2
    winner = tuned(space)["winner"]
    assert winner["template"] == first["winner"]["template"]
    assert tuned(space)["idea_of"]["record"] == source
    assert tuned(space)["idea_of"]["arguments"] == "float32 24x16, 16x32 -> 24x32"
    assert space.run_json("show", "larger")["idea_of"]["entry"] == "mm@host"
    assert "configuration of mm@host, measured for float32 24x16, 16x32 -> 24x32 on" in space.run("show", "larger").stdout


@pytest.mark.slow
def test_what_is_recorded_later_changes_no_list_until_it_is_asked_for(make: Make) -> None:
    space = make('["nearest", { name = "random", trials = 2, seed = 1 }]')
    space.write({"workloads.toml": space.read("workloads.toml") + LARGER.replace("{ name", '["auto", { name').replace("2 }", "2 }]")})
    space.run("build")  # neither knows of the other yet
    lists = {path.name for path in space.records("propose")}
    assert "2 up to date" in space.run("build").stdout
    assert {path.name for path in space.records("propose")} == lists
    space.edit("workloads.toml", 'name = "larger"', 'name = "larger"\ngeneration = 1')
    space.run("build")
    (new,) = (path for path in space.records("propose") if path.name not in lists)
    groups = json.loads(new.read_text(encoding="utf-8"))["result"]["groups"]
    (nearest,) = (group for group in groups if group["policy"] == "nearest")
    assert len(json.loads(nearest["sources"])) == nearest["count"] > 0
