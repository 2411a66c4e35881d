"""A lock is given back, whichever thread took it."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from kerneldecl.errors import LockHeldError
from kerneldecl.store.lock import exclusive


def test_a_lock_that_another_thread_took_is_free_after_its_release(tmp_path: Path) -> None:
    """The thread that measures first locks a GPU; the main thread gives it back, and a second build in this process needs it."""
    path = tmp_path / "gpu.lock"
    held = contextlib.ExitStack()
    thread = threading.Thread(target=lambda: held.enter_context(exclusive(path, "measuring", print)))
    thread.start()
    thread.join()
    with pytest.raises(LockHeldError), exclusive(path, "measuring", print, wait=False):
        pass
    held.close()
    with exclusive(path, "measuring", print, wait=False):
        pass
