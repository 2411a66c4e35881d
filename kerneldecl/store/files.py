"""Owns writing files whole: readers see the old content or the new one, also where several write at once; and .gitignore.

Knows nothing of what results mean.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_IGNORED = """\
# kerneldecl: artifacts, and of the store all but the records of declared archs
/dist/
*.part
/cache/*
!/cache/record/
"""


def write_whole(path: Path, content: bytes | str, *, durable: bool) -> None:
    """Replace a file, or make it and its folders. A `durable` one is on the disk before it takes its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)  # still there only if something went wrong


def ignore_results(root: Path) -> list[Path]:
    """Make git ignore what a build writes and can write again; return the file if it was written or extended."""
    ignore = root / ".gitignore"
    before = ignore.read_text(encoding="utf-8") if ignore.exists() else ""
    if _IGNORED in before:
        return []
    write_whole(ignore.resolve(), f"{before}{_IGNORED}", durable=False)
    return [ignore]
