"""Owns the tests of how kernels start in a captured graph, against a driver made of C and NVIDIA's own header.

Knows nothing of GPUs: the driver holds one graph, and answers as cuda.h says.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kerneldecl.artifact import graph_starts
from kerneldecl.artifact.graph_starts import plain_starts
from kerneldecl.errors import ToolchainError
from kerneldecl.toolchain import cxx

DRIVER = """
#include <cuda.h>
#include <string.h>
// Node n is a kernel, a memset where n is 9; kernels with an even number have a function, the others a CUkernel.
static const char* names[] = {"kd_gemm_kernel", "kd_softmax_kernel", "addition", "elementwise", "a_kd_kernel"};
static size_t edges = 6;
static size_t froms[8] = {0, 1, 2, 3, 9, 4}, tos[8] = {1, 2, 0, 1, 0, 0};
static CUgraphEdgeData data[8] = {{1, 0, 1}, {0, 0, 0}, {1, 0, 1}, {1, 0, 1}, {0, 0, 0}, {1, 0, 1}};
extern "C" {
CUresult cuGraphGetEdges(CUgraph, CUgraphNode* from, CUgraphNode* to, CUgraphEdgeData* out, size_t* count) {
  for (size_t i = 0; from && i < edges; ++i) {
    from[i] = (CUgraphNode)(froms[i] + 1), to[i] = (CUgraphNode)(tos[i] + 1);
    out[i] = data[i];
  }
  *count = edges;
  return CUDA_SUCCESS;
}
CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType* type) {
  *type = (size_t)node == 10 ? CU_GRAPH_NODE_TYPE_MEMSET : CU_GRAPH_NODE_TYPE_KERNEL;
  return CUDA_SUCCESS;
}
CUresult cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS* params) {
  memset(params, 0, sizeof *params);
  size_t number = (size_t)node;
  if (number % 2) params->func = (CUfunction)number; else params->kern = (CUkernel)number;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetName(const char** name, CUfunction function) { *name = names[(size_t)function - 1]; return CUDA_SUCCESS; }
CUresult cuKernelGetName(const char** name, CUkernel kernel) { *name = names[(size_t)kernel - 1]; return CUDA_SUCCESS; }
static size_t at(const CUgraphNode* from, const CUgraphNode* to) {
  for (size_t i = 0; i < edges; ++i) if (froms[i] + 1 == (size_t)*from && tos[i] + 1 == (size_t)*to) return i;
  return 7;
}
CUresult cuGraphRemoveDependencies(CUgraph, const CUgraphNode* from, const CUgraphNode* to, const CUgraphEdgeData* edge, size_t count) {
  size_t i = at(from, to);
  if (i == 7 || count != 1 || memcmp(edge, &data[i], sizeof *edge)) return CUDA_ERROR_INVALID_VALUE;
  data[i].type = 99;
  return CUDA_SUCCESS;
}
CUresult cuGraphAddDependencies(CUgraph, const CUgraphNode* from, const CUgraphNode* to, const CUgraphEdgeData* edge, size_t count) {
  size_t i = at(from, to);
  if (i == 7 || count != 1 || edge || data[i].type != 99) return CUDA_ERROR_INVALID_VALUE;
  memset(&data[i], 0, sizeof data[i]);
  return CUDA_SUCCESS;
}
int type_of(int i) { return data[i].type; }
}
"""


def has_header() -> bool:
    return importlib.util.find_spec("nvidia") is not None and include() is not None


def include() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    places = (Path(each) / "cu13/include" for each in (spec and spec.submodule_search_locations) or ())
    return next((place for place in places if (place / "cuda.h").is_file()), None)


pytestmark = pytest.mark.skipif(not has_header(), reason="cuda.h of nvidia-cuda-runtime is not here")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the stand-in for the driver, which holds a graph of its own."""
    (tmp_path / "driver.cpp").write_text(DRIVER, encoding="ascii")
    command = [cxx.compiler(), "-shared", "-fPIC", f"-I{include()}", "-o", str(tmp_path / "driver.so"), str(tmp_path / "driver.cpp")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(tmp_path / "driver.so"))
    monkeypatch.setattr(graph_starts, "open_driver", lambda: library)
    return library


def test_edges_behind_kernels_of_others_become_plain_and_all_others_stay(driver: Any) -> None:
    types: Callable[[], list[int]] = lambda: [driver.type_of(at) for at in range(6)]  # noqa: E731  read twice
    assert types() == [1, 0, 1, 1, 0, 1]
    assert plain_starts(4096) == 3
    assert types() == [1, 0, 0, 0, 0, 0], "the kernel of ours in front still lets the next one start early"
    assert plain_starts(4096) == 0


def test_a_refusal_of_the_driver_is_told(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuGraphGetEdges_v2", lambda *_: 400)
    with pytest.raises(ToolchainError, match="cuGraphGetEdges_v2 of NVIDIA's driver fails with error 400"):
        plain_starts(4096)
