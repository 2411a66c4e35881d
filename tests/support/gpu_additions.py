"""Owns additions on a GPU with a line of CUDA at their end, good and bad ones, and the worker that measures them.

Knows nothing of what is tested.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from kerneldecl.compiler import canonical, cuda
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.runners.local import LocalRunner
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_elementwise
from kerneldecl.toolchain.cuda_objects import link_cuda_library
from support.repository import REPOSITORY

ROOT = REPOSITORY
H200 = load_arch(ROOT, "h200")
SIZE = 1000
SYMBOL = "kd_add"
_PARAMS = {"threads": 128, "width": 1, "unroll": 1}
_LIMIT_SECS = 60.0


def spec(size: int = SIZE) -> dict[str, Any]:
    return {"root": str(ROOT), "rule": "elementwise", "attrs": {"op": "add", "shape": [size], "dtype": "float32"}, "seed": 20}


def addition(folder: Path, line: str = "", size: int = SIZE) -> dict[str, str]:
    """Build an addition of `size` float32 elements with a line of CUDA at its end; return its library and symbol."""
    compile_source = cuda._cubin

    def with_line(source: str, *rest: Any) -> Any:
        return compile_source(source.rstrip().removesuffix("}") + line + "\n}\n", *rest)

    mod = canonical.lower(load_rule(ROOT, "elementwise").of(ROOT, {"op": "add", "dtype": "float32", "shape": [size]}))
    schedule = gpu_elementwise.apply(mod, _PARAMS, H200)
    assert schedule is not None
    with mock.patch.object(cuda, "_cubin", with_line):
        compiled = cuda.compile_cuda_object(schedule.mod, H200, SYMBOL, LocalStore(folder / "cache"))
    path = folder / f"{compiled.code}.o"
    path.write_bytes(compiled.content)
    link_cuda_library(path.with_suffix(".so"), [path])
    return {"library": str(path.with_suffix(".so")), "symbol": SYMBOL}


@contextmanager
def measuring() -> Iterator[Callable[..., dict[str, Any]]]:
    """Yield a function that sends requests to the worker that measures on the first GPU of the arch."""
    with LocalRunner(1, len(os.sched_getaffinity(0))) as runner:

        def ask(action: str, limit_secs: float = _LIMIT_SECS, **fields: Any) -> dict[str, Any]:
            return runner.measure({"action": action, "device": "cuda", "model": H200.model, **fields}, limit_secs)

        yield ask
