"""Owns the small kernels that stand in front of a kernel under test: one as others launch theirs, one as we launch ours.

Knows nothing of what is timed behind them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from ctypes import c_ulonglong, c_void_p
from pathlib import Path

from kerneldecl.runners.cuda_checks.checks import Checks
from kerneldecl.runners.cuda_device import Device, device

COPIED_BYTES = 4096
EARLY_COPY = Path(__file__).with_name("early_copy.ptx")
_THREADS = 256


class Neighbours:
    """Copies of 4 KB on one device, with memory of their own."""

    def __init__(self, gpu: Device) -> None:
        self._gpu, self._memory, self._checks = gpu, gpu.allocate(2 * COPIED_BYTES), Checks(gpu)
        gpu.fill(self._memory, 0, 2 * COPIED_BYTES)
        self._early = gpu.functions(EARLY_COPY.read_bytes(), ["kd_early_copy"])["kd_early_copy"] if gpu.has_dependent_launch else None

    def foreign(self) -> None:
        """Launch a copy as any library would: nothing begins before it has ended."""
        self._checks.copy(self._memory, self._memory + COPIED_BYTES, COPIED_BYTES)

    def own(self, stream: c_void_p | None = None) -> None:
        """Launch a copy that lets the next kernel start early, on a stream or the device's own.

        It is the foreign one where the GPU has no dependent launches.
        """
        if self._early is None:
            self.foreign()
        else:
            arguments = [c_ulonglong(self._memory), c_ulonglong(self._memory + COPIED_BYTES)]
            self._gpu.launch_early(self._early, _THREADS, arguments, stream)


@functools.cache
def neighbours() -> Neighbours:
    """Return the neighbours on the first GPU that this process sees."""
    return Neighbours(device())


def foreign() -> None:
    neighbours().foreign()


def own() -> None:
    neighbours().own()


BEFORE: Mapping[str, Callable[[], None]] = {"isolated": foreign, "chained": own}
"""What launches the neighbour of each protocol that has one."""
