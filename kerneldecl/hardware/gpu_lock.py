"""Owns the choice of the GPU that an arch is measured on, and a lock: one process at a time measures on a GPU.

Knows nothing of what is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kerneldecl.errors import LockHeldError, ToolchainError
from kerneldecl.hardware.cuda_driver import DriverGpu, read_gpus
from kerneldecl.store.lock import exclusive, exclusive_of
from kerneldecl.store.scratch import runtime_folder


@functools.cache
def _here() -> tuple[DriverGpu, ...]:
    return read_gpus()


def gpus_of(model: str) -> tuple[DriverGpu, ...]:
    """Return this machine's GPUs of a model, all for an empty name; raise ToolchainError if there are none."""
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


def why_not_here(model: str) -> str:
    """Return why this machine cannot measure on a GPU of the model; empty if it can."""
    try:
        gpus_of(model)
    except ToolchainError as error:
        return str(error)
    return ""


@contextmanager
def held_gpu(model: str, say: Callable[[str], None]) -> Iterator[DriverGpu]:
    """Lock the first GPU of the model that is free; while all are locked, wait, and `say` for which process."""
    chosen = {lock_of(gpu): gpu for gpu in gpus_of(model)}
    with exclusive_of(tuple(chosen), f"measuring on {model or 'the GPU'}", say) as path:
        yield chosen[path]


@contextmanager
def free_gpus(model: str, most: int) -> Iterator[tuple[DriverGpu, ...]]:
    """Lock the first GPUs of the model that are free, `most` at most; do not wait for those that are not."""
    with ExitStack() as locks:
        held: list[DriverGpu] = []
        for gpu in gpus_of(model):
            with suppress(LockHeldError):
                if len(held) < most:
                    locks.enter_context(exclusive(lock_of(gpu), f"measuring on {model}", lambda _: None, wait=False))
                    held.append(gpu)
        yield tuple(held)


def lock_of(gpu: DriverGpu) -> Path:
    """Return the lock file of a GPU, the same for all of the user's workspaces.

    It lies where only this user can write: a lock that all share could be left behind, or prepared, by any of them.
    """
    return runtime_folder() / f"{gpu.uuid}.lock"
