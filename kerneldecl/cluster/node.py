"""Owns what a build has on each worker of a cluster: its sources, processes that compile and measure, and the two calls that use them.

Knows nothing of the scheduler, of other workers or of what is made of answers. Workers that come later get it, too: it is a plug-in.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from distributed import Worker, WorkerPlugin, get_worker

from kerneldecl.cluster.likeness import Likeness, why_no_compiler, why_unlike
from kerneldecl.errors import KerneldeclError
from kerneldecl.hardware import host
from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.limits import Limits
from kerneldecl.model import Arch, Trial
from kerneldecl.runners.events import Printed, Ran
from kerneldecl.runners.local import LocalRunner, in_order
from kerneldecl.serial import arch_from_json
from kerneldecl.store.local import LocalStore
from kerneldecl.tuning.batch import measured
from kerneldecl.tuning.task import Doing, Runner, Task

Json = Mapping[str, Any]
Files = Mapping[str, bytes]
"""Contents by path, relative to a folder that is known."""
Heard = tuple[Printed | Ran, ...]


@dataclass(frozen=True)
class Home:
    """Folders of the machine that builds, by which requests name files."""

    sources: str
    cache: str
    limits: Limits | None = None
    """What requests may use, on workers too."""


@dataclass(frozen=True)
class Told:
    """What a worker has to say to a call."""

    worker: str
    refused: str = ""
    """Why this worker is no place for the call, as a phrase. Nothing was done then."""
    answer: dict[str, Any] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    device: dict[str, Any] = field(default_factory=dict)
    stored: Files = field(default_factory=dict)
    """What the request has left in the store."""
    made: Files = field(default_factory=dict)
    """What it has left in the task's folder."""
    heard: Heard = ()


