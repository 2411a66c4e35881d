"""Owns the tests of timings by another driver or under other clocks: they are told, and the best are taken again without losing any.

Knows nothing of drivers: what one says is a table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fakes import Answer, FakeRunner, Request
from support.repository import REPOSITORY
from support.spaces import Space

from kerneldecl.stages import retune, session, suspect
from kerneldecl.stages.suspect import BEST

OLD, NEW = {"driver": "570.86", "clocks": "1830/2619 MHz"}, {"driver": "580.95", "clocks": "1830/2619 MHz"}
SLOWED = {"driver": "570.86", "clocks": "1410/2619 MHz"}
NVCC = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
  --list-gpu-code) echo "sm_90" ;;
esac
"""


class OnGpu(FakeRunner):
    """Measures on a GPU with a driver and clocks."""

    def __init__(self, setting: Mapping[str, str], *, error: float = 0.0) -> None:
        super().__init__()
        self._setting, self._error = setting, error

    def _answer(self, request: Request) -> Answer:
        answer = super()._answer(request)
        if request["action"] == "measured_peaks":
            return {**answer, "device": {"gpu": "Test GPU", **self._setting}, "conditions": {}}
        return {**answer, "error": self._error} if self._error and request["action"] == "verify" else answer


@pytest.fixture
def gpu(fakes: Space, monkeypatch: pytest.MonkeyPatch) -> Space:
    """Return a workspace whose entries were tuned on this machine's GPU with the setting OLD, each from four candidates."""
    text = (REPOSITORY / "kerneldecl/archs/h200.toml").read_text(encoding="utf-8")
    fakes.write({"archs/test-gpu.toml": text.replace('"NVIDIA H200"', '"Test GPU"'), "bin/nvcc": NVCC})
    (fakes.root / "bin/nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(fakes.root / "bin"), prepend=":")
    fakes.edit("workloads.toml", 'arch = "test-cpu"', 'arch = "test-gpu"')
    fakes.edit("workloads.toml", "top_k = 3", "top_k = 4")
    for stage in (session, retune, suspect):
        monkeypatch.setattr(stage, "why_not_measured_here", lambda _: "")
    _set(monkeypatch, OLD)
    assert fakes.command("build", runner=OnGpu(OLD)).code == 0
    return fakes


def _set(monkeypatch: pytest.MonkeyPatch, setting: Mapping[str, str]) -> None:
    monkeypatch.setattr(suspect, "_setting", lambda _: setting)


def _records(space: Space) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text())["result"] for path in space.records("tune")}


def test_what_was_timed_under_the_same_setting_is_not_timed_again(gpu: Space) -> None:
    assert gpu.command("build", "--reverify").code == 0
    assert "suspect" not in gpu.command("show", "small").out


@pytest.mark.parametrize("now", [NEW, SLOWED], ids=["driver", "clocks"])
def test_under_another_setting_the_best_are_timed_again_and_the_record_keeps_both(
    gpu: Space, monkeypatch: pytest.MonkeyPatch, now: Mapping[str, str]
) -> None:
    before = _records(gpu)
    _set(monkeypatch, now)
    changed = next(name for name in now if now[name] != OLD[name])
    assert f"suspect: {changed} {OLD[changed]} then, {now[changed]} now" in gpu.command("show", "small").out
    assert gpu.command("build").code == 0, "timings are suspect and not lost"
    runner = OnGpu(now)
    done = gpu.command("build", "--reverify", runner=runner)
    assert done.code == 0, done.err
    assert runner.counts["verify"] == BEST * len(before)
    best = {trial["code_digest"] for record in before.values() for trial in record["trials"][:BEST]}
    assert {Path(request["library"]).stem for request in runner.asked if request["action"] == "sample"} <= best
    after = _records(gpu)
    assert after.keys() == before.keys(), "under the keys that they had"
    for name, record in after.items():
        assert {key: record["provenance"][key] for key in now} == now
        assert sorted(str(trial["candidate"]) for trial in record["trials"]) == sorted(
            str(trial["candidate"]) for trial in before[name]["trials"]
        )
        (kept,) = record["before"]
        assert kept["provenance"] == before[name]["provenance"]
        assert kept["run_secs"] == before[name]["run_secs"]
        assert kept["samples"] == {trial["code_digest"]: trial["samples"] for trial in before[name]["trials"][:BEST]}
    shown = gpu.command("show", "small").out
    assert "suspect" not in shown
    assert f"({OLD['driver']}, {OLD['clocks']}, " in shown
    assert gpu.command("build", "--reverify").code == 0, "once is enough"


def test_only_selected_entries_are_timed_again(gpu: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, NEW)
    runner = OnGpu(NEW)
    assert gpu.command("build", "small", "--reverify", runner=runner).code == 0
    assert runner.counts["verify"] == BEST


def test_a_record_whose_best_are_all_wrong_now_stays(gpu: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _records(gpu)
    _set(monkeypatch, NEW)
    assert gpu.command("build", "--reverify", runner=OnGpu(NEW, error=0.5)).code == 1
    assert _records(gpu) == before


@pytest.mark.parametrize("other", ["--locked", "--no-measure"])
def test_reverify_says_what_it_does_not_go_with(gpu: Space, other: str) -> None:
    refused = gpu.command("build", "--reverify", other)
    assert refused.code == 2
    assert f"--reverify measures again, which goes with neither --locked nor --no-measure: leave out {other}" in refused.err
