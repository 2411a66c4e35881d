"""Owns the question whether anything has changed, asked by many threads at once: who ask while one looks share the next look.

Knows nothing of what is looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Looked:
    """Answers by a look that began after it was called: what was found out before the call is then as old as the look, or older."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look, self._lock = look, threading.Lock()
        self._begun = self._ended = 0
        self._found = True

    def __call__(self) -> bool:
        begun_before = self._begun
        with self._lock:
            if self._ended <= begun_before:
                self._begun += 1
                self._found = self._look()
                self._ended = self._begun
            return self._found
