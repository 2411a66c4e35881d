"""Owns how a kernel is checked and timed on a board behind TVM's RPC, inside a worker: arguments there, references here.

Knows nothing of which candidates there are, of how many samples are wanted or of what wins. The board has TVM's runtime and a server that a
tracker knows; the session is this process's as long as it lives. Arguments end at a guard that is looked at after each call. Reads beyond
one show only where memory ends.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import rpc

from kerneldecl.arrays import Array, finite_rms, relative_error
from kerneldecl.runners.reasons import reason_of
from kerneldecl.runners.reference_data import ReferenceData, ResidentData, WorkloadSpec
from kerneldecl.runners.verification import Call, changed, poison_byte, verified
from kerneldecl.signature import Arg
from kerneldecl.timing import Protocol

__all__ = ["confirm", "is_there", "measured_peaks", "prepare", "sample", "verify"]

Board = Mapping[str, Any]
"""Host and port of a tracker, the key of its boards, the kind of their device: cpu or cuda. Specs have it as `board`."""
GUARD_BYTES, GUARD = 4096, 0xC3
FLUSHED_BYTES = 1 << 26
"""What is read between isolated calls on a GPU: more than its L2 cache holds."""


class BoardError(Exception):
    """The session ended or the tracker gave none: nothing that is known of the candidate. A new process gets a new session."""

    is_fatal = True


class _OnBoard:
    """One workload's reference data here, memory for its arguments on the board, and the kernels loaded there."""

    def __init__(self, data: ReferenceData) -> None:
        self.data = data
        self.kernels: dict[str, Any] = {}
        signature = data.signature
        self.args: tuple[Arg, ...] = (*signature.inputs, *signature.outputs)
        likes: tuple[Array, ...] = (*data.inputs, *(np.empty(arg.shape, _numpy(arg.dtype)) for arg in signature.made))
        self._bytes = [like.nbytes for like in likes]
        self._dtypes = [like.dtype for like in likes]
        self._scales = data.all_scales([finite_rms(want) for want in data.expected])
        self._outputs: list[Array] = []

    def place(self, device: Any) -> None:
        """Allocate on the board, unless that was done."""
        if not hasattr(self, "_memory"):
            self._memory = [tvm.runtime.empty((size + GUARD_BYTES,), "uint8", device) for size in self._bytes]
            self.views = [held._create_view(arg.shape, arg.dtype) for held, arg in zip(self._memory, self.args, strict=True)]  # noqa: SLF001
            self._device = device

    def fill(self, call: Call) -> list[Array]:
        """Write inputs, poisoned outputs and guards to the board; return what was written."""
        written: list[Array] = []
        values = [*self.data.sets[call.data].inputs, *self.data.signature.made]
        for held, size, value in zip(self._memory, self._bytes, values, strict=True):
            content = np.full(size + GUARD_BYTES, GUARD, np.uint8)
            content[:size] = poison_byte(call, value) if isinstance(value, Arg) else np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            held.copyfrom(content)
            written.append(content)
        return written

    def run(self, kernel: Any, call: Call) -> str:
        """Call the kernel; return what it wrote besides its outputs, as a phrase."""
        written = self.fill(call)
        kernel(*self.views)
        self._device.sync()
        read = [held.numpy() for held in self._memory]
        inputs = len(self.data.signature.inputs)
        for place, (arg, before, after) in enumerate(zip(self.args, written, read, strict=True)):
            role = "input" if place < inputs else "output"
            if (after[self._bytes[place] :] != GUARD).any():
                return f"it writes behind its {role} {arg.name}"
            if place < inputs and not np.array_equal(before, after):
                return f"it writes into its input {arg.name}"
        self._outputs = [
            content[:size].view(dtype).reshape(arg.shape)
            for content, size, dtype, arg in list(zip(read, self._bytes, self._dtypes, self.args, strict=True))[inputs:]
        ]
        return changed(self.data.signature, self.data.sets[call.data], self._outputs)

    def error(self, call: Call) -> float:
        """Return the largest relative error of the outputs of the last call."""
        data = self.data.sets[call.data]
        outputs = zip(self._outputs, data.expected, self._scales[call.data], strict=True)
        return max(relative_error(got, want, scales, any_for_nan=data.any_for_nan) for got, want, scales in outputs)

    def fingerprint(self, call: Call) -> bytes:
        """Return a digest of the last call's outputs."""
        del call
        found = hashlib.sha256()
        for output in self._outputs:
            found.update(np.ascontiguousarray(output).reshape(-1).view(np.uint8).data)
        return found.digest()


