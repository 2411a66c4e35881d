"""Owns the tests of policies that search the same entries on this CPU: real kernels, built, verified and timed.

Knows nothing of which policy is better.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from support.spaces import Space

WORKSPACE = """
edition = 1

[artifact]
name = "compared"
version = "1"

[target.host]
arch = "host"

[defaults]
top_k = 2

[[workload]]
name = "mm"
rule = "matmul"
m = 24
n = 32
k = 16

[[workload]]
name = "softmax"
rule = "softmax"
shape = [16, 24]
"""

LARGER = """
[[workload]]
name = "larger"
rule = "matmul"
m = 48
n = 32
k = 16
"""


@pytest.mark.slow
def test_policies_search_in_stores_of_their_own_and_their_winners_race(tmp_path: Path) -> None:
    space = Space(tmp_path).write({"workloads.toml": WORKSPACE})
    found = space.run_json("compare", "--policies", "auto,default,exhaustive", "--trials", "3", "--svg", "curves.svg")
    assert [entry["entry"] for entry in found["entries"]] == ["mm@host", "softmax@host"]
    for entry in found["entries"]:
        auto, default, exhaustive = entry["policies"]
        assert (auto["tried"], default["tried"], exhaustive["tried"]) == (2, 1, 3)
        assert default["winner"] == "tvm_default()"
        for row in entry["policies"]:
            assert row["run_secs"] > 0
            assert row["error"] < 1e-3
            assert row["compile_secs"] > 0
            assert row["measure_secs"] > 0
            assert row["compile_secs"] + row["measure_secs"] + row["ask_secs"] <= row["search_secs"] + 0.01
            assert row["curve"]
            assert [best for _, best in row["curve"]] == sorted((best for _, best in row["curve"]), reverse=True)
        assert set(entry["fastest"]) <= {"auto", "default", "exhaustive"}
    assert sum(found["wins"].values()) >= 2
    assert max(found["of_best"].values()) <= 1.0
    ET.fromstring(space.read("curves.svg"))
    assert not space.records("tune")
    assert not space.records("measure")


def test_a_search_that_cannot_go_on_says_why_and_the_others_are_compared(tmp_path: Path) -> None:
    space = Space(tmp_path).write({"workloads.toml": WORKSPACE})
    given = '["auto", { name = "configs", configs = [{ template = "cpu_matmul", tile_m = 4, tile_x = 1 }] }]'
    found = space.run_json_here("compare", "mm", "--policies", given, code=1)
    auto, configs = found["entries"][0]["policies"]
    assert auto["run_secs"] > 0
    assert configs["failure"].startswith("policy configs: configs[0] fits no template: cpu_matmul has no parameter tile_x")
    assert found["wins"] == {"auto": 1, "configs": 0}


@pytest.mark.slow
def test_policies_learn_of_records_only_where_they_may(tmp_path: Path) -> None:
    space = Space(tmp_path).write({"workloads.toml": WORKSPACE})
    space.run("build", "mm")
    space.write({"workloads.toml": space.read("workloads.toml") + LARGER})
    given = ("compare", "larger", "--policies", "nearest,default")
    nearest, _ = space.run_json(*given, code=1)["entries"][0]["policies"]
    assert nearest["failure"] == "policy nearest: no record tells of a computation like it; name another policy behind it"
    nearest, default = space.run_json(*given, "--warm")["entries"][0]["policies"]
    assert nearest["winner"].startswith("cpu_matmul(")
    assert nearest["tried"] <= 2  # as many as were measured of the smaller one
    assert default["run_secs"] > 0
