"""Exported headers run on the GPU as the artifact's kernels do: they write the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from bench_support.exported import loaded, shared_library
from support.exports import OF_EACH_KIND, entries, header, scheduled

from kerneldecl.artifact.kernels import Placed, kernel_of, load_library
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.model import dtype_bytes
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.runners.cuda_device import device
from kerneldecl.signature import Arg
from kerneldecl.store.local import LocalStore
from kerneldecl.toolchain.cuda_objects import link_cuda_library

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_a_header_writes_what_the_artifact_writes(name: str, tmp_path: Path) -> None:
    entry, gpu = entries()[name], device()
    run, workspace_bytes = loaded(shared_library(header(entry, tmp_path), "exported"))
    kernel, args = _kernel(entry, tmp_path), _args(entry)
    sizes = [int(np.prod(arg.shape)) * dtype_bytes(arg.dtype) for arg in args]
    addresses = [gpu.allocate(size) for size in (*sizes, max(1, workspace_bytes))]
    _fill(args, sizes, addresses)
    placed = [Placed(arg, at, Placed.CUDA, gpu.ordinal) for arg, at in zip(args, addresses, strict=False)]  # outlives its tensors
    tensors = [each.tensor() for each in placed]
    stream = gpu.stream.value or 0

    def by_artifact() -> None:
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", gpu.ordinal), stream):
            kernel(*tensors)

    def by_header() -> None:
        assert run(stream, addresses[:-1], addresses[-1]) == 0

    written = []
    for call in (by_artifact, by_header):
        gpu.upload(np.zeros(sizes[-1], np.uint8), addresses[len(args) - 1])
        call()
        gpu.wait()
        found = np.empty(sizes[-1], np.uint8)
        gpu.download(addresses[len(args) - 1], found)
        written.append(found)
    for address in addresses:
        gpu.release(address)
    assert written[0].any()
    assert (written[0] == written[1]).all()


def _args(entry: EntryPlan) -> list[Arg]:
    assert entry.lowered is not None
    signature = entry.lowered.signature
    return [Arg(each["name"], tuple(each["shape"]), each["dtype"]) for each in (*signature["inputs"], *signature["outputs"])]


def _fill(args: Sequence[Arg], sizes: Sequence[int], addresses: Sequence[int]) -> None:
    """Write random inputs: numbers of magnitude one, or any bytes of packed weights."""
    drawn = np.random.default_rng(1)
    for arg, size, address in list(zip(args, sizes, addresses, strict=False))[:-1]:
        if arg.dtype.startswith("float"):
            values = drawn.standard_normal(size // dtype_bytes(arg.dtype), np.float32).astype(arg.dtype)
        else:
            values = drawn.integers(0, 256, size, np.uint8)
        device().upload(values, address)


def _kernel(entry: EntryPlan, folder: Path) -> Any:
    assert entry.lowered is not None
    compiled = compile_cuda_object(scheduled(entry), entry.arch, "kd_artifact", LocalStore(folder / "cache"))
    path = folder / f"{compiled.code}.o"
    path.write_bytes(compiled.content)
    link_cuda_library(path.with_suffix(".so"), [path])
    return kernel_of(load_library(path.with_suffix(".so"), "cuda"), "kd_artifact")
