"""Owns what tests of device code need: nvcc and nvdisasm, which `pip install -e '.[dev]'` brings along.

Knows nothing of what is compiled.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kerneldecl.compiler.cuda_headers import headers_for
from kerneldecl.errors import ToolchainError
from kerneldecl.toolchain import nvcc


def missing() -> str:
    """Return why there is no compiler for device code; empty where there is one."""
    try:
        nvcc.compiler()
    except ToolchainError as error:
        return str(error)
    return ""


needs_nvcc = pytest.mark.skipif(bool(missing()), reason=missing())


def compiled_cubin(source: str, arch: str, flags: Sequence[str] = nvcc.FLAGS) -> nvcc.Cubin:
    """Return what nvcc makes of a source as builds have it made: with the declarations that it needs in the place of CUDA's headers."""
    return nvcc.compile_cubin(source, arch, flags, headers_for(arch, flags))


def _disassembler() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    folders = [
        folder / "bin" for packages in (spec and spec.submodule_search_locations) or () for folder in Path(packages).glob("cu[0-9]*")
    ]
    return shutil.which("nvdisasm", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, folders)]))


needs_nvdisasm = pytest.mark.skipif(_disassembler() is None, reason="no nvdisasm: pip install nvidia-cuda-nvdisasm")


def sass(cubin: bytes, folder: Path) -> str:
    """Return the instructions of a cubin; the folder is for a file in between."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    return subprocess.run([str(_disassembler()), str(path)], capture_output=True, text=True, check=True).stdout
