"""Owns canaries: folders of which the kernel reports every touch, by whatever path, link or process it comes.

Knows nothing of who might touch them.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Self

_ANY = 0x00000FFF
"""IN_ALL_EVENTS of inotify(7)."""
_libc = ctypes.CDLL(None, use_errno=True)


class Canary:
    """A folder outside with a secret file; `is_touched` says whether anybody opened, read, changed or removed anything."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.secret = folder, folder / "secret.txt"
        self.secret.write_text("secret", encoding="utf-8")
        self._queue = -1

    def __enter__(self) -> Self:
        self._queue = _libc.inotify_init1(os.O_NONBLOCK)
        assert self._queue >= 0
        for path in (self.folder, *self.folder.iterdir()):
            assert _libc.inotify_add_watch(self._queue, os.fsencode(path), _ANY) >= 0
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._queue)

    def is_touched(self) -> bool:
        """Say whether anything happened since this was last asked."""
        try:
            return bool(os.read(self._queue, 1 << 16))
        except BlockingIOError:
            return False
