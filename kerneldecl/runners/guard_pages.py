"""Owns memory for a CPU kernel's arguments between pages that must not be touched, and what is said of a kernel that does.

Knows nothing of kernels, references or values.

    guard | page ... page | guard

An argument ends where its last page ends, or starts where its first page starts; the rest of its pages holds one byte. A fault in a
guard, or a write to a page that is read-only, is noted, the page is opened, and the kernel goes on: the process survives, and the
verdict names the argument. A fault anywhere else ends the process as it always did.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import platform
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kerneldecl.arrays import Array, numpy_dtype
from kerneldecl.signature import Arg

PAGE_BYTES = mmap.PAGESIZE
GUARD_BYTES = 1 << 20
"""Guard before and behind each argument. It takes addresses, not memory."""
SLACK_BYTE = 0x5A
_NONE, _READ, _WRITE = 0, 1, 2
_NEAR_BYTES = 64
"""A fault within so many bytes of an argument is beside it; further away the distance is told."""
_SA_SIGINFO, _SA_NODEFER = 4, 0x40000000
_ADDRESS_OFFSET = 16
"""Offset of si_addr in siginfo_t (sigaction(2), Linux with 64 bits)."""
_X86_ERROR_OFFSET, _X86_WRITES = 192, 2
"""Offset of gregs[REG_ERR] in ucontext_t, and the bit of it that tells a write from a read (Intel SDM 3A, 4.7, W/R flag)."""


class GuardedArray:
    """One argument's memory."""

    def __init__(self, arg: Arg, *, is_input: bool) -> None:
        self.arg, self.is_input = arg, is_input
        self._size = numpy_dtype(arg.dtype).itemsize * int(np.prod(arg.shape, dtype=np.int64))
        self._page_bytes = max(1, -(-self._size // PAGE_BYTES)) * PAGE_BYTES
        self._map = mmap.mmap(-1, self._page_bytes + 2 * GUARD_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = np.frombuffer(self._map, np.uint8)
        self._base = self._memory.ctypes.data
        self._first = 0
        self._protect(0, GUARD_BYTES, _NONE)
        self._protect(GUARD_BYTES + self._page_bytes, GUARD_BYTES, _NONE)

    def placed(self, *, at_end: bool) -> Array:
        """Return the argument as an array that ends at the last page's end or starts at the first page's start, writable."""
        self._protect(GUARD_BYTES, self._page_bytes, _READ | _WRITE)
        self._first = GUARD_BYTES + (self._page_bytes - self._size if at_end else 0)
        self._memory[GUARD_BYTES : self._first] = SLACK_BYTE
        self._memory[self._first + self._size : GUARD_BYTES + self._page_bytes] = SLACK_BYTE
        return self._memory[self._first : self._first + self._size].view(numpy_dtype(self.arg.dtype)).reshape(self.arg.shape)

    def lock(self) -> None:
        """Make an input's pages read-only."""
        if self.is_input:
            self._protect(GUARD_BYTES, self._page_bytes, _READ)

    def damage(self) -> str:
        """Return what a kernel wrote on the argument's own pages beside the argument, as a phrase; empty if nothing."""
        pages, before = self._pages(), self._first - GUARD_BYTES
        if (pages[:before] != SLACK_BYTE).any():
            return f"it writes before {self.said}"
        if (pages[before + self._size :] != SLACK_BYTE).any():
            return f"it writes behind {self.said}"
        return ""

    @property
    def said(self) -> str:
        return f"its {'input' if self.is_input else 'output'} {self.arg.name}"

    def opened(self, address: int, *, writes: bool | None) -> str:
        """Open the page of an address so that the access succeeds; return what the access is, empty where it is none of these pages."""
        at = address - self._base
        if not 0 <= at < len(self._memory):
            return ""
        page = at // PAGE_BYTES * PAGE_BYTES
        self._protect(page, PAGE_BYTES, _READ | _WRITE)
        verb = {True: "writes", False: "reads", None: "reads or writes"}[writes]
        if at < GUARD_BYTES:
            return f"it {verb} before {self.said}{_far(self._first - at)}"
        if at >= GUARD_BYTES + self._page_bytes:
            return f"it {verb} behind {self.said}{_far(at - (self._first + self._size))}"
        return f"it writes into {self.said}"

    def shut(self) -> None:
        """Make guards that a kernel has opened untouchable again."""
        self._protect(0, GUARD_BYTES, _NONE)
        self._protect(GUARD_BYTES + self._page_bytes, GUARD_BYTES, _NONE)

    def _pages(self) -> Array:
        return self._memory[GUARD_BYTES : GUARD_BYTES + self._page_bytes]

    def _protect(self, start: int, size: int, access: int) -> None:
        if _libc().mprotect(ctypes.c_void_p(self._base + start), ctypes.c_size_t(size), access):
            raise OSError(ctypes.get_errno(), "mprotect")


def _far(distance: int) -> str:
    return f" (at a distance of {distance} bytes)" if distance > _NEAR_BYTES else ""


@dataclass
class Guarded:
    """The arguments of one kernel, each between its guards."""

    arrays: Sequence[GuardedArray]
    _faults: list[str] = field(default_factory=list)

    def watched(self, call: Callable[[], object]) -> str:
        """Call a kernel; return its first forbidden access as a phrase, empty where there was none."""
        self._faults.clear()
        for array in self.arrays:
            array.lock()
        with _noted_by(self):
            call()
        if self._faults:
            for array in self.arrays:
                array.shut()
            return self._faults[0]
        return next(filter(None, (array.damage() for array in self.arrays)), "")

    def note(self, address: int, *, writes: bool | None) -> bool:
        """Note an access that faulted, and let it pass; return False where it was at none of the arguments."""
        said = next(filter(None, (array.opened(address, writes=writes) for array in self.arrays)), "")
        if said:
            self._faults.append(said)
        return bool(said)


class _Action(ctypes.Structure):
    """struct sigaction of glibc."""

    _fields_ = (("handler", ctypes.c_void_p), ("mask", ctypes.c_ubyte * 128), ("flags", ctypes.c_int), ("restorer", ctypes.c_void_p))


@contextlib.contextmanager
def _noted_by(guarded: Guarded) -> Iterator[None]:
    """Have `guarded` note the faults of all threads inside of the context."""

    def noted(_signal: int, info: int, context: int) -> None:
        address = ctypes.c_uint64.from_address(info + _ADDRESS_OFFSET).value
        if not guarded.note(address, writes=_writes(context)):
            _libc().signal(int(signal.SIGSEGV), None)  # the access is repeated, and ends the process

    callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(noted)
    action = _Action(handler=ctypes.cast(callback, ctypes.c_void_p).value, flags=_SA_SIGINFO | _SA_NODEFER)
    before = _Action()
    _libc().sigaction(int(signal.SIGSEGV), ctypes.byref(action), ctypes.byref(before))
    try:
        yield
    finally:
        _libc().sigaction(int(signal.SIGSEGV), ctypes.byref(before), None)


def _writes(context: int) -> bool | None:
    """Say whether the access that faulted is a write; None where this kind of CPU is not known to tell."""
    if platform.machine() != "x86_64":
        return None
    return bool(ctypes.c_uint64.from_address(context + _X86_ERROR_OFFSET).value & _X86_WRITES)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
