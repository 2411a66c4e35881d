"""Owns the question where the time of tuning goes: how busy compilers and measuring processes are, and what each waits for.

Knows nothing of how kernels are compiled or measured.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench_support.random_entries import DRAWN, drawn, toml_of
from bench_support.recording import RecordingRunner, Span, busy_secs, gaps
from bench_support.table import machine, show, show_machine, write_json

from kerneldecl.api import run_build
from kerneldecl.hardware.host import detect
from kerneldecl.planning.workspace import open_workspace
from kerneldecl.plugins.load import load_arch
from kerneldecl.stages.session import Options
from kerneldecl.tuning.events import Event, Finished

Row = dict[str, Any]
SLICES = 12
"""Parts of the build of which each has a row."""


def by_action(spans: Sequence[Span], entries: int) -> list[Row]:
    """Return requests and seconds of each action, by an entry."""
    names = dict.fromkeys((span.kind, span.action) for span in sorted(spans))
    rows = []
    for kind, action in names:
        secs = [span.secs for span in spans if (span.kind, span.action) == (kind, action)]
        rows.append(
            {"process": kind, "action": action, "requests": len(secs) / entries, "s an entry": sum(secs) / entries, "most": max(secs)}
        )
    return sorted(rows, key=lambda row: (row["process"], -row["s an entry"]))


def idle(spans: Sequence[Span], entries: int) -> list[Row]:
    """Return the seconds for which measuring processes waited, by an entry and what came next."""
    total: dict[str, float] = {}
    for worker in {span.worker for span in spans}:
        for action, secs in gaps([span for span in spans if span.worker == worker]).items():
            total[action] = total.get(action, 0.0) + secs
    return [{"before": action, "idle s an entry": secs / entries} for action, secs in sorted(total.items(), key=lambda item: -item[1])]


def slices(spans: Sequence[Span], begin: float, end: float, jobs: int) -> list[Row]:
    """Return how busy both kinds of processes are in each part of the build, as shares."""
    width, rows = (end - begin) / SLICES, []
    compiling = [span for span in spans if span.kind == "compile"]
    measuring = [span for span in spans if span.kind in {"cpu", "cuda"}]
    devices = max(1, len({span.worker for span in measuring}))
    for place in range(SLICES):
        start, stop = begin + place * width, begin + (place + 1) * width
        shares = {
            "compilers": busy_secs(compiling, start, stop) / width / jobs,
            "measuring": busy_secs(measuring, start, stop) / width / devices,
        }
        rows.append({"from s": start - begin, **{name: round(share, 2) for name, share in shares.items()}})
    return rows


def built(root: Path, jobs: int, nice: int) -> tuple[RecordingRunner, float, float, dict[str, str], list[Row]]:
    """Build the workspace; return the runner, when the build began and ended, what failed, and when each entry was done."""
    made: list[RecordingRunner] = []
    done: list[Row] = []
    threads = detect().the_cpu.cores

    def runner() -> RecordingRunner:
        made.append(RecordingRunner(jobs, threads, nice=nice))
        return made[-1]

    begin = time.perf_counter()

    def note(event: Event) -> None:
        if isinstance(event, Finished) and event.kind == "tune":
            done.append({"entry": event.entry, "s": time.perf_counter() - begin})

    session = run_build(open_workspace(root), (), Options(require_measured=True, jobs=jobs), note, runners=runner)
    return made[0], begin, time.perf_counter(), session.failures, done


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune operators drawn at random, and say where the time goes.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--from", dest="first", type=int, default=0, help="number of the first operator")
    parser.add_argument("--count", type=int, default=30, help="operators")
    parser.add_argument("--rules", default=",".join(DRAWN), metavar="RULE,…")
    parser.add_argument("--arch", default="h200", help="an arch of this machine's GPU, or host for its CPU")
    parser.add_argument("--top-k", type=int, default=20, help="candidates that are built and timed for each entry")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile at once")
    parser.add_argument("--nice", type=int, default=0, help="what is added to the niceness of the processes that compile")
    parser.add_argument("--json", type=Path, help="write the results, every span among them, to this file")
    parser.add_argument("--folder", type=Path, help="folder of the workspace, which should be new; default: a temporary folder")
    given = parser.parse_args()
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="tuning-") as folder:
        root = Path(folder).resolve()
        root.mkdir(parents=True, exist_ok=True)
        kind = load_arch(root, given.arch).kind
        operators = drawn(given.seed, given.count, given.rules.split(","), kind, given.first)
        (root / "workloads.toml").write_text(toml_of(operators, given.arch, given.top_k), encoding="utf-8")
        about = machine()
        show_machine(about)
        runner, begin, end, failures, done = built(root, given.jobs, given.nice)
    spans, tuned = runner.spans, len(done)
    count = max(1, tuned)
    took = end - begin
    print(f"\n{tuned} of {len(operators)} operators tuned in {took:.1f} s: {took / count:.2f} s each; {len(failures)} failed", flush=True)
    compiling = [span for span in spans if span.kind == "compile"]
    measuring = [span for span in spans if span.kind in {"cpu", "cuda"}]
    devices = len({span.worker for span in measuring})
    print(f"compilers busy: {busy_secs(compiling, begin, end) / took / given.jobs:.2f} of {given.jobs} processes", flush=True)
    print(f"measuring busy: {busy_secs(measuring, begin, end) / took / max(1, devices):.2f} of {devices} processes", flush=True)
    show("Requests (s an entry, over all processes)", by_action(spans, count))
    show("Measuring processes wait, by what they do next", idle(measuring, count))
    show("How busy over time (shares)", slices(spans, begin, end, given.jobs))
    show("Done", done)
    found = {"took": took, "tuned": tuned, "failures": failures, "done": done, "spans": [span._asdict() for span in spans]}
    write_json(given.json, about, {"asked": {name: str(value) for name, value in vars(given).items()}, **found})


if __name__ == "__main__":
    main()
