"""Owns which failures of a request the machine may have caused: something else ended the process, or time, memory or room were short.

Knows nothing of processes or candidates. Such a failure says nothing of what was asked for: it is tried again, and stands in no record.
"""

from __future__ import annotations

import re

from kerneldecl.toolchain.last_words import SHORT_OF_ROOM

OUT_OF_MEMORY = "out of memory"
# Signals that a process draws upon itself; all others come from outside, such as from the kernel when memory is short.
_OWN_SIGNALS = "SEGV|ABRT|FPE|ILL|BUS|TRAP|SYS"
_SHORT_OF_MEMORY = re.compile(r"MemoryError|bad_alloc|out of memory|cannot allocate memory|OUT_OF_MEMORY", re.IGNORECASE)
_KILLED = rf"its process was killed by SIG(?!(?:{_OWN_SIGNALS})\b)"
_BY_MACHINE = re.compile(rf"(?:inputs or reference: )?(?:interrupted$|took more than |BoardError: |{_KILLED})")
_TOOL_KILLED = re.compile(rf"{_KILLED}|terminated with signal 9|Killed signal terminated program|died due to signal 9")
"""How failures speak of a tool that a worker has started: of the tool itself, then as g++, gcc and nvcc do of what they start."""


def is_by_machine(failure: str) -> bool:
    """Say whether a failure, as an answer or a trial words it, may be the machine's."""
    is_killed = _BY_MACHINE.match(failure) is not None or _TOOL_KILLED.search(failure) is not None
    return is_killed or is_short_of_memory(failure) or SHORT_OF_ROOM.search(failure) is not None


def is_short_of_memory(text: str) -> bool:
    """Say whether a message, or the last words of a process, tell of memory that was not to be had."""
    return _SHORT_OF_MEMORY.search(text) is not None
