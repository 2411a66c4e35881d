"""A lock is given back, whichever thread took it; who waits is told who has it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest

from kerneldecl.errors import LockHeldError
from kerneldecl.store import lock as locks
from kerneldecl.store.files import write_whole
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


def test_a_holder_that_has_yet_to_write_its_name_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two builds that begin at once: one waits for the lock before the other's name is on the disk."""
    path, locked, said = tmp_path / "tune.lock", threading.Event(), list[str]()

    def late(*args: object, **options: object) -> None:
        locked.set()
        time.sleep(0.2)
        write_whole(*args, **options)  # type: ignore[arg-type]

    def hold() -> None:
        with exclusive(path, "tuning", print):
            time.sleep(0.2)

    thread = threading.Thread(target=hold)
    with monkeypatch.context() as patch:
        patch.setattr(locks, "write_whole", late)
        thread.start()
        assert locked.wait(10)
    with exclusive(path, "tuning", said.append):
        pass
    thread.join()
    (sentence,) = said
    assert sentence.startswith(f"process {os.getpid()} on ")


def test_nobody_who_is_done_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tune.lock"
    with exclusive(path, "tuning", print):
        assert path.with_suffix(".holder").read_text().startswith(f"process {os.getpid()} on ")
    assert not path.with_suffix(".holder").exists()
