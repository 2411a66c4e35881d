"""CUDA graphs stay valid when kernels with larger workspaces run after a graph was captured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import tvm_ffi
from gpu_kernels import Case, Kernels, given

from kerneldecl.arrays import Array, relative_error
from kerneldecl.artifact.kernels import Placed, kernel_of, load_library
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_rule
from kerneldecl.runners.cuda_device import Device, device

pytestmark = pytest.mark.gpu

TILING = {"block_m": 64, "block_n": 64, "block_k": 32, "warps_m": 2, "warps_n": 2, "stages": 3, "raster_group": 1, "smem_epilogue": 0}


def with_split_k(m: int, parts: int) -> Case:
    """Return a GEMM with split-K, whose partial accumulators take a workspace of 4 * parts * m * 128 bytes."""
    attrs = {"m": m, "n": 128, "k": 1024, "layout": "nt", "dtype": "float16"}
    return Case(f"{m}-in-{parts}", "matmul", attrs, given("gpu_matmul_tc", {**TILING, "split_k": parts}))


class Gemm:
    """A case's kernel with arguments on the GPU."""

    def __init__(self, gpu: Device, case: Case, kernels: Kernels, held: ExitStack) -> None:
        [built] = kernels.of(case).kernels
        assert not built.failure
        self.gpu, self.rule = gpu, load_rule(STANDARD, case.rule).of(STANDARD, dict(case.attrs))
        self.kernel = kernel_of(load_library(built.library, "cuda"), built.symbol)
        self.inputs = self.rule.inputs(np.random.default_rng(0))
        signature = self.rule.signature()
        self.out = signature.outputs[0]
        sizes = [2 * int(np.prod(arg.shape)) for arg in signature.args]
        self.addresses = [gpu.allocate(size) for size in sizes]
        for address in self.addresses:
            held.callback(gpu.release, address)
        for array, address in zip(self.inputs, self.addresses, strict=False):
            gpu.upload(array, address)
        self.placed = [Placed(arg, at, Placed.CUDA, gpu.ordinal) for arg, at in zip(signature.args, self.addresses, strict=True)]
        self.tensors = [each.tensor() for each in self.placed]

    def __call__(self) -> None:
        self.kernel(*self.tensors)

    def error(self) -> float:
        got: Array = np.empty(self.out.shape, self.out.dtype)
        self.gpu.download(self.addresses[-1], got)
        self.gpu.fill(self.addresses[-1], 0xFF, got.nbytes)
        return relative_error(got, self.rule.reference(*self.inputs))


@contextmanager
def gemms(cases: Iterable[Case], kernels: Kernels) -> Iterator[list[Gemm]]:
    gpu = device()
    with ExitStack() as held, tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", gpu.ordinal), gpu.stream.value or 0):
        yield [Gemm(gpu, case, kernels, held) for case in cases]


@pytest.mark.parametrize("is_called_before", [True, False], ids=["called before", "captured at first"])
@pytest.mark.parametrize(
    ("small", "larger", "largest"), [(with_split_k(64, 2), with_split_k(512, 4), with_split_k(2048, 8))], ids=["split-K"]
)
def test_graphs_replay_after_kernels_with_more_memory(
    small: Case, larger: Case, largest: Case, is_called_before: bool, kernels: Kernels
) -> None:
    """Other memory is allocated and filled in between: a freed workspace would be overwritten, or unmapped."""
    with gemms((small, larger, largest), kernels) as several:
        gpu, graphs, taken = device(), [], []
        for gemm in several:
            if is_called_before:
                gemm()
                gpu.wait()
            graphs.append(gpu.timed_graph(gemm))
            taken.append(gpu.allocate(1 << 22))
            gpu.fill(taken[-1], 0xFF, 1 << 22)
        for _ in range(2):
            for graph, gemm in zip(graphs, several, strict=True):
                gpu.fill(gemm.addresses[-1], 0xFF, 2 * int(np.prod(gemm.out.shape)))
                graph.run()
                assert gemm.error() <= gemm.rule.tolerance()
        for graph in graphs:
            graph.close()
        for address in taken:
            gpu.release(address)
