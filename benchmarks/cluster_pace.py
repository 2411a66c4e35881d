"""Owns the measurement of how near builds on a cluster come to linear: many entries, fake devices that are busy for a while with each.

Knows nothing of kernels: plug-ins are text, and workers answer from it. Scheduler, workers, messages, records and links are real, on this
machine: what is measured is what a build costs besides compiling and measuring. Processor time is comparable on a busy machine, too; time
on the clock and the share of linear are only on an idle one with a core for each worker and three more.

    python benchmarks/cluster_pace.py [--entries 1000] [--workers 8] [--secs 0.05] [--kill-every 5]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import psutil
from bench_support.table import machine, show_machine, write_json

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # workers inherit it

from support.cluster import SECS, build_at, cluster_of, killing, many
from support.spaces import Space

from kerneldecl import flow
from kerneldecl.stages.session import Session
from kerneldecl.tuning.events import Finished


@dataclass
class Took:
    """What a build took, in seconds."""

    tuned: int = 0
    whole: float = 0.0
    processor: float = 0.0
    """Of the process that builds, all of its threads."""
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Time on the clock and of the processor, by stage."""
    threads: dict[str, float] = field(default_factory=dict)
    """Processor time, by what threads are named after."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Build many entries on a cluster of fake devices of this machine.")
    parser.add_argument("--entries", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--secs", type=float, default=0.05, help="for which a device is busy with an entry")
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds after which the oldest worker is killed, again and again")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ[SECS] = str(given.secs)
    about = machine()
    show_machine(about)
    with tempfile.TemporaryDirectory() as folder, cluster_of(given.workers) as cluster, contextlib.ExitStack() as held:
        space = many(Path(folder) / "space", given.entries)
        killed = held.enter_context(killing(cluster, given.kill_every)) if given.kill_every else []
        with ProcessPoolExecutor(1, get_context("spawn")) as builder:
            pid = builder.submit(os.getpid).result()
            scheduler, workers = time.process_time(), _of_workers(pid)
            took = builder.submit(_built, cluster.scheduler_address, space.root).result()
            scheduler, workers = time.process_time() - scheduler, _of_workers(pid) - workers
    linear = given.entries * given.secs / given.workers
    each = 1e3 / given.entries
    print(f"{took.tuned} entries, {given.workers} workers, {given.secs:g} s each: {took.whole:.2f} s, {linear / took.whole:.2f} of linear")
    print(f"processor time an entry: build {took.processor * each:.2f} ms, scheduler and nannies {scheduler * each:.2f} ms", end="")
    print("" if killed else f", workers {workers * each:.2f} ms")  # who was killed tells nothing
    for stage, (secs, processor) in took.stages.items():
        print(f"  {stage:<18} {secs:6.2f} s on the clock, {processor * each:5.2f} ms of the processor an entry")
    threads = sorted(took.threads.items(), key=lambda item: -item[1])
    print("  threads, ms an entry:", ", ".join(f"{name} {secs * each:.2f}" for name, secs in threads if secs * each >= 0.01))
    if killed:
        print(f"{len(killed)} workers were killed")
    write_json(given.json, about, {**vars(took), "linear": linear, "scheduler": scheduler, "workers": workers, "killed": len(killed)})


def _of_workers(builder: int) -> float:
    """Return the processor time of this process's children without the one that builds."""
    found = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            spent = child.cpu_times()
            found += spent.user + spent.system if child.pid != builder else 0.0
    return found


def _built(address: str, root: Path) -> Took:
    """Build in a process without the scheduler."""
    took = Took()
    _time_stages(took)
    _time_threads(took.threads)
    began, processor, own = time.perf_counter(), time.process_time(), time.thread_time()
    done, events = build_at(address, Space(root))
    took.whole, took.processor = time.perf_counter() - began, time.process_time() - processor
    took.threads["main"] = time.thread_time() - own
    assert not done.failures, list(done.failures.items())[:3]
    took.tuned = sum(isinstance(event, Finished) and event.kind == "tune" for event in events)
    return took


def _time_stages(took: Took) -> None:
    def timed(stage: flow.Stage) -> flow.Stage:
        def run(session: Session) -> None:
            began, processor = time.perf_counter(), time.process_time()
            stage(session)
            secs, spent = took.stages.get(stage.__name__, (0.0, 0.0))
            took.stages[stage.__name__] = secs + time.perf_counter() - began, spent + time.process_time() - processor

        return run

    flow.STAGES = tuple(map(timed, flow.STAGES))


def _time_threads(spent: dict[str, float]) -> None:
    """Have every thread that ends from here on add its processor time."""
    run = threading.Thread.run

    def timed(thread: threading.Thread) -> None:
        try:
            run(thread)
        finally:
            name = thread.name.partition("_")[0].partition("-")[0]
            spent[name] = spent.get(name, 0.0) + time.thread_time()

    threading.Thread.run = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
