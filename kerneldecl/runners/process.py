"""Owns worker processes: one request at a time over pipes, limits on each, and how a process that died is reported.

Knows nothing of what the requests mean.

A candidate may crash, hang or corrupt its process. It therefore runs in a separate process, whose death is an
answer like any other: `{"failure": …, "has_died": true}`. A worker that died is started again at the next request. An answer with
`is_transient` says that the machine may be to blame: something else ended the process, memory was short, or time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kerneldecl.runners import environment as surroundings
from kerneldecl.runners.failures import OUT_OF_MEMORY, is_by_machine, is_short_of_memory
from kerneldecl.runners.group import end_all

Answer = dict[str, Any]
Answers = Iterator[tuple[int, Answer]]
"""Each with the position of its request, in the order in which they come."""
INTERRUPTED = "interrupted"
_INTERRUPTED: Answer = {"failure": INTERRUPTED}
"""Of a worker that was stopped."""
STDERR_TAIL_BYTES = 2000
PRINTED_BYTES = 1 << 16
"""What is kept of what a request prints: its end."""
OUTPUT_BYTES = 256 << 20
"""Most bytes of an answer, and most that a request may print, unless the user says otherwise."""


class Worker:
    """A handle on one worker process. Not to be shared between threads, but for `start` and `stop`."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *modules: str,
        folder: Path | None = None,
        memory_bytes: int = 0,
        output_bytes: int = OUTPUT_BYTES,
    ) -> None:
        """`modules` are imported as soon as the process starts; others when a request needs them.

        It runs in `folder`, by default in an empty one of its own; nothing is imported from either. `memory_bytes` bounds the private
        memory of the process and of each of its children, if not 0.
        """
        self._where = folder
        self._mark = f"KERNELDECL_WORKER={uuid.uuid4().hex}"
        marked = {**environment, **dict([self._mark.split("=")]), "KERNELDECL_MEMORY_BYTES": str(memory_bytes)}
        self._environment, self._modules = surroundings.clean_environment(os.environ, marked), modules
        self._output_bytes = output_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lifeline = -1
        self._printed = bytearray()
        self._printed_bytes = 0
        self._is_stopped = False
        self._lifecycle = threading.RLock()
        """Held while the process starts or ends: `start` and `stop` come from other threads than requests do."""

    def start(self) -> None:
        """Start the process if there is none; do not wait until it is ready."""
        with self._lifecycle:
            if self._process is None:
                self._started()

    @property
    def pid(self) -> int:
        """The process that was started last; 0 where none was."""
        return self._pid

    def call(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        """Return the worker's answer, or `{"failure": reason}` if it dies or takes longer than the limit."""
        process = self._started()
        if process is None:
            return _INTERRUPTED
        try:
            return self._answer(process, request, limit_secs)
        except (OSError, ValueError):
            if self._is_stopped:
                return _INTERRUPTED  # `stop` has closed the pipes meanwhile
            raise

    def _answer(self, process: subprocess.Popen[bytes], request: Mapping[str, Any], limit_secs: float) -> Answer:
        self._printed.clear()
        self._printed_bytes = 0
        try:
            line = self._line(process, json.dumps(request).encode() + b"\n", limit_secs)
        except BrokenPipeError:
            return self._death(process)
        if isinstance(line, str):
            self._kill()
            return self._completed({"failure": line})
        answer: Answer = json.loads(line) if line.endswith(b"\n") else self._death(process)
        if answer.pop("is_last", False):
            self._kill()  # the GPU's context is lost, and only a new process gets a new one
        return self._completed(answer)

    def _completed(self, answer: Answer) -> Answer:
        """Return an answer with what was printed meanwhile, and with whether the machine may be to blame for a failure."""
        printed = self._printed.decode(errors="replace").strip()
        transient = {"is_transient": True} if is_by_machine(answer.get("failure", "")) else {}
        return {**answer, **transient, **({"printed": printed} if printed else {})}

    def stop(self) -> None:
        """End the process at once; the current request and later ones fail."""
        with self._lifecycle:
            self._is_stopped = True
            self._kill()

    def _started(self) -> subprocess.Popen[bytes] | None:
        with self._lifecycle:
            if self._is_stopped:
                return None
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
                self._pid = self._process.pid
            return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        self._kill()  # what the one before has left
        # The kernel signals the worker when the last writer of this pipe is gone, even if a kernel hangs in it.
        reading, self._lifeline = os.pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="worker-", dir=self._environment.get("TMPDIR"), ignore_cleanup_errors=True)
        try:
            return subprocess.Popen(
                surroundings.command(str(reading), *self._modules),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(reading,),
                cwd=self._where or self._folder.name,
                env=self._environment,
                start_new_session=True,
            )
        finally:
            os.close(reading)

    def _line(self, process: subprocess.Popen[bytes], request: bytes, limit_secs: float) -> bytes | str:
        """Return the worker's line, cut short where the process ended, or which limit it ran into.

        It may print while it gets a request: nothing here waits for it to read.
        """
        pipes = (process.stdin, process.stdout, process.stderr)
        requests, answers, printed = (pipe.fileno() for pipe in pipes if pipe is not None)
        os.set_blocking(requests, False)
        deadline, content = time.monotonic() + limit_secs, bytearray()
        while not content.endswith(b"\n"):
            left_secs = deadline - time.monotonic()
            readable, writable, _ = select.select([answers, printed], [requests] if request else [], [], max(0.0, left_secs))
            if writable:
                request = request[os.write(requests, request) :]
            if printed in readable and self._listen(printed) and self._printed_bytes > self._output_bytes:
                return f"printed more than {self._output_bytes} bytes"
            chunk = os.read(answers, 1 << 16) if answers in readable else None
            content += chunk or b""
            if chunk == b"":
                break
            if len(content) > self._output_bytes:
                return f"answered with more than {self._output_bytes} bytes"
            if chunk is None and left_secs <= 0:
                return f"took more than {limit_secs:g} s"
        while select.select([printed], [], [], 0)[0] and self._listen(printed):
            pass
        return bytes(content)

    def _listen(self, descriptor: int) -> int:
        """Keep the end of what the process prints; return how many bytes there were."""
        chunk = os.read(descriptor, 1 << 16)
        self._printed += chunk
        self._printed_bytes += len(chunk)
        del self._printed[:-PRINTED_BYTES]
        return len(chunk)

    def _death(self, process: subprocess.Popen[bytes]) -> Answer:
        status = process.wait()
        tail = self._printed[-STDERR_TAIL_BYTES:].decode(errors="replace").strip()
        self._kill()
        if self._is_stopped:
            return _INTERRUPTED
        if status >= 0:
            return {"failure": f"its process ended with exit code {status}", "diagnostics": tail, "has_died": True}
        name = signal.Signals(-status).name
        meaning = " (an integer was divided by 0)" if -status == signal.SIGFPE else ""
        cause = f": {OUT_OF_MEMORY}" if is_short_of_memory(tail) else meaning
        return {"failure": f"its process was killed by {name}{cause}", "diagnostics": tail, "has_died": True}

    def _kill(self) -> None:
        with self._lifecycle:
            process, self._process = self._process, None
            if process is not None:
                end_all(process, self._mark)
                for pipe in (process.stdin, process.stdout, process.stderr):
                    with contextlib.suppress(BrokenPipeError):
                        assert pipe is not None
                        pipe.close()
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None
            if self._lifeline >= 0:
                os.close(self._lifeline)
                self._lifeline = -1
