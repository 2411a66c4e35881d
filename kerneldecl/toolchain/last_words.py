"""Owns what is said of a compiler or a linker that failed.

Knows nothing of what it was to make.
"""

from __future__ import annotations

import re
import signal
import subprocess

SHORT_OF_ROOM = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|could not (?:open|write to|close) (?:temporary )?response file"
    r"|Too many open files|Resource temporarily unavailable|can't start new thread"
)
"""How the C library, Python and g++ tell of a full disk, and of more files or processes than there may be."""


def last_words(result: subprocess.CompletedProcess[str]) -> str:
    """Return why a tool failed: the signal that ended it, else its first line that tells of a full disk, or of an error, else its last one.

    The linker says that the disk is full, and g++ after it that the linker has failed.
    """
    if result.returncode < 0:
        return f"its process was killed by {signal.Signals(-result.returncode).name}"
    lines = f"{result.stderr}\n{result.stdout}".strip().splitlines() or [f"exit code {result.returncode}, no message"]
    of_room = (line for line in lines if SHORT_OF_ROOM.search(line))
    of_error = (line for line in lines if "error" in line or "fatal" in line)
    return next(of_room, next(of_error, lines[-1])).strip()