class Node(WorkerPlugin):  # type: ignore[misc]  # distributed is untyped
    """A build's place on a worker."""

    def __init__(self, home: Home, sources: Files, theirs: Likeness, runners: Callable[..., Any] = LocalRunner) -> None:
        """Take the folders of the building machine, the files of its sources, its likeness, and what runs requests on the worker."""
        self.home, self.sources, self.theirs, self._runners = home, sources, theirs, runners

    def setup(self, worker: Worker) -> None:
        """Make the place: folder, sources; processes start when they are first needed."""
        self._worker, self._threads = worker.contact_address, worker.state.nthreads
        self._folder = Path(tempfile.mkdtemp(prefix="kerneldecl-node-", dir=worker.local_directory))
        for name, content in self.sources.items():
            path = self._folder / "sources" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        self._heard: queue.SimpleQueue[Printed | Ran] = queue.SimpleQueue()
        self._held, self._opening = contextlib.ExitStack(), threading.Lock()
        self._compiling: Runner | None = None
        self._measuring: queue.LifoQueue[Runner] = queue.LifoQueue()
        self._unlike = why_unlike(self.theirs)
        self._numbers = itertools.count()

    def teardown(self, worker: Worker) -> None:
        """End the processes and remove the folder."""
        del worker
        self._held.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def answered(self, request: Json, limit_secs: float, stored: Files) -> Told:
        """Answer a request to compile; `stored` is what the store holds that may answer it."""
        if refused := self._unlike or _why_not_compiled(request):
            return Told(self._worker, refused)
        with self._scratch() as folder:
            given = _written(folder / "cache", stored)
            places = {self.home.sources: str(self._folder / "sources"), self.home.cache: str(folder / "cache")}
            if "folder" in request:
                (folder / "made").mkdir(parents=True)
                places[str(request["folder"])] = str(folder / "made")
            (answer,) = in_order(self._compiler().run_all([moved(request, places)], limit_secs), 1)
            back = {there: here for here, there in places.items()}
            answer = {name: moved_text(value, back) if isinstance(value, str) else value for name, value in answer.items()}
            left = {name: content for name, content in _read(folder / "cache") if name not in given}
            return Told(self._worker, answer=answer, stored=left, made=dict(_read(folder / "made")), heard=self._drained())

    def looked(self, arch: Arch) -> Told:
        """Say whether this is a place to measure for an arch."""
        return Told(self._worker, self._unlike or why_not_measured_here(arch))

    def measured(self, doing: Doing, task: Task, trials: Sequence[Trial], libraries: Files) -> Told:
        """Measure a batch on a device of the task's arch; `libraries` are the candidates'."""
        if (told := self.looked(task.arch)).refused:
            return told
        with self._scratch() as folder, self._measurer() as runner:
            _written(folder, libraries)
            store = self._folder / "nothing"
            here = replace(task, root=self._folder / "sources", cache=store, folder=folder)
            try:
                found = measured(doing, here, trials, runner, LocalStore(store))
            except KerneldeclError as error:  # another process has the GPU that this worker has offered, say
                return Told(self._worker, str(error))
        return Told(self._worker, trials=found.trials, device=_with_place(found.device), heard=self._drained())

    def _compiler(self) -> Runner:
        with self._opening:
            if self._compiling is None:
                self._compiling = self._opened(self._threads)
            return self._compiling

    @contextlib.contextmanager
    def _measurer(self) -> Iterator[Runner]:
        """Provide a runner whose measuring process nobody else asks; each holds a GPU of its own, from its first request on."""
        with self._opening:
            runner = self._opened(1) if self._measuring.empty() else self._measuring.get()
        try:
            yield runner
        finally:
            self._measuring.put(runner)

    def _opened(self, jobs: int) -> Runner:
        cores = host.detect().the_cpu.cores
        runner: Runner = self._held.enter_context(self._runners(jobs, cores, heard=self._heard.put, limits=self.home.limits))
        return runner

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Provide the path of a folder for one call, which is made when something is put there: most calls need none."""
        folder = self._folder / f"call{next(self._numbers)}"
        try:
            yield folder
        finally:
            if folder.exists():
                shutil.rmtree(folder, ignore_errors=True)

    def _drained(self) -> Heard:
        """Return what was heard since the last call, with the name of this machine: processes of several have the same numbers."""
        found: list[Printed | Ran] = []
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._heard.get_nowait()
                if isinstance(event, Ran):
                    role, _, pid = event.process.rpartition(" ")
                    event = replace(event, process=f"{role} {socket.gethostname()} {pid}")
                found.append(event)
        return tuple(found)


class Returned(NamedTuple):
    """What a worker sends back."""

    told: tuple[Told, ...]
    """What it has to say to each call, in their order."""
    secs: float | None
    """How long it was busy with all of them; None where it has died."""


def called(content: bytes) -> bytes:
    """Make some calls on the worker that this runs on: functions of this module with their arguments, pickled; `Returned` likewise.

    Bytes are what Dask looks into least, here, in its scheduler and where they come from.
    """
    began = time.perf_counter()
    told = tuple([function(*arguments) for function, arguments in pickle.loads(content)])  # noqa: S301  Dask's own messages are pickled
    return pickle.dumps(Returned(told, time.perf_counter() - began))


def answered(build: str, request: Json, limit_secs: float, stored: Files) -> Told:
    """Answer a request on the worker that this runs on, for a build."""
    return _node(build).answered(request, limit_secs, stored)


def measured_there(build: str, doing: Doing, task: Task, trials: Sequence[Trial], libraries: Files) -> Told:
    """Measure a batch on the worker that this runs on, for a build."""
    return _node(build).measured(doing, task, trials, libraries)


def looked(build: str, arch: Arch) -> Told:
    """Refuse where the worker that this runs on cannot measure for an arch."""
    return _node(build).looked(arch)


def _node(build: str) -> Node:
    node: Node = get_worker().plugins[build]
    return node


def moved(value: Any, places: Mapping[str, str]) -> Any:
    """Return a JSON value whose paths lead to the same files in other folders."""
    if isinstance(value, str):
        return moved_path(value, places)
    if isinstance(value, Mapping):
        return {name: moved(each, places) for name, each in value.items()}
    return [moved(each, places) for each in value] if isinstance(value, list | tuple) else value


def moved_path(text: str, places: Mapping[str, str]) -> str:
    """Return a path at the new place of the nearest folder that it is in; any other text as it is."""
    for old, new in sorted(places.items(), key=lambda place: -len(place[0])):
        if text == old or text.startswith(f"{old}/"):
            return new + text[len(old) :]
    return text


def moved_text(text: str, places: Mapping[str, str]) -> str:
    """Return a text that names files, with folders by their other names."""
    for old, new in sorted(places.items(), key=lambda place: -len(place[0])):
        text = text.replace(old, new)
    return text


def _why_not_compiled(request: Json) -> str:
    arch = arch_from_json(request["arch"]) if "toolchain" in request else None
    return why_no_compiler(str(dict(arch.tvm_target)["arch"]), request["toolchain"]["cuda"]) if arch and arch.gpu else ""


def _with_place(device: Mapping[str, Any]) -> dict[str, Any]:
    here = os.uname()
    return {**device, "provenance": {**device.get("provenance", {}), "host": here.nodename, "kernel": here.release}}


def _written(folder: Path, files: Files) -> frozenset[str]:
    """Write files into a folder, which is there from then on if there are any."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return frozenset(files)


def _read(folder: Path) -> list[tuple[str, bytes]]:
    """Return the files of a folder and of those in it, without hidden ones; none where there is no folder."""
    found: list[tuple[str, bytes]] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(place, name) for name in names if not name.startswith(".")]
        found += [(str(path.relative_to(folder)), path.read_bytes()) for path in paths]
    return sorted(found)
