"""Owns the standard streams as a command finds them: closed ones lead nowhere, and what an encoding lacks is escaped.

Knows nothing of what is read or written.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def make_usable() -> None:
    """Replace what Python has found closed, and have no character that is written raise."""
    for number in range(len(_STREAMS)):
        _occupy(number)
    for name, mode in _STREAMS:
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  it stays open to the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _occupy(number: int) -> None:
    """Keep the next file that is opened from taking a standard stream's number: it would get what libraries and processes print."""
    with contextlib.suppress(OSError):
        os.fstat(number)
        return
    os.open(os.devnull, os.O_RDWR)  # which takes the lowest number that is free
