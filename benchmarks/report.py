"""Owns the measurement of the report: how long it takes to make, how large it is, and how soon a browser has opened it.

Knows nothing of what stands in it. Its entries are the repository's own, with the records of an H200, many times over: each copy has a
generation, and so a record, of its own. Twenty revisions of the lock precede it.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench_support.table import machine, show, show_machine, write_json

import kerneldecl
from kerneldecl.planning.meanings import FILE as MEANINGS
from kerneldecl.planning.meanings import write_meanings
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.workspace import LOCK, Workspace, open_workspace
from kerneldecl.serial import to_json
from kerneldecl.stages.lock import lock_of
from kerneldecl.stages.session import make_plan
from kerneldecl.store.local import LocalStore
from kerneldecl.tuning.propose import propose

REPOSITORY = Path(__file__).resolve().parents[1]
TARGET = "h200"
MOST_BYTES, MOST_SECS, MOST_OPEN_SECS = 3_000_000, 2.0, 1.0
REVISIONS = 20
_NAME = re.compile(r'(?m)^name = "([^"]*)"')
_TIME = re.compile(r"(?m)^time_us = (\S+)$")
_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(kerneldecl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}


@dataclass(frozen=True)
class Made:
    """A report that was made: wall time and processor time of the command, and its size."""

    secs: float
    cpu_secs: float
    size: int


def make_workspace(root: Path, copies: int) -> int:
    """Write a workspace of so many copies of the repository's entries, in a git repository; return the number of entries."""
    head, *tables = re.split(r"(?m)^\[\[workload\]\]\n", (REPOSITORY / "workloads.toml").read_text(encoding="utf-8"))
    head = re.sub(r'\[target\.host\]\narch = "host".*\n', "", head).replace('targets = ["host"]', f'targets = ["{TARGET}"]')
    measured = {record.result["computation"]: record.result for record in LocalStore(REPOSITORY / "cache").all("tune", is_local=False)}
    like = {
        entry.workload.name.partition("[")[0]: entry
        for entry in make_plan(open_workspace(REPOSITORY)).entries
        if _is_measured(entry, measured)
    }
    chosen = [table for table in tables if TARGET in table and _NAME.search(table)[1] in like]
    text = "".join(f"[[workload]]\n{_numbered(table, copy)}" for copy in range(copies) for table in chosen)
    (root / "workloads.toml").write_text(head + text, encoding="utf-8")
    for folder in ("cache/record", "rules"):
        shutil.copytree(REPOSITORY / folder, root / folder)
    workspace = open_workspace(root)
    for entry in make_plan(workspace).entries:
        _propose(workspace, entry)
    for entry in make_plan(workspace).entries:
        if entry.tuned is None and entry.lowered and (known := measured.get(entry.lowered.computation)):
            workspace.own_store.write("tune", entry.action("tune").manifest, dict(known), is_local=False)
    plan = make_plan(workspace)
    write_meanings(workspace.cache / MEANINGS, workspace.reading)  # as a build does
    _commit(root, lock_of(workspace, plan))
    return len(plan.entries)


def _numbered(table: str, copy: int) -> str:
    return _NAME.sub(lambda match: f'name = "{match[1]}-{copy}"\ngeneration = {copy}', table, count=1)


def _is_measured(entry: EntryPlan, measured: Container[str]) -> bool:
    return entry.workload.target == TARGET and entry.lowered is not None and entry.lowered.computation in measured


def _propose(workspace: Workspace, entry: EntryPlan) -> None:
    """Keep what the policies of now propose: some are younger than the records."""
    if entry.lowered and not entry.groups:
        arch, top_k = to_json(entry.arch), entry.workload.top_k
        answer = propose(str(workspace.sources), entry.asked, entry.lowered.space_json, arch, top_k)
        workspace.own_store.write("propose", entry.action("propose").manifest, answer, is_local=False)


def _longer(factor: float, match: re.Match[str]) -> str:
    return f"time_us = {float(match[1]) * factor:.4g}"


def _commit(root: Path, lock: str) -> None:
    """Commit locks of ever faster kernels, the last one that of now."""
    git = ["git", "-c", "user.name=b", "-c", "user.email=b@example.org"]
    subprocess.run([*git, "init", "-q"], cwd=root, check=True)
    for left in reversed(range(REVISIONS)):
        slower = _TIME.sub(functools.partial(_longer, 1.02**left), lock)
        (root / LOCK).write_text(slower, encoding="utf-8")
        subprocess.run([*git, "add", LOCK, "workloads.toml"], cwd=root, check=True)
        subprocess.run([*git, "commit", "-qm", f"{left} to go"], cwd=root, check=True)


def made(root: Path, path: Path) -> Made:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "kerneldecl", "-C", str(root), "report", "-o", str(path)]
    subprocess.run(command, env=_ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    secs, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Made(secs, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, path.stat().st_size)


def opened(path: Path, rounds: int) -> Iterator[tuple[float, float]]:
    """Yield the seconds after which Chromium has painted the report, and those until an entry far down is open."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(rounds):
            page, began = browser.new_page(viewport={"width": 1280, "height": 900}), time.perf_counter()
            page.goto(path.as_uri())
            page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            painted = time.perf_counter() - began
            page.evaluate("location.hash = '#e700'")
            page.wait_for_selector("#e700 + .detail")
            yield painted, time.perf_counter() - began - painted
            page.close()
        browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", type=int, default=15, help="of the repository's entries that have records")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    described = machine()
    show_machine(described)
    with tempfile.TemporaryDirectory() as folder:
        root, path = Path(folder) / "space", Path(folder) / "report.html"
        root.mkdir()
        entries = make_workspace(root, asked.copies)
        reports = [made(root, path) for _ in range(asked.rounds)]
        pages = list(opened(path, asked.rounds)) if shutil.which("chromium") else []
    row = {
        "entries": entries,
        "made s": statistics.median(each.secs for each in reports),
        "processor s": statistics.median(each.cpu_secs for each in reports),
        "bytes": reports[0].size,
        "opened s": statistics.median(painted for painted, _ in pages) if pages else None,
        "entry opened s": statistics.median(secs for _, secs in pages) if pages else None,
    }
    show("A report", [row])
    if asked.json:
        write_json(asked.json, described, {"report": [row]})
    return int(reports[0].size > MOST_BYTES or row["processor s"] > MOST_SECS or (row["opened s"] or 0.0) > MOST_OPEN_SECS)


if __name__ == "__main__":
    sys.exit(main())
