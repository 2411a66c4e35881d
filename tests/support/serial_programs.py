"""Owns the running of GPU schedules on the CPU: as the serial programs that they are where nothing is bound to threads.

Knows nothing of templates or rules. What is left out is how the work is done - threads, tensor cores, where copies are kept
and how far ahead they are made -, so that what remains says which elements are read, computed and written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tvm
from tvm.s_tir import Schedule

from kerneldecl.arrays import aligned, poisoned
from kerneldecl.signature import Arg

MARGIN = 1 << 15
"""Elements of poison before and behind each argument."""
UNOPTIMISED = tvm.target.Target({"kind": "llvm", "opt-level": 0})
"""LLVM takes longer to optimise small programs than they run, and minutes for what is unrolled."""
LEFT_OUT = ("bind", "tensorize", "annotate", "storage_align", "vectorize", "unroll")


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """Have schedules leave out what only a GPU can do."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    read, write = Schedule.cache_read, Schedule.cache_write
    with contextlib.ExitStack() as stack:
        for name in LEFT_OUT:
            stack.enter_context(mock.patch.object(Schedule, name, nothing))
        stack.enter_context(mock.patch.object(Schedule, "cache_read", lambda sch, block, at, _: read(sch, block, at, "global")))
        stack.enter_context(mock.patch.object(Schedule, "cache_write", lambda sch, block, at, _: write(sch, block, at, "global")))
        yield


def run(mod: tvm.IRModule, inputs: list[Any], out: Arg) -> Any:
    """Return what a serial module computes. What it reads beside its inputs is NaN; it must write nothing beside its output."""
    lib = tvm.compile(mod, target=UNOPTIMISED)
    held = [_amid_poison(value) for value in (*inputs, poisoned(out))]
    memory, result = held[-1]
    before = memory.copy()
    lib["main"](*(part for _, part in held))
    size = (memory.size - math.prod(result.shape)) // 2
    for end, name in ((slice(size), "before"), (slice(-size, None), "behind")):
        assert before[end].tobytes() == memory[end].tobytes(), f"writes {name} its output"
    return result.numpy()


def _amid_poison(value: Any) -> tuple[Any, Any]:
    """Return memory full of poison, and a tensor that is the part of it which holds the value."""
    memory = aligned(poisoned(Arg("", (value.size + 2 * MARGIN,), str(value.dtype))))
    part = memory[MARGIN : MARGIN + value.size]
    part[...] = value.ravel()
    tensor = tvm.runtime.from_dlpack(part.view("uint8"))
    return memory, tensor._create_view(value.shape, str(value.dtype))
