"""Owns calls to a cluster's workers: where each may run, what becomes of it when a worker refuses or dies, and answers as they come.

Knows nothing of what is called. Dask's scheduler chooses workers, and sends what a dead one had to another.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Client, Future, KilledWorker

from kerneldecl.cluster.node import Told
from kerneldecl.errors import ToolchainError

POLL_SECS = 1.0
_DIED = "its process was killed by SIGKILL: the cluster's workers that it ran on have died, one after the other"


@dataclass(frozen=True)
class Call:
    """A function that is to run on a worker, with its arguments."""

    function: Callable[..., Told]
    arguments: tuple[Any, ...]
    need: str
    """What a worker must be good for: `compile`, or to measure for the arch that this names. A worker that refuses one refuses all."""
    resources: Mapping[str, float] = field(default_factory=dict)
    priority: int = 0
    """The highest come first."""


class Calls:
    """The calls of one build."""

    def __init__(self, client: Client, patience_secs: float, say: Callable[[str], None]) -> None:
        """Take a connection, how long to wait for a worker that does not refuse, and who wants to know of those that do."""
        self._client, self._patience_secs, self._say = client, patience_secs, say
        self._unfit: dict[str, dict[str, str]] = {}
        """Why workers have refused, by what was needed and by address."""
        self._numbers = itertools.count()

    def answers(self, calls: Sequence[Call]) -> Iterator[tuple[int, Told]]:
        """Make calls at once; yield the position and answer of each as it comes. One that has killed worker after worker is a failure."""
        done: queue.SimpleQueue[tuple[int, Future]] = queue.SimpleQueue()
        flying = {at: self._submit(at, call, done) for at, call in enumerate(calls)}
        return self._awaited(calls, flying, done)

    def _awaited(
        self, calls: Sequence[Call], flying: dict[int, Future], done: queue.SimpleQueue[tuple[int, Future]]
    ) -> Iterator[tuple[int, Told]]:
        alone_since: float | None = None
        while flying:
            try:
                at, future = done.get(timeout=POLL_SECS)
            except queue.Empty:
                alone_since = self._checked(alone_since)
                for at in self._stranded(calls, flying):
                    flying[at].cancel()
                    flying[at] = self._submit(at, calls[at], done)
                continue
            if flying.get(at) is not future:
                continue  # it was called elsewhere meanwhile
            told = self._told(future)
            if told is None:
                done.put((at, future))  # it is computed again: whoever had the result has died
                alone_since = self._checked(alone_since)
                continue
            if told.refused:
                self._note_refusal(calls[at].need, told)
                flying[at] = self._submit(at, calls[at], done)
                continue
            del flying[at]
            yield at, told

    def _checked(self, alone_since: float | None) -> float | None:
        """Return since when there is no worker at all, None where there is one; raise ToolchainError where none comes."""
        if workers_with(self._client, {}):
            return None
        since = time.monotonic() if alone_since is None else alone_since
        if time.monotonic() - since > self._patience_secs:
            where = self._client.scheduler.address
            raise ToolchainError(f"{where} has had no worker for {self._patience_secs:g} s; what was finished is kept, build again")
        return since

    def _submit(self, at: int, call: Call, done: queue.SimpleQueue[tuple[int, Future]]) -> Future:
        where = {"workers": self._fit(call), "allow_other_workers": False} if self._unfit.get(call.need) else {}
        name = f"{call.function.__name__}-{self._client.id}-{next(self._numbers)}"
        future = self._client.submit(
            call.function, *call.arguments, key=name, pure=False, resources=dict(call.resources), priority=call.priority, **where
        )
        future.add_done_callback(lambda ended: done.put((at, ended)))
        return future

    def _told(self, future: Future) -> Told | None:
        """Return a call's answer; None where it is not to be had now."""
        try:
            found: Told = future.result(timeout=POLL_SECS)
        except TimeoutError:
            return None
        except KilledWorker:
            found = Told("", answer={"failure": _DIED, "is_transient": True})
        except OSError as error:
            raise ToolchainError(f"the cluster's scheduler at {self._client.scheduler.address} is gone ({error})") from None
        future.release()
        return found

    def _note_refusal(self, need: str, told: Told) -> None:
        unfit = self._unfit.setdefault(need, {})
        if told.worker not in unfit:
            self._say(f"worker {told.worker} is left out ({need}): {told.refused}")
        unfit[told.worker] = told.refused

    def _fit(self, call: Call) -> list[str]:
        """Return the workers that have not refused; raise ToolchainError where none comes."""
        unfit = self._unfit.get(call.need, {})
        fit: list[str] = []

        def look() -> bool:
            fit[:] = [worker for worker in workers_with(self._client, call.resources) if worker not in unfit]
            return bool(fit)

        if not waited_for(look, self._patience_secs):
            worker, reason = next(iter(unfit.items()))
            raise ToolchainError(f"no worker of {self._client.scheduler.address} can {call.need}; of {worker}: {reason}")
        return fit

    def _stranded(self, calls: Sequence[Call], flying: Mapping[int, Future]) -> list[int]:
        """Return the calls that may run only on workers which are gone: the scheduler keeps them for these."""
        bound = [at for at in flying if self._unfit.get(calls[at].need)]
        if not bound:
            return []
        processing = {key for keys in self._client.processing().values() for key in keys}
        return [at for at in bound if flying[at].status == "pending" and flying[at].key not in processing]


def workers_with(client: Client, resources: Mapping[str, float]) -> Collection[str]:
    """Return the addresses of the workers that offer these resources now."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return [at for at, told in workers.items() if all(told["resources"].get(name, 0) >= count for name, count in resources.items())]


def waited_for(look: Callable[[], bool], limit_secs: float) -> bool:
    """Look until there is something, or for so long; say whether there is."""
    deadline = time.monotonic() + limit_secs
    while not (found := look()) and time.monotonic() < deadline:
        time.sleep(POLL_SECS / 4)
    return found