_RESIDENT = ResidentData(_OnBoard)


def _numpy(dtype: str) -> Any:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, dtype, dtype))


@functools.cache
def _session(tracker: str, key: str) -> Any:
    host, _, port = tracker.rpartition(":")
    try:
        there = rpc.connect_tracker(host, int(port))
        known = {str(server["key"]).removeprefix("server:") for server in there.summary()["server_info"]}
        if key not in known:  # who asks for one would wait until it comes
            raise BoardError(f"the tracker {tracker} knows no board of key {key}; it knows {', '.join(sorted(known)) or 'none'}")
        return there.request(key, max_retry=1)
    except (RuntimeError, OSError) as error:
        raise BoardError(f"the tracker {tracker} gives no board of key {key}: {_last(error)}") from error


def _last(error: Exception) -> str:
    return reason_of(str(error))[:200] or type(error).__name__


def _device(board: Board) -> Any:
    session = _session(board["tracker"], board["key"])
    return session.cuda(0) if board["kind"] == "cuda" else session.cpu(0)


def _loaded(board: Board, on_board: _OnBoard, library: str) -> Any:
    """Return a library that was sent to the board and loaded there."""
    on_board.place(_device(board))
    if library not in on_board.kernels:
        session, name = _session(board["tracker"], board["key"]), Path(library).name
        session.upload(library, target=name)
        on_board.kernels[library] = session.load_module(name)
    return on_board.kernels[library]


def is_there(board: Board) -> dict[str, Any]:
    """Answer where the tracker gives a board."""
    _device(board).sync()
    return {}


def prepare(spec: WorkloadSpec) -> dict[str, Any]:
    """Make the random inputs and the reference's outputs of a workload, here, and memory for them there."""
    _RESIDENT.of(spec).place(_device(spec["board"]))
    return {}


def verify(spec: WorkloadSpec, library: str, symbol: str) -> dict[str, Any]:
    """Return the verdict on a kernel, and the seconds of a run on the board."""
    verdict = confirm(spec, library, symbol)
    if "failure" in verdict:
        return verdict
    return {**verdict, "secs": sample(spec, library, symbol, 1, 1)["samples"][0]}


def confirm(spec: WorkloadSpec, library: str, symbol: str) -> dict[str, Any]:
    """Return the verdict on a kernel that has been timed."""
    on_board, board = _RESIDENT.of(spec), spec["board"]
    try:
        return verified(on_board, _loaded(board, on_board, library)[symbol])
    except (RuntimeError, OSError) as error:
        raise BoardError(f"its session on {board['key']} ended: {_last(error)}") from error


def sample(spec: WorkloadSpec, library: str, symbol: str, calls: int, samples: int, protocol: Protocol = "steady") -> dict[str, Any]:
    """Return seconds a call, one figure a sample, by TVM's evaluator on the board."""
    on_board, board = _RESIDENT.of(spec), spec["board"]
    is_cpu, rest = board["kind"] == "cpu", {"cooldown_interval_ms": 1} if protocol == "cool" else {}
    cold = {"f_preproc": "cache_flush_cpu_non_first_arg"} if is_cpu else {"cache_flush_bytes": FLUSHED_BYTES}
    how = {"number": 1, "repeat": samples, **cold} if protocol == "isolated" else {"number": calls, "repeat": samples, **rest}
    try:
        module = _loaded(board, on_board, library)
        on_board.fill(Call(0, 0, at_end=True))
        return {"samples": list(module.time_evaluator(symbol, _device(board), **how)(*on_board.views).results)}
    except (RuntimeError, OSError) as error:
        raise BoardError(f"its session on {board['key']} ended: {_last(error)}") from error


def measured_peaks(board: Board) -> dict[str, Any]:
    """Return which boards have measured; their peaks are not asked for."""
    return {"device": {"board": board["key"], "tracker": board["tracker"]}, "conditions": {}}
