"""Owns the tests of which failures may be the machine's, by their words.

Knows nothing of processes.
"""

from __future__ import annotations

import pytest

from kerneldecl.runners.failures import is_by_machine


@pytest.mark.parametrize(
    "failure",
    [
        "interrupted",
        "took more than 20 s",
        "its process was killed by SIGKILL",
        "its process was killed by SIGTERM",
        "its process was killed by SIGABRT: out of memory",
        "inputs or reference: took more than 120 s",
        "ToolchainError: linking 0a.so failed: its process was killed by SIGKILL",
        "ToolchainError: linking 0a.so failed: collect2: fatal error: ld terminated with signal 9 [Killed]",
        "ToolchainError: linking 0a.so failed: g++: fatal error: Killed signal terminated program collect2",
        "ValueError: nvcc: nvcc error   : 'ptxas' died due to signal 9 (Kill signal)",
        "MemoryError: ",
        "templates/mine.py:12: MemoryError: Unable to allocate 40.0 GiB for an array",
        "InternalError: std::bad_alloc",
        "CudaError: cuMemAlloc fails with CUDA_ERROR_OUT_OF_MEMORY",
        "OSError: [Errno 12] Cannot allocate memory",
        "OSError: [Errno 28] No space left on device: '/tmp/a.o'",
        "ToolchainError: linking 0a.so failed: /usr/bin/ld: final link failed: No space left on device",
        "ToolchainError: linking 0a.so failed: g++: fatal error: could not close temporary response file /tmp/cc0a",
        "ValueError: nvcc: <built-in>: fatal error: when writing output to /tmp/x.ii: No space left on device",
        "RuntimeError: can't start new thread",
        "OSError: [Errno 24] Too many open files: '/tmp/a.o'",
    ],
)
def test_what_the_machine_may_have_caused(failure: str) -> None:
    assert is_by_machine(failure)


@pytest.mark.parametrize(
    "failure",
    [
        "",
        "its process was killed by SIGSEGV",
        "its process was killed by SIGABRT",
        "its process ended with exit code 3",
        "ValueError: nvcc: nvcc error   : 'ptxas' died due to signal 11 (Invalid memory reference)",
        "ToolchainError: linking 0a.so failed: its process was killed by SIGSEGV",
        "ToolchainError: linking 0a.so failed: collect2: error: ld returned 1 exit status",
        "printed more than 268435456 bytes",
        "wrong: relative error 0.2 over 0.001",
        "the template does not apply",
        "templates/mine.py:12: ValueError: it took more than one axis",
    ],
)
def test_what_is_the_candidates(failure: str) -> None:
    assert not is_by_machine(failure)
