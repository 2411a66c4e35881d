"""Owns processes that load libraries with device code as a machine with TVM's runtime alone does, with or without a driver.

Knows nothing of what is loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

# Loads a library as a machine with TVM's runtime alone does. Without a driver, one that fails every call takes its place.
LOAD = """
import ctypes, importlib.util, json, subprocess, sys
from pathlib import Path
library, folder, symbols = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
tvm = Path(importlib.util.find_spec("tvm").origin).parent / "lib"

def load(*places):
    for place in places:
        try:
            return ctypes.CDLL(str(place), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            reason = error
    sys.exit(f"skip: {reason}")

def stub():
    calls = "DeviceGetName FuncSetAttribute GetErrorName GetErrorString LaunchKernelEx ModuleGetFunction ModuleLoadData ModuleUnload"
    code = "".join(f"int cu{call}(void) {{ return 100; }}" for call in f"{calls} TensorMapEncodeTiled".split())
    (folder / "stub.c").write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "stub.c"], cwd=folder, check=True)
    return folder / "libcuda.so.1"

try:
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
except OSError:
    load(stub())
nvidia = importlib.util.find_spec("nvidia")
packages = list(nvidia.submodule_search_locations) if nvidia else []
load("libcudart.so.13", "/usr/local/cuda/lib64/libcudart.so.13", *(Path(each) / "cu13/lib/libcudart.so.13" for each in packages))
"""


def answer(script: str, *args: object, seed: str = "0") -> dict[str, Any]:
    """Return what a fresh process prints as JSON."""
    command = [sys.executable, "-c", script, *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONHASHSEED": seed})
    if result.stderr.startswith("skip: "):
        pytest.skip(f"CUDA's runtime library is not here: {result.stderr.removeprefix('skip: ').strip()}")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found
