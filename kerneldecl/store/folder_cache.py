"""Owns a shared cache that is a folder, of this machine or of a network file system: `ac/<key>` and `cas/<digest>` below it.

Knows nothing of what is kept there. A server of files can serve the same folder.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kerneldecl.store.inside import UnsafeFileError, read_regular
from kerneldecl.store.remote import RefusedError, RemoteError


class FolderCache:
    """Reads and writes a folder that others read and write at the same time: files are there whole or not at all."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.moved_bytes = 0

    def get(self, name: str, most_bytes: int) -> bytes | None:
        try:
            content = read_regular(self._root / name, most_bytes)
        except FileNotFoundError:
            self._check_root()
            return None
        except OSError as error:
            raise RemoteError(f"cannot be read: {error.strerror}") from None
        except UnsafeFileError as error:
            raise RemoteError(f"holds a {name[:12]}… that {error}") from None
        self.moved_bytes += len(content)
        return content

    def has(self, name: str) -> bool:
        return (self._root / name).is_file()

    def put(self, name: str, content: bytes, *, replaces: bool = False) -> bool:
        self._check_root()
        path = self._root / name
        try:
            self._write(path, content, replaces=replaces)
        except FileExistsError:
            return False
        except OSError as error:
            raise RefusedError(f"takes no writes: {error.strerror}") from None
        self.moved_bytes += len(content)
        return True

    def abort(self) -> None:
        """Nothing ends the reading of a file."""

    def close(self) -> None:
        """No file stays open."""

    def _check_root(self) -> None:
        if not self._root.is_dir():
            raise RefusedError("is no folder; make it, or mount what it is on")

    @staticmethod
    def _write(path: Path, content: bytes, *, replaces: bool) -> None:
        path.parent.mkdir(exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            Path(part).chmod(0o644)
            if replaces:
                Path(part).replace(path)
            else:
                path.hardlink_to(part)  # a link fails where there is a file, on a network file system, too
        finally:
            Path(part).unlink(missing_ok=True)
