"""Owns the runner of a cluster: requests to compile go to any of its workers, batches to those that offer a device.

Knows nothing of processes on workers. Policies are asked here, and so is what no worker offers to measure: a CPU that is this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from distributed import Client

from kerneldecl.cluster import node
from kerneldecl.cluster.calls import Calls, waited_for, workers_with
from kerneldecl.cluster.likeness import likeness
from kerneldecl.cluster.node import Files, Home, Node, Told
from kerneldecl.cluster.parcels import Call
from kerneldecl.errors import ToolchainError
from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.model import Arch, Trial
from kerneldecl.planning.snapshot import snapshot
from kerneldecl.runners.events import Heard
from kerneldecl.runners.process import Answer, Answers
from kerneldecl.store.files import write_whole
from kerneldecl.store.keys import lines_of, symbol
from kerneldecl.store.local import LocalStore
from kerneldecl.tuning.batch import measured
from kerneldecl.tuning.task import Batches, Doing, Runner, Task

MOST_SIDE_BY_SIDE = 64
_CONNECT_SECS = 20
_URGENT = 1 << 20
"""Priority of measuring: a device that waits costs more than a compiler that does."""
_JOIN_TRIES = 5
_LARGE = "distributed.admin.large-graph-warning-threshold"


@dataclass(frozen=True)
class Cluster:
    """A cluster that exists, and how long to wait for its workers."""

    address: str
    """Of its scheduler, such as tcp://10.0.0.1:8786."""
    patience_secs: float = 60.0
    """A worker with the wanted device may still be in a batch system's queue."""
    runners: Callable[..., Any] | None = None
    """What runs requests on workers, in place of their own processes."""


