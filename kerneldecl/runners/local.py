"""Owns this machine's worker processes: several that build in parallel, and one for each device that measures.

Knows nothing of candidates, records or of what requests mean, except for the device that a request to measure names.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from kerneldecl.hardware.cuda_driver import DriverGpu
from kerneldecl.hardware.gpu_lock import free_gpus, gpus_of, held_gpu
from kerneldecl.limits import Limits
from kerneldecl.runners.events import Heard, Printed, Ran, computation_of, described
from kerneldecl.runners.one_gpu import Measurer, OneGpu
from kerneldecl.runners.process import Answer, Worker
from kerneldecl.runners.worker import COMPILING
from kerneldecl.store.scratch import scratch_folder

Request = Mapping[str, Any]
_Answered = queue.SimpleQueue[tuple[int, Answer | BaseException]]
_Waiting = tuple[int, int, int, Request, float, _Answered]
"""Priority, serial number, position, request, limit in seconds, queue for the answer: ordered by the first two."""
_WAKE_SECS = 0.1
"""Longest wait at a time: an interrupt just before a thread starts to wait does not wake it."""


_LIMITED_BY = {
    "lower": "build_secs",
    "build": "build_secs",
    "describe": "build_secs",
    "specialize": "build_secs",
    "propose": "propose_secs",
    "propose_next": "search_secs",
    "ask": "search_secs",
    "prepare": "prepare_secs",
    "prepare_next": "prepare_secs",
    "verify": "verify_secs",
    "sample": "sample_secs",
}
"""The limit that holds for an action, where the user declares limits."""
_MEASURED = frozenset({"cpu", "cuda", "rpc"})
_OF_WHAT_IS_PREPARED = frozenset({"prepare_next", "verify", "sample"})
_SHARE_OF_MEMORY = 0.75
"""Of the machine's memory: a process that takes more would have all others starve."""


