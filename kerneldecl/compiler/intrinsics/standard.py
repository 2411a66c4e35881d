"""Owns the registration of TVM's own tensor intrinsics, those of one kind of device at a time.

Knows nothing of schedules or of who tensorizes.

`import tvm.s_tir.tensor_intrin` parses the intrinsics of every device, each of which has Python list the whole stack with its source
lines: ten seconds on an idle core. Those of one device, with a stack that is not read from files, take less than one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator

_PACKAGE = "tvm.s_tir.tensor_intrin"
_MODULES = {"cpu": ("x86",), "cuda": ("cuda",)}


@functools.cache
def register_intrinsics(kind: str) -> None:
    """Register the intrinsics of a kind of arch, and have later imports of TVM's package find no others."""
    if _PACKAGE not in sys.modules:
        spec = importlib.util.find_spec(_PACKAGE)
        assert spec is not None, "TVM is there"
        package = types.ModuleType(_PACKAGE)
        package.__path__ = list(spec.submodule_search_locations or ())
        sys.modules[_PACKAGE] = package
        sys.modules["tvm.s_tir"].tensor_intrin = package  # type: ignore[attr-defined]  # as an import leaves it
    with _short_stacks():
        for name in _MODULES[kind]:
            importlib.import_module(f"{_PACKAGE}.{name}")


@contextlib.contextmanager
def _short_stacks() -> Iterator[None]:
    """Have `inspect.stack` name frames without looking for their source."""

    def stack(context: int = 1) -> list[inspect.FrameInfo]:
        del context
        found: list[inspect.FrameInfo] = []
        frame: types.FrameType | None = sys._getframe(1)  # noqa: SLF001  what inspect.stack itself reads
        while frame:
            code = frame.f_code
            found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
            frame = frame.f_back
        return found

    before, inspect.stack = inspect.stack, stack
    try:
        yield
    finally:
        inspect.stack = before
