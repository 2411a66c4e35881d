"""Owns the C++ sources that are linked with kernels whose objects call them: calls of vendors' libraries, the workspace allocator.

Knows nothing of object files' formats, of kernels or of TVM.

A source's functions are hidden in the library that it is linked into: libraries of several releases of kerneldecl live in one process. A
change of what a function does, or takes, needs another name: objects, and what was measured of them, name the function.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

_FOLDER = Path(__file__).parent
WORKSPACE_ALLOCATOR = _FOLDER / "workspace_pages.cpp"
OPENBLAS_READY = "kerneldecl_openblas_ready_1"
OPENBLAS_GEMM = "kerneldecl_openblas_gemm_1"
CUBLASLT_MATMUL = "kerneldecl_cublaslt_matmul_1"
CUDNN_CONV2D = "kerneldecl_cudnn_conv2d_1"
CUDNN_ATTENTION = "kerneldecl_cudnn_attention_1"
CALLS: Mapping[str, tuple[Path, ...]] = MappingProxyType(
    {
        "__TVMBackendAllocWorkspace": (WORKSPACE_ALLOCATOR,),
        OPENBLAS_GEMM: (_FOLDER / "vendor" / "openblas.cpp",),
        CUBLASLT_MATMUL: (_FOLDER / "vendor" / "cublaslt.cpp", WORKSPACE_ALLOCATOR),
        CUDNN_CONV2D: (_FOLDER / "vendor" / "cudnn.cpp", WORKSPACE_ALLOCATOR),
        CUDNN_ATTENTION: (_FOLDER / "vendor" / "cudnn_attention.cpp", WORKSPACE_ALLOCATOR),
    }
)
"""The sources that each function needs. TVM's allocator is not replaced where no device's memory is allocated."""
VENDOR_CALLS = frozenset({OPENBLAS_READY, OPENBLAS_GEMM, CUBLASLT_MATMUL, CUDNN_CONV2D, CUDNN_ATTENTION})
"""The functions that call a vendor's library."""


def companions(objects: Sequence[Path], kind: str) -> list[str]:
    """Return the compiler's arguments that add what objects for archs of a kind call; nothing where they call nothing."""
    sources = _sources(objects, CALLS if kind == "cuda" else CALLS.keys() & VENDOR_CALLS)
    return ["-std=c++17", "-O2", "-fPIC", *sources, "-ldl"] if sources else []


def vendor_sources(objects: Sequence[Path]) -> list[str]:
    """Return the sources of the calls of vendors' libraries that objects make, for whoever compiles them."""
    return _sources(objects, CALLS.keys() & VENDOR_CALLS)


def _sources(objects: Sequence[Path], names: Collection[str]) -> list[str]:
    contents = [each.read_bytes() for each in objects]
    needed = [CALLS[name] for name in CALLS if name in names and any(b"\0%b\0" % name.encode() in content for content in contents)]
    return list(dict.fromkeys(str(source) for several in needed for source in several))