class LocalRunner:
    """Runs requests in worker processes that start when first needed, or by `start`. Use as a context manager."""

    def __init__(
        self,
        jobs: int,
        cores: int,
        say: Callable[[str], None] = lambda _: None,
        heard: Heard = lambda _: None,
        limits: Limits | None = None,
    ) -> None:
        """Take the number of building workers, the threads of a kernel under test, and what its user wants to know and to allow.

        `say` gets what is waited for, `heard` what was run where and what it has printed; `limits` replace those that callers give.
        """
        self._heard, self._limits = heard, limits
        bounds = limits or Limits()
        self._worker = functools.partial(Worker, memory_bytes=memory_bytes(bounds), output_bytes=int(bounds.output_mib * (1 << 20)))
        self._held = contextlib.ExitStack()
        # What compilers and linkers put aside is removed with this folder, also after they were killed.
        aside = {"TMPDIR": str(self._held.enter_context(scratch_folder()))}
        # A compiler's threads would only get in the way of the other workers; kernels under test get every core.
        threads = {"TVM_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **aside}
        self._builders = [self._worker(threads, COMPILING) for _ in range(jobs)]
        # The worker that was idle last is asked next, else the first unused one: `start` has started it before the others.
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in reversed(self._builders):
            self._idle.put(worker)
        self._all_cores = {"TVM_NUM_THREADS": str(cores), "OPENBLAS_NUM_THREADS": str(cores), **aside}
        alone = {
            ("cpu", ""): self._worker(self._all_cores),
            ("policy", ""): self._worker(threads),
            ("rpc", ""): self._worker(self._all_cores),
        }
        self._measurers = {key: Measurer(worker) for key, worker in alone.items()}
        """The workers that measure, by device and model of GPU, and the one that asks policies."""
        self._gpus: dict[str, tuple[OneGpu, ...]] = {}
        """Those that measure side by side, by model of GPU; the first of them is among the measurers."""
        self._starting = threading.Lock()
        self._say = say
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="build")
        # An interrupt leaves queues and futures that are written in Python locked for ever if it comes while they take their lock.
        self._waiting: list[_Waiting] = []
        self._asking = threading.Lock()
        self._order = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        side_by_side = [gpu.measurer for gpus in self._gpus.values() for gpu in gpus]
        for worker in (*self._builders, *(each.worker for each in (*self._measurers.values(), *side_by_side))):
            worker.stop()
        self._threads.shutdown()  # stopped workers answer at once what still waits
        self._held.close()

    def start(self, count: int) -> None:
        """Start up to `count` building workers, and return at once; they import what they need meanwhile."""
        # In other threads: an interrupt would leave this one without a handle on a process that it is starting.
        for worker in self._builders[:count]:
            self._threads.submit(worker.start)  # one that cannot start says so when it is asked

    def run_all(self, requests: Sequence[Request], limit_secs: float, priority: int = 0) -> Iterator[tuple[int, Answer]]:
        """Queue requests for the building workers at once; yield (position, answer) of each as it is answered.

        Waiting requests go to workers by ascending `priority`, those of equal priority in the order in which they came.
        """
        answered: _Answered = queue.SimpleQueue()
        for index, request in enumerate(requests):
            with self._asking:
                heapq.heappush(self._waiting, (priority, next(self._order), index, request, limit_secs, answered))
            self._threads.submit(self._run_next)
        return _awaited(answered, len(requests))

    def _run_next(self) -> None:
        with self._asking:
            _, _, index, request, limit_secs, answered = heapq.heappop(self._waiting)
        try:
            answered.put((index, self._run(request, limit_secs)))
        finally:
            if error := sys.exception():
                answered.put((index, error))  # it is raised where the answer is waited for

    def _run(self, request: Request, limit_secs: float) -> Answer:
        worker = self._idle.get()
        try:
            return self._asked(worker, request, limit_secs)
        finally:
            self._idle.put(worker)

    def measure(self, request: Request, limit_secs: float) -> Answer:
        """Return the answer of the worker that measures on the request's device, a GPU of `model` or the CPU.

        Requests to measure run one at a time; no build disturbs them if the caller waits for its builds first. Raise
        ToolchainError if there is no such GPU.
        """
        return self.ask(self._measurer(request), request, limit_secs)

    def ask(self, measurer: Measurer, request: Request, limit_secs: float) -> Answer:
        """Return the answer of one of the workers that measure, when it has answered those before."""
        fields = {name: value for name, value in request.items() if name != "model"}
        with measurer.lock:
            return self._asked(measurer.worker, fields, limit_secs)

    def side_by_side(self, model: str, most: int) -> Sequence[LocalRunner | OneGpu]:
        """Return runners that measure at the same time, each on a GPU of the model that is free now; itself where fewer than two are.

        The GPUs stay locked until this runner ends.
        """
        if model not in self._gpus:
            is_one = not model or most < 2 or ("cuda", model) in self._measurers or len(gpus_of(model)) < 2
            gpus = () if is_one else self._held.enter_context(free_gpus(model, most))
            self._gpus[model] = tuple(OneGpu(self, gpu, Measurer(self._gpu_worker(gpu))) for gpu in gpus)
            if gpus:
                self._measurers["cuda", model] = self._gpus[model][0].measurer
        return self._gpus[model][:most] if min(most, len(self._gpus[model])) > 1 else (self,)

    def _asked(self, worker: Worker, request: Request, limit_secs: float) -> Answer:
        """Return the answer to a request, to the second try where the machine may be to blame for the first.

        Not of what needs a process that has prepared something: the search tries those candidates again.
        """
        answer = self._answer(worker, request, limit_secs)
        is_repeated = answer.get("is_transient", False) and request.get("action") not in _OF_WHAT_IS_PREPARED
        return self._answer(worker, request, limit_secs) if is_repeated else answer

    def _answer(self, worker: Worker, request: Request, limit_secs: float) -> Answer:
        field = _LIMITED_BY.get(request.get("action", ""), "")
        began, start = time.time(), time.monotonic()
        answer = worker.call(request, getattr(self._limits, field) if self._limits and field else limit_secs)
        role = f"measure {device}" if (device := request.get("device", "")) in _MEASURED else device or "compile"
        process, failure = f"{role} {worker.pid}", str(answer.get("failure", ""))
        self._heard(Ran(described(request), process, began, time.monotonic() - start, computation_of(request), failure))
        if printed := answer.pop("printed", ""):
            self._heard(Printed(described(request), printed))
        return answer

    def _measurer(self, request: Request) -> Measurer:
        device, model = str(request["device"]), str(request["model"])
        key = (device, model if device == "cuda" else "")
        with self._starting:
            if key not in self._measurers:
                self._measurers[key] = Measurer(self._gpu_worker(self._held.enter_context(held_gpu(model, self._say))))
            return self._measurers[key]

    def _gpu_worker(self, gpu: DriverGpu) -> Worker:
        """Return a process that sees only its own GPU."""
        return self._worker({**self._all_cores, "CUDA_VISIBLE_DEVICES": gpu.uuid})


def memory_bytes(limits: Limits) -> int:
    """Return the bytes that a worker may have; by default a share of the machine's memory."""
    if limits.memory_gib:
        return int(limits.memory_gib * (1 << 30))
    return int(_SHARE_OF_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _awaited(answered: _Answered, count: int) -> Iterator[tuple[int, Answer]]:
    while count:
        try:
            index, answer = answered.get(timeout=_WAKE_SECS)
        except queue.Empty:
            continue
        if isinstance(answer, BaseException):
            raise answer
        count -= 1
        yield index, answer


def in_order(answers: Iterable[tuple[int, Answer]], count: int) -> list[Answer]:
    """Return the answers of `run_all` in the order of their requests."""
    placed: list[Answer] = [{} for _ in range(count)]
    for index, answer in answers:
        placed[index] = answer
    return placed
