"""Owns the tests of an artifact's kernels called with torch's tensors on a GPU: streams, captures, outputs, mistakes.

Knows nothing of how kernels are built.
"""

from __future__ import annotations

import pytest
from support.spaces import Space
from support.traceless import FILES

import kerneldecl
from kerneldecl.artifact.load import Artifact

pytestmark = pytest.mark.gpu
DELAY_CYCLES = 200_000_000
"""A tenth of a second of an H200: what does not wait for it is done long before."""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    space = Space(tmp_path_factory.mktemp("called")).write(FILES)
    space.run("build")
    return kerneldecl.load(space.artifact("gpu"))


def test_a_call_follows_torchs_current_stream(artifact: Artifact) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    gemm = artifact["gemm"]
    a, b = (torch.ones(arg.shape, dtype=getattr(torch, arg.dtype), device="cuda") for arg in gemm.signature.inputs)
    expected = gemm(a, b)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(DELAY_CYCLES)
        a.mul_(2)  # behind the delay: a kernel on another stream reads ones
        doubled = gemm(a, b)
    side.synchronize()
    torch.testing.assert_close(doubled, 2 * expected)


def test_a_call_is_captured_in_torchs_graph(artifact: Artifact) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    gemm = artifact["gemm"]
    a, b = (torch.ones(arg.shape, dtype=getattr(torch, arg.dtype), device="cuda") for arg in gemm.signature.inputs)
    expected = gemm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemm(a, b)
    a.mul_(3)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, 3 * expected)


def test_operators_of_torch_run_inside_compiled_code(artifact: Artifact) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    ops, signature = artifact.torch_ops("kerneldecl_gpu_test"), artifact["gemm"].signature
    a, b = (torch.randn(arg.shape, device="cuda").to(getattr(torch, arg.dtype)) for arg in signature.inputs)
    compiled = torch.compile(lambda x, y: ops.gemm(x * 2, y) + 1, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), ops.gemm(a * 2, b) + 1)


def test_memory_of_the_host_and_odd_addresses_are_refused(artifact: Artifact) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    gemm = artifact["gemm"]
    a, b = (torch.ones(arg.shape, dtype=getattr(torch, arg.dtype), device="cuda") for arg in gemm.signature.inputs)
    with pytest.raises((TypeError, ValueError), match="A lies in memory of cpu, and the kernel runs on a CUDA GPU; expected gemm"):
        gemm(a.cpu(), b.cpu(), torch.empty(gemm.signature.outputs[0].shape))
    odd = torch.ones(a.numel() + 1, dtype=a.dtype, device="cuda")[1:].view(a.shape)
    with pytest.raises((TypeError, ValueError), match=r"A starts at an address that .* does not divide: pass a copy"):
        gemm(odd, b)
    gemm(a, b)
    torch.cuda.synchronize()  # the context has survived
