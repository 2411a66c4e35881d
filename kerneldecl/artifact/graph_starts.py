"""Owns how kernels of an artifact start in a captured CUDA graph: early behind kernels of their own kind, plainly behind all others.

Knows nothing of artifacts, streams or of how a graph is captured or replayed.

Kernels are launched with programmatic dependent launch (compiler/passes/dependent_launch.py), which a capture turns into programmatic
edges. Behind a kernel that lets the next one start early they save 0.4 us a launch; behind one that does not they cost 0.3 us more
than a plain edge (minimal kernels of 132 blocks in a graph, H200, 2026-11). Launched into a stream, they cost nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from typing import Any

from kerneldecl.errors import ToolchainError
from kerneldecl.hardware.cuda_driver import open_driver

OWN_PREFIX = b"kd_"
"""How names of kernels begin that let the next one start early (`store.keys.symbol`)."""
# CUgraphDependencyType and CUgraphNodeType in cuda.h.
_PROGRAMMATIC, _KERNEL = 1, 0


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (("from_port", c_ubyte), ("to_port", c_ubyte), ("type", c_ubyte), ("reserved", c_ubyte * 5))


class _KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS, version 2."""

    _fields_ = (
        ("function", c_void_p),
        ("extents", c_uint * 7),
        ("arguments", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


def plain_starts(graph: int) -> int:
    """Have kernels that would start early behind a kernel of others start plainly, and return how many did.

    `graph` is the address of a captured graph (CUgraph) that is not instantiated yet: that of torch is
    `torch.cuda.CUDAGraph(keep_graph=True).raw_cuda_graph()`. Graphs within it stay as they are. Raise ToolchainError where there is no
    driver, or it refuses.
    """
    driver = open_driver()
    changed = 0
    for before, after, data in _edges(driver, graph):
        if data.type == _PROGRAMMATIC and not _is_own(driver, before):
            _call(driver, "cuGraphRemoveDependencies_v2", c_void_p(graph), *map(byref, (before, after, data)), c_size_t(1))
            _call(driver, "cuGraphAddDependencies_v2", c_void_p(graph), byref(before), byref(after), None, c_size_t(1))
            changed += 1
    return changed


def _edges(driver: Any, graph: int) -> Iterator[tuple[c_void_p, c_void_p, _EdgeData]]:
    count = c_size_t()
    _call(driver, "cuGraphGetEdges_v2", c_void_p(graph), None, None, None, byref(count))
    before, after, data = (c_void_p * count.value)(), (c_void_p * count.value)(), (_EdgeData * count.value)()
    if count.value:
        _call(driver, "cuGraphGetEdges_v2", c_void_p(graph), before, after, data, byref(count))
    for at in range(count.value):
        yield c_void_p(before[at]), c_void_p(after[at]), data[at]


def _is_own(driver: Any, node: c_void_p) -> bool:
    """Say whether a node is a kernel that lets the next one start early."""
    kind, params, name = c_int(), _KernelParams(), c_char_p()
    _call(driver, "cuGraphNodeGetType", node, byref(kind))
    if kind.value != _KERNEL:
        return False
    _call(driver, "cuGraphKernelNodeGetParams_v2", node, byref(params))
    # Libraries that load their kernels for all contexts at once launch a CUkernel, which has no function.
    if params.function:
        _call(driver, "cuFuncGetName", byref(name), c_void_p(params.function))
    else:
        _call(driver, "cuKernelGetName", byref(name), c_void_p(params.kernel))
    return (name.value or b"").startswith(OWN_PREFIX)


def _call(driver: Any, function: str, *arguments: object) -> None:
    status = getattr(driver, function)(*arguments)
    if status != 0:
        raise ToolchainError(f"{function} of NVIDIA's driver fails with error {status}")
