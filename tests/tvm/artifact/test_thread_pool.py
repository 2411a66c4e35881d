"""Owns the test that threads of TVM's pool run where their process may, wherever the system puts them.

Knows nothing of kernels: what runs in parallel does nothing.
"""

from __future__ import annotations

import subprocess
import sys

from support.spaces import clean_environment

RUN_IN_PARALLEL = """
import ctypes, os
from kerneldecl.artifact.kernels import _load_runtime
from kerneldecl.artifact.thread_pool import set_threads

allowed = {max(os.sched_getaffinity(0))}
os.sched_setaffinity(0, allowed)
set_threads(2)
library = ctypes.CDLL(str(_load_runtime() / "libtvm_runtime.so"))
before = set(os.listdir("/proc/self/task"))
task = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(lambda *_: 0)
assert library.TVMBackendParallelLaunch(task, None, 0) == 0
(worker,) = set(os.listdir("/proc/self/task")) - before
assert [os.sched_getaffinity(thread) for thread in (0, int(worker))] == [allowed, allowed]
"""


def test_neither_the_calling_thread_nor_those_of_the_pool_are_bound_to_cores() -> None:
    done = subprocess.run([sys.executable, "-c", RUN_IN_PARALLEL], env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
