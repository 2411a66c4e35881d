"""Owns a process in which contenders are compared: it dies with a kernel that breaks it, and the benchmark goes on.

Knows nothing of what is asked. Needs torch, imported before TVM: it loads CUDA's runtime library.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

CLOSING_SECS = 5.0


class OwnProcess:
    """A process for questions; after a kernel has broken it, the next question starts another."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._ours: Any = None

    def ask(self, question: Callable[..., Any], *given: Any, limit_secs: float = 180.0) -> Any:
        """Return the answer; without one, raise RuntimeError with the reason, and let the next question start a new process."""
        if self._process is None:
            self._ours, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._ours.send((question, given))
        answer: Any = RuntimeError(f"no answer within {limit_secs:.0f} s")
        if self._ours.poll(limit_secs):
            try:
                answer = self._ours.recv()
            except (EOFError, ConnectionResetError):
                answer = RuntimeError("the process that ran it died")
        if isinstance(answer, RuntimeError):
            self.close()
            raise answer
        return answer

    def close(self) -> None:
        """End the process: it ends by itself where it waits for a question, and is killed where it is stuck."""
        if self._process is not None:
            self._ours.close()
            self._process.join(CLOSING_SECS)
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(questions: Any) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    while True:
        try:
            question, given = questions.recv()
        except EOFError:
            return
        try:
            answer = question(*given)
        except Exception as error:  # noqa: BLE001  reported to the caller
            answer = RuntimeError(first_line(error))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        questions.send(answer)


def first_line(error: BaseException) -> str:
    """Return an error's kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"
