"""Owns the C++ sources that are linked with kernels whose objects call them: calls of vendors' libraries, the workspace allocator.

Knows nothing of object files' formats, of kernels or of TVM.

A source's functions are hidden in the library that it is linked into: libraries of several releases of kerneldecl live in one process.
Objects name the function that they call, and are linked with its source of now: a change of what it takes needs another name. What a call
of a vendor's library does is in the keys of all that is measured of it, by `counted_with`; the allocator is in those of links for GPUs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from kerneldecl.store.keys import digest

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
        OPENBLAS_READY: (_FOLDER / "vendor" / "openblas.cpp",),
        OPENBLAS_GEMM: (_FOLDER / "vendor" / "openblas.cpp",),
        CUBLASLT_MATMUL: (_FOLDER / "vendor" / "cublaslt.cpp", WORKSPACE_ALLOCATOR),
        CUDNN_CONV2D: (_FOLDER / "vendor" / "cudnn.cpp", WORKSPACE_ALLOCATOR),
        CUDNN_ATTENTION: (_FOLDER / "vendor" / "cudnn_attention.cpp", WORKSPACE_ALLOCATOR),
    }
)
"""The sources that each function needs. TVM's allocator is not replaced where no device's memory is allocated."""
VENDOR_CALLS = frozenset({OPENBLAS_READY, OPENBLAS_GEMM, CUBLASLT_MATMUL, CUDNN_CONV2D, CUDNN_ATTENTION})
"""The functions that call a vendor's library."""
COMPILED_WITH = ("-std=c++17", "-O2", "-fPIC")
LINKED_WITH = "-ldl"
"""The compiler's flags for the sources, and for a library that holds them."""
_INCLUDED = re.compile(r'^#include "(?P<name>[^"]+)"', re.MULTILINE)
_COMMENT = re.compile(r"""//[^\n]*|/\*.*?\*/|(?P<literal>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')""", re.DOTALL)
_UNCERTAIN = re.compile(r"""R"|\d'\d""")
"""Raw strings, and digits in groups: what looks like the end of a literal may be none."""


def companions(objects: Sequence[Path], kind: str) -> list[str]:
    """Return the compiler's arguments that add what objects for archs of a kind call; nothing where they call nothing."""
    sources = companion_sources(objects, kind)
    return [*COMPILED_WITH, *sources, LINKED_WITH] if sources else []


def companion_sources(objects: Sequence[Path], kind: str) -> list[str]:
    """Return the sources of what objects for archs of a kind call."""
    return _sources(objects, CALLS if kind == "cuda" else CALLS.keys() & VENDOR_CALLS)


def vendor_sources(objects: Sequence[Path]) -> list[str]:
    """Return the sources of the calls of vendors' libraries that objects make, for whoever compiles them."""
    return _sources(objects, CALLS.keys() & VENDOR_CALLS)


def files_behind(name: object) -> tuple[Path, ...]:
    """Return the sources of the call of a vendor's library by a function's name, and what they include; nothing for any other name."""
    found = list(CALLS[str(name)]) if name in VENDOR_CALLS else []
    for file in found:  # grows behind the file that includes
        found += [each for each in _included(file) if each not in found]
    return tuple(found)


def meant(source: bytes) -> bytes:
    """Return C++ without comments and blank lines; every byte of it where literals and comments cannot be told apart for certain."""
    text = source.decode("utf-8", errors="surrogateescape")
    if _UNCERTAIN.search(text):
        return source
    lines = _COMMENT.sub(lambda found: found["literal"] or " ", text).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip()).encode("utf-8", errors="surrogateescape")


def counted_with(found: str, content: bytes) -> str:
    """Return a digest that also stands for the calls of vendors' libraries that something names: an object, or a function's script.

    What names none keeps its digest.
    """
    names = [name for name in sorted(VENDOR_CALLS) if _names(content, name)]
    return digest(" ".join([found, *map(_source_digest, names)]).encode()) if names else found


def allocator_digest() -> str:
    """Return a digest of the workspace allocator, which libraries for GPUs hold beside kernels that have a workspace."""
    return digest(meant(WORKSPACE_ALLOCATOR.read_bytes()))


@functools.cache
def _source_digest(name: str) -> str:
    return digest("".join(f"{file.name} {digest(meant(file.read_bytes()))}\n" for file in files_behind(name)).encode())


def _included(file: Path) -> list[Path]:
    return [file.parent / found["name"] for found in _INCLUDED.finditer(file.read_text(encoding="utf-8"))]


def _sources(objects: Sequence[Path], names: Collection[str]) -> list[str]:
    contents = [each.read_bytes() for each in objects]
    needed = [CALLS[name] for name in CALLS if name in names and any(_names(content, name) for content in contents)]
    return list(dict.fromkeys(str(source) for several in needed for source in several))


def _names(content: bytes, name: str) -> bool:
    """Say whether an object names a function, in its table of names, or a script, as a text."""
    return b"\0%b\0" % name.encode() in content or b'"%b"' % name.encode() in content
