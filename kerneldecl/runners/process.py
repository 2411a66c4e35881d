"""Owns worker processes: one request at a time over pipes, a time limit on each, and how a process that died is reported.

Knows nothing of what the requests mean.

A candidate may crash, hang or corrupt its process. It therefore runs in a separate process, whose death is an
answer like any other: `{"failure": …}`. A worker that died is started again at the next request.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

Answer = dict[str, Any]
_INTERRUPTED: Answer = {"failure": "interrupted"}
STDERR_TAIL_BYTES = 2000


class Worker:
    """A handle on one worker process. Not to be shared between threads, but for `start` and `stop`."""

    def __init__(self, environment: Mapping[str, str], *modules: str) -> None:
        """`modules` are imported as soon as the process starts; others when a request needs them."""
        self._environment, self._modules = {**os.environ, **environment}, modules
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the worker
        self._is_stopped = False
        self._lifecycle = threading.RLock()
        """Held while the process starts or ends: `start` and `stop` come from other threads than requests do."""

    def start(self) -> None:
        """Start the process if there is none; do not wait until it is ready."""
        with self._lifecycle:
            if self._process is None:
                self._started()

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
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._death(process)
        line = self._line(process, limit_secs)
        if line is None:
            self._kill()
            return {"failure": f"took more than {limit_secs:g} s"}
        answer: Answer = json.loads(line) if line.endswith(b"\n") else self._death(process)
        if answer.pop("is_last", False):
            self._kill()  # the GPU's context is lost, and only a new process gets a new one
        return answer

    def stop(self) -> None:
        """End the process at once; the current request and later ones fail."""
        with self._lifecycle:
            self._is_stopped = True
            self._kill()
            self._stderr.close()

    def _started(self) -> subprocess.Popen[bytes] | None:
        with self._lifecycle:
            if self._is_stopped:
                return None
            if self._process is None or self._process.poll() is not None:
                self._process = self._start()
            return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        self._close_lifeline()
        self._stderr.seek(0)
        self._stderr.truncate()
        # The kernel signals the worker when the last writer of this pipe is gone, even if a kernel hangs in it.
        reading, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "kerneldecl.runners.worker", str(reading), *self._modules]
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                pass_fds=(reading,),
                env=self._environment,
                start_new_session=True,
            )
        finally:
            os.close(reading)

    def _line(self, process: subprocess.Popen[bytes], limit_secs: float) -> bytes | None:
        assert process.stdout is not None
        descriptor, deadline, content = process.stdout.fileno(), time.monotonic() + limit_secs, b""
        while not content.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                break
            content += chunk
        return content

    def _death(self, process: subprocess.Popen[bytes]) -> Answer:
        status = process.wait()
        tail = self._stderr_tail()
        self._kill()
        if self._is_stopped:
            return _INTERRUPTED
        meaning = " (an integer was divided by 0)" if -status == signal.SIGFPE else ""
        cause = f"killed by {signal.Signals(-status).name}{meaning}" if status < 0 else f"ended with exit code {status}"
        return {"failure": f"its process was {cause}" if status < 0 else f"its process {cause}", "diagnostics": tail}

    def _stderr_tail(self) -> str:
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - STDERR_TAIL_BYTES))
        return self._stderr.read().decode(errors="replace").strip()

    def _kill(self) -> None:
        with self._lifecycle:
            process, self._process = self._process, None
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    with contextlib.suppress(BrokenPipeError):
                        assert pipe is not None
                        pipe.close()
            self._close_lifeline()

    def _close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
