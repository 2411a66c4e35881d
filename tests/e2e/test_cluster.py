"""Owns the test that a real build on a cluster leaves what a real build here leaves: compilers, kernels and measuring are real.

Knows nothing of Dask but how to start it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.spaces import REAL, Space, clean_environment

pytest.importorskip("distributed", reason="the extra cluster is not installed")

OF_TIME = {
    "samples",
    "timings",
    "run_secs",
    "tied",
    "measured_peaks",
    "provenance",
    "winner",
    "trials",
    "policy",
    "conditions",
    "build_key",
}
"""What a record holds that depends on time, or on which of two candidates won by it."""


@contextmanager
def dask(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command of Dask, as its users do."""
    with subprocess.Popen(
        [sys.executable, "-m", "dask", *arguments], env=clean_environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=30)


def told(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(f"the process ended without {pattern}")


def records(space: Space, kind: str) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text())["result"] for path in (space.root / "cache/local" / kind).glob("*.json")}


def fixed(result: Any) -> Any:
    """Return a record of a tuning without what depends on time: of each candidate, code, error and verdict."""
    trials = [{name: value for name, value in trial.items() if name not in OF_TIME} for trial in result["trials"]]
    kept = {name: value for name, value in result.items() if name not in {*OF_TIME, "object", "database", "source"}}
    return kept, sorted(trials, key=lambda trial: json.dumps(trial["candidate"], sort_keys=True))


@pytest.mark.slow
def test_real_workers_leave_the_records_of_a_build_here(tmp_path: Path) -> None:
    for name in ("here", "far"):
        (tmp_path / name).mkdir()
    here, far = Space(tmp_path / "here").write(REAL), Space(tmp_path / "far").write(REAL)
    here.run("build", "--jobs", "1")
    with ExitStack() as held:
        scheduler = held.enter_context(dask("scheduler", "--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"))
        address = told(scheduler, r"Scheduler at:\s+(tcp://\S+)")
        for resources in ((), ("--resources", "CPU=1")):
            worker = held.enter_context(dask("worker", address, "--nthreads", "1", "--local-directory", str(tmp_path / "dask"), *resources))
            told(worker, r"(Registered to)")
        events = tmp_path / "events.jsonl"
        built = far.run("build", "--scheduler", address, "--events", str(events))
        assert "4 entries: 4 tuned in " in built.stdout
    for kind in ("lower", "propose", "build"):
        assert records(far, kind) == records(here, kind), f"records of {kind} are the same, byte for byte"
    ours, theirs = records(here, "tune"), records(far, "tune")
    assert {key: fixed(result) for key, result in ours.items()} == {key: fixed(result) for key, result in theirs.items()}
    verdicts = [{key: (r["failure"], r["error"], r["reference"]) for key, r in records(each, "measure").items()} for each in (here, far)]
    assert verdicts[0] == verdicts[1]
    ran = [json.loads(line) for line in events.read_text().splitlines()]
    compiled = {line["process"] for line in ran if line["event"] == "ran" and line["request"].startswith("build")}
    measured = {line["process"] for line in ran if line["event"] == "ran" and line["request"].startswith("sample")}
    assert len(measured) == 1, "one process measures on the one device that is lent"
    assert compiled
    far.run("build", "--locked")
    far.run("verify")
