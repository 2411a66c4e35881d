"""Owns calls to a cluster's workers: where each may run, what becomes of it when a worker refuses or dies, and answers as they come.

Knows nothing of what is called. Dask's scheduler chooses workers, and sends what a dead one had to another. One thread sends and one
receives, whoever asks: a message of the client and one of the scheduler serve many calls.
"""

from __future__ import annotations

import itertools
import pickle
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import Future as Running
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import dask
from distributed import Client, Future, KilledWorker

from kerneldecl.cluster.node import Returned, Told, called
from kerneldecl.cluster.parcels import Call, Parcel, Parcels, Waiting
from kerneldecl.errors import ToolchainError

POLL_SECS = 1.0
_PAUSE_SECS, _BUSY_PAUSE_SECS = 0.002, 0.02
"""What is asked or has ended within this time goes in one message; the longer one where many calls are under way."""
_MANY = 24
_ENDED = frozenset({"finished", "error", "cancelled"})
"""States of a future that has something to say."""
_DIED = "its process was killed by SIGKILL: the cluster's workers that it ran on have died, one after the other"


@dataclass(frozen=True)
class _Sent:
    """A parcel that is under way."""

    parcel: Parcel
    future: Future


class Calls:
    """The calls of one build. Use `close` when nobody waits for one any more."""

    def __init__(self, client: Client, patience_secs: float, say: Callable[[str], None]) -> None:
        """Take a connection, how long to wait for a worker that does not refuse, and who wants to know of those that do."""
        self._client, self._patience_secs, self._say = client, patience_secs, say
        self._unfit: dict[str, dict[str, str]] = {}
        """Why workers have refused, by what was needed and by address."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        """Held by who changes what waits or is under way."""
        self._parcels, self._flying = Parcels(), dict[str, _Sent]()
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_flying = threading.Event()
        """Wakes the thread that receives."""
        self._alone_since: float | None = None
        self._unplaced_since: dict[str, float] = {}
        self._error: BaseException | None = None
        self._is_closed = False
        self._threads = ThreadPoolExecutor(2, "calls")
        for work in (self._send, self._receive):
            self._threads.submit(work).add_done_callback(self._stopped)

    def close(self) -> None:
        """End the threads; whoever still waits for an answer gets an error."""
        self._is_closed = True
        self._asked.put(None)
        self._is_flying.set()
        self._threads.shutdown(wait=True)
        self._fail(ToolchainError("the build has ended"))

    def answers(self, calls: Sequence[Call]) -> Iterator[tuple[int, Told]]:
        """Make calls at once; yield the position and answer of each as it comes. One that has killed worker after worker is a failure."""
        told: queue.SimpleQueue[tuple[int, Told | BaseException]] = queue.SimpleQueue()
        now = time.monotonic()
        with self._lock:
            for at, call in enumerate(calls):
                self._parcels.add(Waiting(call, partial(_put, told, at), now))
        if self._error:
            self._fail(self._error)
        self._asked.put(None)
        return _awaited(len(calls), told)

    def _stopped(self, running: Running[None]) -> None:
        """Have whoever waits, and whoever asks from now on, know why a thread has ended."""
        self._error = running.exception() or ToolchainError("the build has ended")
        self._fail(self._error)

    def _fail(self, error: BaseException) -> None:
        """Tell all who wait that no answer comes."""
        with self._lock:
            items = [*self._parcels.clear(), *(item for sent in self._flying.values() for item in sent.parcel)]
            self._flying.clear()
        for item in items:
            item.tell(error)

    def _pause(self) -> None:
        """Let others ask or end meanwhile: one message then serves several."""
        time.sleep(_BUSY_PAUSE_SECS if len(self._flying) >= _MANY else _PAUSE_SECS)

    # Sending

    def _send(self) -> None:
        due_secs: float | None = None
        while not self._is_closed:
            try:
                self._asked.get(timeout=due_secs)
                self._pause()
                while True:
                    self._asked.get_nowait()
            except queue.Empty:
                pass
            with self._lock:
                parcels = self._parcels.take(time.monotonic())
            is_placed = [self._submit(list(several)) for _, several in itertools.groupby(parcels, key=_place)]
            with self._lock:
                due_secs = self._parcels.due_secs(time.monotonic())
            if not all(is_placed):
                due_secs = POLL_SECS / 4

    def _submit(self, parcels: Sequence[Parcel]) -> bool:
        """Send parcels of one need in one message; say whether there is a worker for them."""
        call = parcels[0][0].call
        where: Mapping[str, Any] = {}
        if self._unfit.get(call.need):
            fit = self._fit(call)
            if not fit:
                return self._put_back(parcels)
            where = {"workers": fit, "allow_other_workers": False}
        self._unplaced_since.pop(call.need, None)
        names = [f"{parcel[0].call.function.__name__}-{self._client.id}-{next(self._numbers)}" for parcel in parcels]
        priorities = {name: parcel[0].call.priority for name, parcel in zip(names, parcels, strict=True)}
        contents = [pickle.dumps([(item.call.function, item.call.arguments) for item in parcel]) for parcel in parcels]
        with dask.annotate(priority=priorities.__getitem__):
            futures = self._client.map(called, contents, key=names, pure=False, resources=dict(call.resources), **where)
        with self._lock:
            self._flying |= {future.key: _Sent(parcel, future) for parcel, future in zip(parcels, futures, strict=True)}
        self._is_flying.set()
        return True

    def _fit(self, call: Call) -> list[str]:
        """Return the workers that have not refused."""
        unfit = self._unfit[call.need]
        return [worker for worker in workers_with(self._client, call.resources) if worker not in unfit]

    def _put_back(self, parcels: Sequence[Parcel]) -> bool:
        """Have calls wait for a worker that does not refuse; tell who has waited for too long that none comes."""
        need = parcels[0][0].call.need
        began = self._unplaced_since.setdefault(need, time.monotonic())
        is_over = time.monotonic() - began > self._patience_secs
        worker, reason = next(iter(self._unfit[need].items()))
        error = ToolchainError(f"no worker of {self._client.scheduler.address} can {need}; of {worker}: {reason}")
        for parcel in parcels:
            self._end(parcel, None)
            for item in parcel:
                item.tell(error) if is_over else self._again(item)
        return is_over

    def _again(self, item: Waiting) -> None:
        with self._lock:
            self._parcels.add(item)

    def _end(self, parcel: Parcel, secs: float | None) -> None:
        with self._lock:
            self._parcels.returned(parcel, secs)

    # Receiving

    def _receive(self) -> None:
        looked = time.monotonic()
        pause_secs = _PAUSE_SECS
        while not self._is_closed:
            ended = self._ended()
            if ended:
                self._alone_since = None
                self._settle(ended)
            if time.monotonic() - looked > POLL_SECS:
                looked = time.monotonic()
                self._look_after(is_quiet=not ended)
            # To look at dozens of futures takes less than to be told of one.
            pause_secs = _PAUSE_SECS if ended and len(self._flying) < _MANY else min(_BUSY_PAUSE_SECS, 2 * pause_secs)
            if self._is_flying.wait(POLL_SECS):
                time.sleep(pause_secs)

    def _ended(self) -> list[Future]:
        """Return the calls that have ended."""
        with self._lock:
            sent = list(self._flying.values())
            if not sent and not self._is_closed:
                self._is_flying.clear()
        return [each.future for each in sent if each.future.status in _ENDED]

    def _settle(self, futures: Sequence[Future]) -> None:
        """Tell the answers of calls that have ended."""
        for future, returned in zip(futures, self._returned(futures), strict=True):
            if returned is None:
                continue  # it is computed again: whoever had the result has died
            with self._lock:
                sent = self._flying.pop(future.key, None)
            future.release()
            if sent:
                self._end(sent.parcel, returned.secs)
                self._tell(sent.parcel, returned.told)
        self._asked.put(None)

    def _tell(self, parcel: Parcel, told: Sequence[Told]) -> None:
        for item, answer in zip(parcel, told, strict=False):
            if answer.refused:
                self._note_refusal(item.call.need, answer)
                self._again(item)
            else:
                item.tell(answer)
        if not told:  # it has killed worker after worker: one of several may be to blame, and is found out alone
            for item in parcel:
                self._again(item._replace(call=replace(item.call, kind="")))

    def _returned(self, futures: Sequence[Future]) -> Sequence[Returned | None]:
        """Return what workers have answered; None for what is not to be had now."""
        if all(future.status == "finished" for future in futures):
            try:
                return list(map(_unpacked, self._client.sync(_gathered, self._client, futures, callback_timeout=POLL_SECS)))
            except (TimeoutError, KilledWorker, OSError, CancelledError):
                pass  # each is looked at by itself
        return [self._one(future) for future in futures]

    def _one(self, future: Future) -> Returned | None:
        try:
            return _unpacked(future.result(timeout=POLL_SECS))
        except TimeoutError:
            return None
        except KilledWorker:
            is_alone = len(self._flying[future.key].parcel) == 1
            return Returned((Told("", answer={"failure": _DIED, "is_transient": True}),) if is_alone else (), None)
        except (OSError, CancelledError) as error:
            raise ToolchainError(f"the cluster's scheduler at {self._client.scheduler.address} is gone ({error})") from None

    def _note_refusal(self, need: str, told: Told) -> None:
        unfit = self._unfit.setdefault(need, {})
        if told.worker not in unfit:
            self._say(f"worker {told.worker} is left out ({need}): {told.refused}")
        unfit[told.worker] = told.refused

    # What nobody tells

    def _look_after(self, *, is_quiet: bool) -> None:
        with self._lock:
            sent = list(self._flying.values())
        if is_quiet and sent:
            self._alone_since = self._checked(self._alone_since)
        for each in self._stranded(sent):
            with self._lock:
                self._flying.pop(each.future.key, None)
            each.future.cancel()
            self._end(each.parcel, None)
            for item in each.parcel:
                self._again(item)
            self._asked.put(None)

    def _checked(self, alone_since: float | None) -> float | None:
        """Return since when there is no worker at all, None where there is one; raise ToolchainError where none comes."""
        if workers_with(self._client, {}):
            return None
        since = time.monotonic() if alone_since is None else alone_since
        if time.monotonic() - since > self._patience_secs:
            where = self._client.scheduler.address
            raise ToolchainError(f"{where} has had no worker for {self._patience_secs:g} s; what was finished is kept, build again")
        return since

    def _stranded(self, sent: Sequence[_Sent]) -> list[_Sent]:
        """Return the parcels that may run only on workers which are gone: the scheduler keeps them for these."""
        bound = [each for each in sent if self._unfit.get(each.parcel[0].call.need)]
        if not bound:
            return []
        processing = {key for keys in self._client.processing().values() for key in keys}
        return [each for each in bound if each.future.status == "pending" and each.future.key not in processing]


def _put(told: queue.SimpleQueue[tuple[int, Told | BaseException]], at: int, found: Told | BaseException) -> None:
    told.put((at, found))


def _awaited(count: int, told: queue.SimpleQueue[tuple[int, Told | BaseException]]) -> Iterator[tuple[int, Told]]:
    for _ in range(count):
        at, found = told.get()
        if isinstance(found, BaseException):
            raise found
        yield at, found


def _place(parcel: Parcel) -> tuple[str, Sequence[tuple[str, float]]]:
    """Return what parcels share that go in one message."""
    call = parcel[0].call
    return call.need, sorted(call.resources.items())


def _unpacked(content: bytes) -> Returned:
    returned: Returned = pickle.loads(content)  # noqa: S301  as Dask does it
    return returned


async def _gathered(client: Client, futures: Sequence[Future]) -> Sequence[bytes]:
    found: Sequence[bytes] = await client.gather(list(futures), asynchronous=True)
    return found


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
