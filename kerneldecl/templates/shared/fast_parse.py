"""Owns having TVM's script parser read kernels quickly.

Knows nothing of what they compute.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

_PLAIN = inspect.getframeinfo


@contextmanager
def parsed_quickly() -> Iterator[None]:
    """Have frames of the stack named without the lines of source around them.

    TVM 0.27 looks through the whole stack at each macro and each resource of a kernel. Finding source, which none but messages
    would show, takes Python longer than all the rest of the parsing.
    """
    inspect.getframeinfo = _named
    try:
        yield
    finally:
        inspect.getframeinfo = _PLAIN


def _named(frame: FrameType | TracebackType, context: int = 1) -> inspect.Traceback:
    if isinstance(frame, TracebackType) or not context:
        return _PLAIN(frame, context)
    return inspect.Traceback(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None, None)
