"""Owns the machine's own worker processes: some that build side by side, one that measures alone.

Knows nothing of candidates, records or of what is asked of the workers.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, Self

from kerneldecl.runners.process import Answer, Worker

Request = Mapping[str, Any]


class LocalRunner:
    """Runs requests in worker processes that start when they are first needed. Use as a context manager."""

    def __init__(self, jobs: int, cores: int) -> None:
        # A compiler's threads would only get in the way of the other workers; kernels under test get every core.
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._builders = [Worker({"TVM_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}) for _ in range(jobs)]
        for worker in self._builders:
            self._idle.put(worker)
        self._measurer = Worker({"TVM_NUM_THREADS": str(cores), "OPENBLAS_NUM_THREADS": str(cores)})
        self._threads = ThreadPoolExecutor(jobs, thread_name_prefix="build")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (*self._builders, self._measurer):
            worker.stop()
        self._threads.shutdown(cancel_futures=True)

    def run_all(self, requests: Sequence[Request], limit_secs: float) -> Iterator[tuple[int, Answer]]:
        """Yield (position, answer) of each request, as they are answered, over the building workers."""
        pending: dict[Future[Answer], int] = {self._threads.submit(self._run, r, limit_secs): i for i, r in enumerate(requests)}
        for future in as_completed(pending):
            yield pending[future], future.result()

    def _run(self, request: Request, limit_secs: float) -> Answer:
        worker = self._idle.get()
        try:
            return worker.call(request, limit_secs)
        finally:
            self._idle.put(worker)

    def measure(self, request: Request, limit_secs: float) -> Answer:
        """Return the measuring worker's answer; nothing else of ours runs meanwhile if the caller waits for builds first."""
        return self._measurer.call(request, limit_secs)


def in_order(answers: Iterable[tuple[int, Answer]], count: int) -> list[Answer]:
    """Return the answers of `run_all` in the order of their requests."""
    placed: list[Answer] = [{} for _ in range(count)]
    for index, answer in answers:
        placed[index] = answer
    return placed
