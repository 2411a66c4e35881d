"""Owns what keeps a plug-in's code from stopping the process that checks it: endless loops, `os._exit`, prints among results.

Knows nothing of plug-ins. Rules say what their attributes are, so they are imported where declarations are checked; all else of the
users' runs in workers, which have limits of their own. Python interrupts its own code alone: a loop within a C function goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

LIMIT_SECS = 20.0
"""Longest that one import or one check may take."""
_AGAIN_SECS = 1.0


class Stopped(SystemExit):
    """A plug-in's code would have stopped this process. `except Exception` there does not catch it."""


@contextlib.contextmanager
def guarded(limit_secs: float = LIMIT_SECS) -> Iterator[None]:
    """Raise Stopped within code that takes longer or would end the process; have it print to standard error."""
    if "KERNELDECL_WORKER" in os.environ or threading.current_thread() is not threading.main_thread():
        yield  # a worker has limits, and only the main thread can be interrupted
        return

    def stop(*_: object) -> None:
        raise Stopped(f"it takes more than {limit_secs:g} s")

    def refuse(status: int) -> None:
        raise Stopped(f"it ends the process by os._exit({status})")

    before, end = signal.signal(signal.SIGALRM, stop), os._exit
    os._exit = refuse  # type: ignore[assignment]  # it returns as little
    try:
        with contextlib.redirect_stdout(sys.stderr):
            signal.setitimer(signal.ITIMER_REAL, limit_secs, _AGAIN_SECS)
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os._exit = end
