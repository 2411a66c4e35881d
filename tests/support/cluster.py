"""Owns clusters for tests, of several processes on this machine, whose devices are fakes.

Knows nothing of what tests expect. `benchmarks/cluster_pace.py` measures with it how builds scale.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import psutil
from distributed import LocalCluster

from kerneldecl import flow
from kerneldecl.cluster.node import Home
from kerneldecl.cluster.runner import Cluster, ClusterRunner
from kerneldecl.stages.session import Options, Session
from kerneldecl.tuning.events import Event
from support.fakes import FakeLinker, FakeRunner
from support.spaces import FAKES, HEAD, Space

SECS = "KERNELDECL_FAKE_SECS"
"""Variable with the seconds for which a fake device is busy with an entry."""
DEVICES = {"CPU": 1.0}


class FakeDevice(FakeRunner):
    """Answers from the text of a request, and is busy for a while with each entry that it prepares."""

    def __init__(self, jobs: int, cores: int, **_: object) -> None:
        assert jobs >= 1
        assert cores >= 1
        super().__init__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, request: Mapping[str, Any], limit_secs: float) -> dict[str, Any]:
        if request["action"] == "prepare":
            time.sleep(float(os.environ.get(SECS, "0")))
        self.asked.clear()  # a thousand entries with a thousand requests each are not to be remembered
        return super().measure(request, limit_secs)


@contextlib.contextmanager
def cluster_of(workers: int, resources: Mapping[str, float] = DEVICES, **options: Any) -> Iterator[LocalCluster]:
    """Start a scheduler and worker processes of one thread each."""
    with LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True, resources=dict(resources), dashboard_address=":0", **options
    ) as cluster:
        yield cluster


def build_on(
    cluster: LocalCluster, space: Space, say: Callable[[str], None] | None = None, patience_secs: float = 60
) -> tuple[Session, list[Event]]:
    """Build a workspace of fakes on a cluster's workers."""
    return build_at(cluster.scheduler_address, space, say, patience_secs)


def build_at(
    address: str, space: Space, say: Callable[[str], None] | None = None, patience_secs: float = 60
) -> tuple[Session, list[Event]]:
    """Build a workspace of fakes on the workers of a scheduler."""
    events: list[Event] = []
    workspace, linker = space.open(), FakeLinker()

    def opened() -> ClusterRunner:
        home = Home(str(workspace.sources), str(workspace.cache))
        told = Cluster(address, patience_secs, FakeDevice)
        return ClusterRunner(told, home, FakeRunner(), say or (lambda _: None), events.append)

    done = flow.build(workspace, Options(), opened, dict.fromkeys(("cpu", "cuda"), linker), events.append)
    return done, events


def _alive(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid)]
    return []


@contextlib.contextmanager
def killing(cluster: LocalCluster, every_secs: float, most: int = 1000) -> Iterator[list[int]]:
    """Kill the oldest worker process now and then, in the midst of whatever it does; its nanny starts another.

    One that has just been started would take its nanny with it.
    """
    killed: list[int] = []
    is_over = threading.Event()

    def kill() -> None:
        while len(killed) < most and not is_over.wait(every_secs):
            pids = [nanny.process.pid for nanny in cluster.workers.values() if nanny.process and nanny.process.pid]
            oldest = sorted((process for pid in pids for process in _alive(pid)), key=psutil.Process.create_time)
            if len(oldest) > 1:
                killed.append(oldest[0].pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    oldest[0].kill()

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


def many(root: Path, count: int, top_k: int = 1) -> Space:
    """Write a workspace of so many small entries."""
    text = HEAD.replace("top_k = 3", f"top_k = {top_k}")
    entries = f'\n[[workload]]\nname = "many"\nrule = "scale"\nn = {list(range(8, 8 + count))}\n'
    root.mkdir(parents=True)
    return Space(root).write({**FAKES, "workloads.toml": text + entries})
