"""Owns exported CUDA headers as functions that Python calls: one shared library for each, by nvcc.

Knows nothing of how a header is made.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from kerneldecl.toolchain.nvcc import compiler

_FLAGS = re.compile(r"^// compile with: nvcc (.*)$", re.MULTILINE)
_SHIM = """\
#include "{header}"
extern "C" int run(cudaStream_t stream, void** arrays, void* workspace) {{
  return static_cast<int>({name}(stream, {arrays}, workspace));
}}
extern "C" std::size_t workspace_bytes() {{ return {name}_workspace_bytes; }}
"""


def compile_flags(header: Path) -> list[str]:
    """Return nvcc's flags that a header names."""
    found = _FLAGS.search(header.read_text(encoding="utf-8"))
    assert found is not None, "every header says how it is compiled"
    return found[1].split()


def shared_library(header: Path, name: str) -> Path:
    """Compile a header's function into a library beside it; raise CalledProcessError where nvcc does not take it."""
    text = header.read_text(encoding="utf-8")
    declared = re.search(rf"^static inline cudaError_t {name}\(cudaStream_t stream, (.*)\) \{{$", text, re.MULTILINE)
    assert declared is not None, "the header declares its function in one line"
    types = [each.rpartition(" ")[0] for each in declared[1].split(", ")[:-1]]
    arrays = ", ".join(f"static_cast<{each}>(arrays[{at}])" for at, each in enumerate(types))
    source, library = header.with_suffix(".cu"), header.with_suffix(".so")
    source.write_text(_SHIM.format(header=header.name, name=name, arrays=arrays), encoding="utf-8")
    shared = ["-shared", "-Xcompiler", "-fPIC", "-o", str(library), str(source)]
    subprocess.run([compiler().path, *compile_flags(header), *shared], check=True, capture_output=True, text=True)
    return library


def loaded(library: Path) -> tuple[Callable[..., int], int]:
    """Return a function of a stream, addresses of arrays and a workspace, which returns CUDA's error; and the workspace's bytes."""
    held = ctypes.CDLL(str(library))
    held.run.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p]
    held.workspace_bytes.restype = ctypes.c_size_t

    def run(stream: int, addresses: list[int], workspace: int) -> int:
        return int(held.run(stream, (ctypes.c_void_p * len(addresses))(*addresses), workspace))

    return run, int(held.workspace_bytes())
