"""Owns the connections to a shared cache: several at once, for as long as the cache is worth waiting for.

Knows nothing of what is asked. A cache that fails several times in a row, or keeps a build waiting for longer than what it gives can be
worth, is not asked again: the connections are cut, and what was asked has no answer.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from kerneldecl.store.remote import RefusedError, Remote, RemoteError

AT_ONCE = 16
"""Requests at a time."""
_FAILURES = 3
"""Failures in a row after which a cache is not asked again."""
_PATIENCE_SECS = 7.0
"""What a build waits for a cache that gives nothing. Each answer and each byte adds what a slow network takes for it."""
_SECS_PER_ANSWER = 0.004
_BYTES_PER_SEC = 1e6
_LOOK_SECS = 0.05

T = TypeVar("T")


class Patience:
    """How long a build has waited for a cache, and what it got for it."""

    def __init__(self, secs: float = _PATIENCE_SECS) -> None:
        self._secs = secs
        self.waited_secs = 0.0
        self.answers = 0
        self.moved: list[Remote] = []

    def is_over(self, waiting_secs: float) -> bool:
        """Say whether it has waited longer, with these seconds, than what it got can have taken."""
        worth = self.answers * _SECS_PER_ANSWER + sum(remote.moved_bytes for remote in self.moved) / _BYTES_PER_SEC
        return self.waited_secs + waiting_secs > self._secs + worth


Job = Callable[[Remote], T]


class Connections:
    """Threads that each have a connection, until the cache fails."""

    def __init__(self, connect: Callable[[], Remote], patience: Patience, failed: Callable[[str], None]) -> None:
        """`failed` is called once, with a phrase, when the cache is given up."""
        self._connect = connect
        self._patience = patience
        self._failed = failed
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._remotes: list[Remote] = []
        self._own = threading.local()
        self._lock = threading.Lock()
        self._threads = 0
        self._asked = self._ended = 0
        self._in_row = 0
        self._behind: list[Future[object]] = []
        self.why_closed = ""
        """Why the cache is given up; empty while it is not."""

    def run(self, jobs: Sequence[Job[T]]) -> list[T | None]:
        """Return what each job gives, None where it fails."""
        futures = [self._submitted(job) for job in jobs]
        self._wait(futures)
        return [future.result() if future.done() else None for future in futures]

    def start(self, job: Job[object]) -> None:
        """Have a job done beside what follows."""
        self._behind.append(self._submitted(job))

    def finish(self) -> None:
        """Wait for what was started; raise what it raised."""
        self._wait(self._behind)
        done = [future for future in self._behind if future.done()]
        self._behind.clear()
        for future in done:
            future.result()

    def close(self) -> None:
        """End the threads, once they have done what they are at."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _submitted(self, job: Job[T]) -> Future[T | None]:
        future: Future[T | None] = Future()
        if self.why_closed:
            future.set_result(None)
            return future
        self._asked += 1
        if self._threads < min(AT_ONCE, self._asked - self._ended):
            self._threads += 1
            threading.Thread(target=self._serve, daemon=True, name="shared cache").start()
        self._jobs.put(lambda: self._resolve(future, job))
        return future

    def _resolve(self, future: Future[T | None], job: Job[T]) -> None:
        try:
            found = self._done(job)
            self._ended += 1
        except OSError as error:  # of the local store, such as a full disk: it is raised where the result is asked for
            future.set_exception(error)
        else:
            future.set_result(found)

    def _serve(self) -> None:
        while job := self._jobs.get():
            job()
        if remote := getattr(self._own, "remote", None):
            remote.close()

    def _done(self, job: Job[T]) -> T | None:
        if self.why_closed:
            return None
        try:
            found = job(self._remote())
        except RefusedError as error:
            self.give_up(str(error))
        except RemoteError as error:
            with self._lock:
                self._in_row += 1
            if self._in_row >= _FAILURES:
                self.give_up(str(error))
        else:
            self._in_row = 0
            self._patience.answers += 1
            return found
        return None

    def _remote(self) -> Remote:
        if not hasattr(self._own, "remote"):
            self._own.remote = self._connect()
            self._remotes.append(self._own.remote)
            self._patience.moved.append(self._own.remote)
        return self._own.remote  # type: ignore[no-any-return]

    def _wait(self, futures: Sequence[Future[T]]) -> None:
        began = time.monotonic()
        for future in futures:
            while not self.why_closed and not future.done() and not wait([future], _LOOK_SECS).done:
                if self._patience.is_over(time.monotonic() - began):
                    self.give_up("is too slow to be of use")
        self._patience.waited_secs += time.monotonic() - began

    def give_up(self, why: str) -> None:
        """Ask nothing any more, and cut what is being asked."""
        with self._lock:
            if self.why_closed:
                return
            self.why_closed = why
        for remote in list(self._remotes):
            remote.abort()
        self._failed(why)
