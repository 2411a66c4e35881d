"""Owns this CPU's measured peaks, the roofline that a kernel's figures are compared with: its clock and its memory bandwidth.

Knows nothing of kernels or workloads. Policies never see these peaks: their input must not change from run to run.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kerneldecl.hardware.host import detect
from kerneldecl.model import Cpu
from kerneldecl.toolchain.cxx import compiler

# Each line depends on the one before: a shift and an exclusive or, a cycle each on every x86-64 and Arm core of this
# century. The generator (Marsaglia, "Xorshift RNGs", 2003) keeps the compiler from shortening it.
_CHAIN = r"""
extern "C" unsigned long chain(unsigned long x, long steps) {
  for (long i = 0; i < steps; ++i) { x ^= x << 13; x ^= x >> 7; x ^= x << 17; }
  return x;
}
"""
_CYCLES = 6
_STEPS = 200_000
LEAST_COPIED_BYTES, MOST_COPIED_BYTES = 32 << 20, 128 << 20


def measured_peaks() -> dict[str, Any]:
    """Return `clock_hz` of one core and `dram_bytes_per_s` of all cores, reads and writes counted; measured once a process."""
    return {"clock_hz": _clock_hz(), "dram_bytes_per_s": _dram_bytes_per_s()}


@functools.cache
def _clock_hz() -> float:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "chain.cpp", Path(folder) / "chain.so"
        source.write_text(_CHAIN, encoding="ascii")
        subprocess.run([compiler(), "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        chain = ctypes.CDLL(str(library)).chain
    chain.argtypes, chain.restype = [ctypes.c_ulong, ctypes.c_long], ctypes.c_ulong
    return max(_CYCLES * _STEPS / _secs(lambda: chain(88172645463325252, _STEPS)) for _ in range(30))


def copied_bytes(cpu: Cpu) -> int:
    """Return how much is copied to measure bandwidth: with its copy, four times the last-level cache, of which little can be left in it.

    Not more: most of the time goes to the first touch of these pages, before anything is measured.
    """
    return min(max(2 * cpu.l3_bytes, LEAST_COPIED_BYTES), MOST_COPIED_BYTES)


@functools.cache
def _dram_bytes_per_s() -> float:
    threads = int(os.environ.get("TVM_NUM_THREADS", "1"))
    count = copied_bytes(detect().the_cpu) // threads // 8
    pairs = [(np.zeros(count), np.ones(count)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        copies = [_secs(lambda: list(pool.map(lambda pair: np.copyto(*pair), pairs))) for _ in range(5)]
    return 2 * threads * count * 8 / min(copies)


def _secs(call: Any) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
