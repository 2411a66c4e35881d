"""Owns what is said of a compiler or a linker that failed.

Knows nothing of what it was to make.
"""

from __future__ import annotations

import signal
import subprocess


def last_words(result: subprocess.CompletedProcess[str]) -> str:
    """Return why a tool failed: the signal that ended it, else its first line that tells of an error, else its last one."""
    if result.returncode < 0:
        return f"its process was killed by {signal.Signals(-result.returncode).name}"
    lines = f"{result.stderr}\n{result.stdout}".strip().splitlines() or [f"exit code {result.returncode}, no message"]
    return next((line for line in lines if "error" in line or "fatal" in line), lines[-1]).strip()
