"""Owns speeding up TVM's script parser.

Knows nothing of the kernels that are parsed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

_GETFRAMEINFO = inspect.getframeinfo


@contextmanager
def fast_parsing() -> Iterator[None]:
    """Have `inspect` describe stack frames without their source lines.

    TVM 0.27 inspects the whole stack at each macro and each resource of a kernel. Reading the source lines, which only error messages
    show, takes longer than the rest of the parsing.
    """
    inspect.getframeinfo = _without_source
    try:
        yield
    finally:
        inspect.getframeinfo = _GETFRAMEINFO


def _without_source(frame: FrameType | TracebackType, context: int = 1) -> inspect.Traceback:
    if isinstance(frame, TracebackType) or not context:
        return _GETFRAMEINFO(frame, context)
    code = frame.f_code
    return inspect.Traceback(filename=code.co_filename, lineno=frame.f_lineno, function=code.co_name, code_context=None, index=None)
