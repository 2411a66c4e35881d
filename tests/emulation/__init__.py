"""Owns running TVM's CUDA kernels for compute capability 9.0 on the CPU, instruction by instruction.

Knows nothing of which kernels there are.

TVM turns a PrimFunc into CUDA whose asm statements are PTX. `ptx.py` and `instructions.py` put calls of C++ models in
their place, `machine.cpp` holds the models, and g++ compiles both. Tensor maps and launches are read out of the host function
that TVM lowers.

    *_, c = emulate(func, a, b, np.empty((m, n), "float16"))

What a GPU would leave to luck is an EmulationError here: a wait or a fence that is missing, a barrier arrived at too
often, memory that nobody wrote, memory outside of the arguments, a deadlock. `machine.cpp` says how.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from emulation import host, ptx
from emulation.instructions import UnknownInstructionError
from kerneldecl.store.keys import digest
from kerneldecl.toolchain import nvcc

HERE = Path(__file__).parent
COMPILED = HERE.parent.parent / "build" / "emulation"
"""Of the models, by what they were compiled of."""
# Indirect calls of the hooks before loads and stores, which machine.cpp defines; -O1 keeps g++ under two seconds, and with -Og
# stores of values that are classes, such as __half, have no hooks.
_FLAGS = ("-fno-threadsafe-statics", "-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-fno-tree-vectorize", "-fno-store-merging")
_HOOKS = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")


class EmulationError(AssertionError):
    """The kernel does what a GPU does not allow, or would forgive only by luck; the message names thread and place."""


def emulate(func: Any, *arguments: np.ndarray, seed: int = 1, timeout_secs: float = 120) -> list[np.ndarray]:
    """Run a PrimFunc on these arguments, in the order of its parameters, and return all of them as they are afterwards.

    The seed decides in which order threads take their turns. Raise EmulationError, or UnknownInstructionError if a model is missing.
    """
    return Kernel(func)(*arguments, seed=seed, timeout_secs=timeout_secs)


class Kernel:
    """A PrimFunc's kernels compiled for the CPU, to be called with several arguments."""

    def __init__(self, func: Any, change: Callable[[Any], Any] = lambda device: device) -> None:
        lowered = host.lower(func, change)
        self.source = lowered.source
        self.program = "\n".join(['#include "machine.h"', ptx.translate(lowered.source), host.main_of(lowered)])
        self._binary = _compiled(self.program)

    def __call__(self, *arguments: np.ndarray, seed: int = 1, timeout_secs: float = 120) -> list[np.ndarray]:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"argument {number}" for number in range(len(arguments))]
            for path, argument in zip(paths, arguments, strict=True):
                path.write_bytes(np.ascontiguousarray(argument).tobytes())
            try:
                done = subprocess.run(
                    [str(self._binary.path), str(seed)], cwd=folder, capture_output=True, text=True, timeout=timeout_secs, check=False
                )
            except subprocess.TimeoutExpired:
                raise EmulationError(f"no end after {timeout_secs} s") from None
            if done.returncode != 0:
                raise EmulationError(done.stderr.strip() or f"the emulator ends with {done.returncode}")
            return [
                np.frombuffer(bytearray(path.read_bytes()), dtype=argument.dtype).reshape(argument.shape)
                for path, argument in zip(paths, arguments, strict=True)
            ]


def _compile(arguments: Sequence[str]) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


@functools.cache
def _headers() -> Path:
    """Return the folder of CUDA's headers, which g++ can read: types of 16 and 8 bits have host code."""
    command = [nvcc.compiler().path, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    folders = [Path(folder) for folder in re.findall(r'-I"?([^"\s]+)', output)]
    return next(folder for folder in folders if (folder / "cuda_fp16.h").is_file())


class _Binary:
    """A program in a folder that lasts as long as this does."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder)
        self.path = Path(folder) / "kernel"


@functools.lru_cache(maxsize=4)
def _compiled(program: str) -> _Binary:
    """Return a program compiled. The last ones are kept: a test runs its kernel with several inputs and seeds."""
    binary, machine = _Binary(), _machine()
    source, made = binary.path.with_suffix(".cpp"), binary.path.with_suffix(".o")
    source.write_text(program, encoding="utf-8")
    _compile([*_FLAGS, *_HOOKS, f"-I{machine.parent}", f"-I{HERE}", f"-I{_headers()}", "-c", str(source), "-o", str(made)])
    _compile([str(made), str(machine), "-o", str(binary.path)])
    return binary


@functools.cache
def _machine() -> Path:
    """Return the compiled models, beside which is the compiled header that kernels include; processes and runs of tests share both."""
    version = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout
    sources = [(HERE / name).read_text(encoding="utf-8") for name in ("machine.h", "machine.cpp", "__init__.py")]
    folder = COMPILED / digest(repr([version, str(_headers()), nvcc.compiler().version, *sources]).encode())[:16]
    COMPILED.mkdir(parents=True, exist_ok=True)
    with FileLock(COMPILED / "lock"):
        if not folder.is_dir():
            for other in COMPILED.glob("*/"):
                shutil.rmtree(other)
            made = COMPILED / "being made"
            made.mkdir()
            _compile(["-std=c++20", "-O2", "-w", f"-I{_headers()}", "-c", str(HERE / "machine.cpp"), "-o", str(made / "machine.o")])
            _compile([*_FLAGS, *_HOOKS, f"-I{_headers()}", "-x", "c++-header", str(HERE / "machine.h"), "-o", str(made / "machine.h.gch")])
            made.rename(folder)
    return folder / "machine.o"


__all__ = ["EmulationError", "Kernel", "UnknownInstructionError", "emulate"]
