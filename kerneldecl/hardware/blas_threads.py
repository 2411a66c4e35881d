"""Owns the number of threads of NumPy's BLAS.

Knows nothing of what is computed. Only OpenBLAS, which NumPy's wheels contain, is controlled; another BLAS is left alone.
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
"""One item for each `one_thread` that is active: the number of threads before the first of them. A process has one number."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run BLAS calls in the calling thread alone, until the last active `one_thread` ends."""
    blas = _openblas()
    if blas is None:
        yield
        return
    with _CHANGING:
        _BEFORE.append(_BEFORE[0] if _BEFORE else blas.threads())
        blas.set_threads(1)
    try:
        yield
    finally:
        with _CHANGING:
            before = _BEFORE.pop()
            if not _BEFORE:
                blas.set_threads(before)


def threads() -> int | None:
    """Return how many threads a large GEMM takes; None for a BLAS that is not OpenBLAS."""
    blas = _openblas()
    return blas.threads() if blas else None


class _Blas(NamedTuple):
    threads: Callable[[], int]
    set_threads: Callable[[int], object]


@functools.cache
def _openblas() -> _Blas | None:
    """Return OpenBLAS's functions, whose prefix and suffix depend on its build; None for another BLAS."""
    # A symbol is also searched in the libraries that this one needs.
    library = ctypes.CDLL(importlib.import_module("numpy.linalg._umath_linalg").__file__)
    for prefix, suffix in itertools.product(("scipy_", ""), ("64_", "")):
        with contextlib.suppress(AttributeError):
            get, set_threads = (getattr(library, f"{prefix}openblas_{verb}_num_threads{suffix}") for verb in ("get", "set"))
            return _Blas(get, set_threads)
    return None
