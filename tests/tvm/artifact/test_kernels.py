"""Owns the tests of loading kernels' runtimes and of arguments given by address.

Knows nothing of how kernels are built.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from kerneldecl.arrays import numpy_dtype
from kerneldecl.artifact.kernels import Placed, _cuda_runtimes, _load_first, load_library
from kerneldecl.errors import ToolchainError
from kerneldecl.signature import Arg


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4), (7, 1, 5)])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn"])
def test_a_placed_argument_is_the_memory_at_its_address(shape: tuple[int, ...], dtype: str) -> None:
    memory = np.zeros(shape, numpy_dtype(dtype))
    placed = Placed(Arg("X", shape, dtype), memory.ctypes.data, Placed.CPU)
    tensor = placed.tensor()
    assert (tuple(tensor.shape), str(tensor.dtype)) == (shape, dtype)
    assert tuple(tensor.strides) == tuple(stride // memory.itemsize for stride in memory.strides)
    if dtype in {"float32", "int64"}:
        memory[...] = np.arange(memory.size).reshape(shape)
        assert np.array_equal(np.from_dlpack(tensor), memory)
        np.from_dlpack(placed.tensor())[...] = 5
        assert (memory == 5).all()


def test_a_missing_library_is_reported_with_what_to_install() -> None:
    with pytest.raises(ToolchainError, match=r"^install it \(/nowhere/libx.so: .*No such file"):
        _load_first(["/nowhere/libx.so", "/nowhere/liby.so"], "install it")


def test_the_first_library_found_is_loaded() -> None:
    _load_first(["/nowhere/libx.so", "libc.so.6", "/nowhere/liby.so"], "install it")


def test_cudas_runtime_of_pypi_is_among_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13" in list(_cuda_runtimes())


def test_kernels_of_a_gpu_need_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    library.write_bytes(Path(sys.executable).read_bytes()[:64])  # a file for this machine
    monkeypatch.setattr("kerneldecl.artifact.kernels.LIBRARY", "libcuda-of-no-machine.so")
    with pytest.raises(ToolchainError, match="there is no NVIDIA driver: install it"):
        load_library(library, "cuda")
