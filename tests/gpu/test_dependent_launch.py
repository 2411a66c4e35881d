"""Kernels that begin while the one before them ends see what it wrote, and do not write what it still reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from support.repository import REPOSITORY

from kerneldecl.artifact.kernels import Placed, kernel_of, load_library
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.runners.cuda_device import device
from kerneldecl.signature import Arg
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_elementwise
from kerneldecl.toolchain.cuda_objects import link_cuda_library

pytestmark = pytest.mark.gpu

ROOT = REPOSITORY
H200 = load_arch(ROOT, "h200")
LAUNCHES = 500


@pytest.mark.parametrize("in_graph", [False, True], ids=["stream", "graph"])
@pytest.mark.parametrize("size", [64, 100_000, 4_000_000])
def test_each_launch_adds_one_to_what_the_one_before_it_left(size: int, in_graph: bool, tmp_path: Path) -> None:
    """The two buffers change places at each launch: one that came too early would lose a one, or add it twice."""
    kernel, gpu = _addition(size, tmp_path), device()
    addresses = [gpu.allocate(4 * size) for _ in range(3)]
    arguments = [Placed(Arg(name, (size,), "float32"), at, Placed.CUDA, gpu.ordinal) for name, at in zip("XYZ", addresses, strict=True)]
    first, second, ones = (argument.tensor() for argument in arguments)
    for address, value in zip(addresses, (0, 0, 1), strict=True):
        gpu.upload(np.full(size, value, np.float32), address)

    def launch() -> None:
        for at in range(LAUNCHES):
            kernel(*((first, ones, second) if at % 2 == 0 else (second, ones, first)))

    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", gpu.ordinal), gpu.stream.value or 0):
        if in_graph:
            gpu.timed_graph(launch).run()
        else:
            launch()
    found = np.empty(size, np.float32)
    gpu.download(addresses[0], found)
    for address in addresses:
        gpu.release(address)
    assert (found == LAUNCHES).all()


def _addition(size: int, folder: Path) -> Any:
    mod = canonical.lower(load_rule(ROOT, "elementwise").of(ROOT, {"op": "add", "dtype": "float32", "shape": [size]}))
    schedule = gpu_elementwise.apply(mod, {"threads": 128, "width": 4, "unroll": 1}, H200)
    assert schedule is not None
    compiled = compile_cuda_object(schedule.mod, H200, "kd_add", LocalStore(folder))
    path = folder / f"{compiled.code}.o"
    path.write_bytes(compiled.content)
    link_cuda_library(path.with_suffix(".so"), [path])
    return kernel_of(load_library(path.with_suffix(".so"), "cuda"), "kd_add")
