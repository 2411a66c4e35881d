"""Owns which GPU of this machine a target is measured on, and that one process at a time measures there.

Knows nothing of what is measured.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kerneldecl.errors import ToolchainError
from kerneldecl.hardware.cuda_driver import DriverGpu, read_gpus
from kerneldecl.store.lock import exclusive_of


@functools.cache
def _here() -> tuple[DriverGpu, ...]:
    return read_gpus()


def gpus_of(model: str) -> tuple[DriverGpu, ...]:
    """Return the GPUs that the driver shows and calls so, all for an empty name; raise ToolchainError if there are none."""
    wanted = model or "a GPU"
    try:
        here = _here()
    except ToolchainError as error:
        raise ToolchainError(f"it must be measured on {wanted}; {error}") from None
    chosen = tuple(gpu for gpu in here if model in {"", gpu.model})
    if not chosen:
        others = ", ".join(dict.fromkeys(gpu.model for gpu in here))
        raise ToolchainError(f"it must be measured on {wanted}; this machine {f'has {others}' if others else 'shows no GPU'}")
    return chosen


def missing(model: str) -> str:
    """Return why nothing can be measured here for this model of GPU; empty where it can."""
    try:
        gpus_of(model)
    except ToolchainError as error:
        return str(error)
    return ""


@contextmanager
def held_gpu(model: str, say: Callable[[str], None]) -> Iterator[DriverGpu]:
    """Hold the first GPU of the model that no other process of kerneldecl holds; wait, and say for whom, while all are held."""
    chosen = {lock_of(gpu): gpu for gpu in gpus_of(model)}
    with exclusive_of(tuple(chosen), f"measuring on {model or 'the GPU'}", say) as path:
        yield chosen[path]


def lock_of(gpu: DriverGpu) -> Path:
    """Return the lock of a GPU: one on the machine, whoever and wherever the process is that measures."""
    return Path(tempfile.gettempdir()) / f"kerneldecl-{gpu.uuid}.lock"