class ClusterRunner:
    """Runs requests on a cluster. Use as a context manager."""

    def __init__(self, cluster: Cluster, home: Home, here: Runner, say: Callable[[str], None], heard: Heard) -> None:
        """Take the cluster, the folders of the build, what runs requests here, and who wants to know what is waited for and was heard."""
        self._cluster, self._home, self._here, self._say, self._heard = cluster, home, here, say, heard
        self._build = f"kerneldecl-{uuid.uuid4().hex}"
        self._store = LocalStore(Path(home.cache))
        self._held = contextlib.ExitStack()
        self._measuring_here, self._indexing = threading.Lock(), threading.Lock()
        self._offered: dict[Arch, str] = {}
        """By arch, why it cannot be measured for, as far as anybody has asked."""
        self._elsewhere: dict[Arch, bool] = {}
        """By arch, whether workers measure for it."""
        self._devices: dict[str, dict[str, Any]] = {}
        """By task folder, what is known of the device that has measured it last."""
        self._built: dict[str, dict[str, Path]] | None = None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as held:
            self._open(held)
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _open(self, held: contextlib.ExitStack) -> None:
        import dask

        # Libraries of candidates travel with what measures them.
        held.enter_context(dask.config.set({_LARGE: "1GB"}))
        address = self._cluster.address
        try:
            self._client = held.enter_context(Client(address, timeout=_CONNECT_SECS, set_as_default=False))
        except (OSError, ValueError) as error:
            raise ToolchainError(f"no scheduler of Dask answers at {address}: {error}; `dask scheduler` starts one") from None
        self._calls = Calls(self._client, self._cluster.patience_secs, self._say)
        held.callback(self._calls.close)
        with snapshot(Path(self._home.sources)) as copy:
            sources = {str(path.relative_to(copy)): path.read_bytes() for path in copy.rglob("*") if path.is_file()}
        there = {} if self._cluster.runners is None else {"runners": self._cluster.runners}
        plugin = Node(self._home, sources, likeness(), **there)
        held.callback(self._leave)
        for left in reversed(range(_JOIN_TRIES)):
            try:
                self._client.register_plugin(plugin, name=self._build)
                break
            except ImportError as error:
                raise ToolchainError(f"a worker of {address} lacks {error.name}; `pip install 'kerneldecl[cluster]'` on each") from None
            except OSError as error:  # a worker that died just then has none
                if not left:
                    raise ToolchainError(f"the workers of {address} cannot be reached: {error}") from None
                time.sleep(1)

    def _leave(self) -> None:
        with contextlib.suppress(OSError, TimeoutError, RuntimeError, ValueError):  # the cluster may be gone
            self._client.unregister_worker_plugin(self._build)

    # Runner

    @property
    def batches(self) -> Batches:
        return self

    def start(self, count: int) -> None:
        """Do nothing: a cluster's workers are there, or come as they are needed."""
        del count

    def run_all(self, requests: Sequence[Mapping[str, Any]], limit_secs: float, priority: int = 0) -> Answers:
        """Have requests answered by any workers; what they leave in the store and in the task's folder comes here."""
        calls = [
            Call(node.answered, (self._build, dict(each), limit_secs, self._known(each)), "compile", each["action"], priority=-priority)
            for each in requests
        ]
        return self._taken(requests, self._calls.answers(calls))

    def _taken(self, requests: Sequence[Mapping[str, Any]], answers: Iterator[tuple[int, Told]]) -> Answers:
        for at, told in answers:
            for path, content in _missing(told, self._home.cache, told.stored):
                write_whole(path, content, durable=False)
            for path, content in _missing(told, requests[at].get("folder", ""), told.made):
                Path(path).write_bytes(content)  # nobody else looks into the task's folder yet
            for event in told.heard:
                self._heard(event)
            yield at, told.answer

    def _known(self, request: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the build records of a request's computation: what a schedule compiles to is not compiled again."""
        if request.get("action") != "build" or request.get("force"):
            return {}
        with self._indexing:
            if self._built is None:
                self._built = {}
                for record in self._store.all("build", is_local=True):
                    whose = json.loads(lines_of(record.manifest)["symbol"])
                    path = self._store.record_path("build", record.key, is_local=True)
                    self._built.setdefault(whose, {})[str(path.relative_to(self._store.root))] = path
        known = self._built.get(symbol(request["spec"]["computation"]), {})
        return {name: path.read_bytes() for name, path in known.items() if path.exists()}

    def measure(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        """Return this machine's answer: policies are asked here, batches are measured by `measured`."""
        return self._here.measure(request, limit_secs)

    def side_by_side(self, model: str, most: int) -> Sequence[Runner]:
        """Return as many runners as entries may be in flight: more than there are devices, so that none waits for what is compiled."""
        del model
        return [self] * min(most, MOST_SIDE_BY_SIDE)

    # Batches

    def why_not(self, arch: Arch) -> str:
        """Return why nothing can be measured for an arch, once workers had the time to come."""
        if arch not in self._offered:
            self._offered[arch] = self._asked(arch)
        return self._offered[arch]

    def is_here(self, arch: Arch) -> bool:
        self.why_not(arch)
        return not self._elsewhere[arch]

    def _asked(self, arch: Arch) -> str:
        resource = _resource(arch)

        def is_offered() -> bool:
            return bool(workers_with(self._client, {resource: 1}))

        is_here = not arch.gpu and not why_not_measured_here(arch)
        self._elsewhere[arch] = True
        if not is_offered() and not is_here:
            self._say(f"waiting for a worker with {resource}=1, to measure for {arch.name}")
            waited_for(is_offered, self._cluster.patience_secs)
        why = f"no worker of {self._cluster.address} offers {resource}=1, to measure for {arch.name}"
        if is_offered():
            why = self._probed(arch)
        if why and is_here:
            self._elsewhere[arch] = False
            return ""
        return why

    def _probed(self, arch: Arch) -> str:
        """Return why none of the workers that offer a device can measure for an arch; empty where one can."""
        try:
            for _ in self._calls.answers([self._measuring(node.looked, (self._build, arch), arch, 0)]):
                pass
        except ToolchainError as error:
            return str(error)
        return ""

    def _measuring(self, function: Callable[..., Told], arguments: tuple[Any, ...], arch: Arch, place: int) -> Call:
        return Call(function, arguments, f"measure for {arch.name}", "", {_resource(arch): 1}, _URGENT - place)

    def measured(self, doing: Doing, task: Task, trials: Sequence[Trial]) -> list[Trial]:
        """Return a batch after a worker has measured it."""
        self.why_not(task.arch)
        # What ends a search early is asked here, between batches.
        sent = replace(task, groups=(), known={}, build_archs={}, shared={}, has_judged=None, ended_by=None)
        if not self._elsewhere[task.arch]:
            with self._measuring_here:
                found = measured(doing, sent, trials, self._here, self._store)
            self._devices[str(task.folder)] = found.device
            return list(found.trials)
        codes = {trial.code_digest for trial in trials if trial.code_digest}
        libraries = {path.name: path.read_bytes() for path in map(task.library_path, codes) if path.exists()}
        arguments = (self._build, doing, sent, tuple(trials), libraries)
        ((_, told),) = self._calls.answers([self._measuring(node.measured_there, arguments, task.arch, task.priority)])
        for event in told.heard:
            self._heard(event)
        if "failure" in told.answer:
            return [replace(trial, failure=told.answer["failure"]) for trial in trials]
        self._devices[str(task.folder)] = told.device
        return list(told.trials)

    def measured_on(self, task: Task) -> dict[str, Any]:
        return self._devices.get(str(task.folder), {})


def _missing(told: Told, folder: str, files: Files) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of what a worker has left that a folder does not have: names of all of it tell of contents."""
    for name, content in files.items():
        if name.startswith("/") or ".." in name.split("/"):
            raise ToolchainError(f"worker {told.worker} has left {name}, which is outside of its folder")
        path = f"{folder}/{name}"
        if not os.path.exists(path):  # noqa: PTH110  thousands of them
            yield path, content


def _resource(arch: Arch) -> str:
    """Return what a worker calls a device that it lends: `GPU`, or `CPU` where it has its machine to itself."""
    return "GPU" if arch.gpu else "CPU"
