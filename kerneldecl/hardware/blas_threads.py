"""Owns how many threads NumPy's own matrix products take.

Knows nothing of what is multiplied. A BLAS other than OpenBLAS, which NumPy's wheels bring, is left as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

_CHANGING = threading.Lock()
_BEFORE: list[int] = []
"""For each of those who want one thread just now, how many there were before the first of them: a process has one number."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Have each product take the thread alone that asks for it, until the last of those who want it so is done."""
    blas = _openblas()
    if blas is None:
        yield
        return
    with _CHANGING:
        _BEFORE.append(_BEFORE[0] if _BEFORE else blas.threads())
        blas.take(1)
    try:
        yield
    finally:
        with _CHANGING:
            before = _BEFORE.pop()
            if not _BEFORE:
                blas.take(before)


def threads() -> int | None:
    """Return how many threads a large product takes; None where that cannot be found out."""
    blas = _openblas()
    return blas.threads() if blas else None


class _Blas(NamedTuple):
    threads: Callable[[], int]
    take: Callable[[int], object]


@functools.cache
def _openblas() -> _Blas | None:
    """Return OpenBLAS's own functions, which its builds name with one prefix and suffix or another; None for another BLAS."""
    # Of a library, those that it needs are searched, too.
    library = ctypes.CDLL(importlib.import_module("numpy.linalg._umath_linalg").__file__)
    for prefix, suffix in itertools.product(("scipy_", ""), ("64_", "")):
        with contextlib.suppress(AttributeError):
            return _Blas(*(getattr(library, f"{prefix}openblas_{verb}_num_threads{suffix}") for verb in ("get", "set")))
    return None
