"""Owns object files that carry device code: packing a serialised module into a host object, linking such objects.

Knows nothing of TVM's compiler, of nvcc, or of what the kernels compute.

TVM's loader looks for one symbol in a library, `__tvm_ffi__library_bin`. There it reads the modules that the host code
imports:

    u64 bytes that follow | import tree: u64[] where each module's imports begin, u64[] imports | kind, content of each

A kernel's object holds its own module (kind and content) in a section. The linker joins the sections, a few lines of
linker script put the head before them, and nothing is compiled or serialised twice. Each object is self-contained: it
can be cached, shipped and linked by the C++ compiler alone, without TVM.

Kernels with a workspace in global memory get it from the allocator in `workspace_pages.cpp`, which is linked with them
(`companions`): TVM's own pool may free memory that a captured CUDA graph still uses.

Rejected: TVM's export_library, which needs TVM with its CUDA runtime, thus a driver, where it links; objects that load
their cubins themselves by cuModuleLoadData, which would repeat what TVM's runtime does for launches, streams, several
devices and shared memory beyond 48 KiB.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from pathlib import Path

from kerneldecl.store.scratch import scratch_folder
from kerneldecl.toolchain.companions import COMPILED_WITH, LINKED_WITH, WORKSPACE_ALLOCATOR, companion_sources, companions
from kerneldecl.toolchain.cxx import compiler, run

SECTION = "kerneldecl_modules"
_KIND = b"cuda"
LIBRARY = b"_lib"
"""The module kind of the library itself, which has no content."""

# ELF64 (System V ABI, "Object Files"): fields of the file header and of section headers, and indices into them.
ELF_FILE = struct.Struct("<16sHHIQQQIHHHHHH")
_TABLE_OFFSET, _COUNT, _NAMES = 6, 12, 13
ELF_SECTION = struct.Struct("<IIQQQQIIQQ")
_OFFSET, _SIZE = 4, 5
_PROGBITS, _LOADED = 1, 2

_SCRIPT = """
SECTIONS {{
  .kerneldecl_modules : ALIGN(8) {{
    __tvm_ffi__library_bin = .;
    QUAD(kerneldecl_modules_end - kerneldecl_modules_begin)
    HIDDEN(kerneldecl_modules_begin = .);
    {head}
    KEEP(*({section}))
    HIDDEN(kerneldecl_modules_end = .);
  }}
}}
INSERT AFTER .rodata;
"""


def embed(host: bytes, module: bytes) -> bytes:
    """Return a host object with one more section: the serialised CUDA module whose kernels the host code launches.

    Written here and not by `ld -r`, so that a kernel's bytes do not depend on the machine's linker.
    """
    header = list(ELF_FILE.unpack_from(host))
    size = header[_COUNT] * ELF_SECTION.size
    entries = [list(entry) for entry in ELF_SECTION.iter_unpack(host[header[_TABLE_OFFSET] : header[_TABLE_OFFSET] + size])]
    names = entries[header[_NAMES]]
    longer = host[names[_OFFSET] : names[_OFFSET] + names[_SIZE]] + SECTION.encode() + b"\0"
    content = sized(_KIND) + sized(module)
    # An alignment of one byte: the linker joins sections without gaps.
    entries.append([names[_SIZE], _PROGBITS, _LOADED, 0, len(host) + len(longer), len(content), 0, 0, 1, 0])
    names[_OFFSET : _SIZE + 1] = [len(host), len(longer)]
    body = host[ELF_FILE.size :] + longer + content
    body += bytes(-(ELF_FILE.size + len(body)) % 8)
    header[_TABLE_OFFSET], header[_COUNT] = ELF_FILE.size + len(body), len(entries)
    return ELF_FILE.pack(*header) + body + b"".join(ELF_SECTION.pack(*entry) for entry in entries)


def link_cuda_library(library: Path, objects: Sequence[Path]) -> None:
    """Link objects for GPUs, in the order given, with what they call, into `library`; raise ToolchainError with the linker's last line."""
    _linked(library, objects, companions(objects, "cuda"))


def link_cuda_candidate(library: Path, objects: Sequence[Path]) -> None:
    """Link as `link_cuda_library` does, but a library that is measured only, in less time.

    What objects call is compiled once in a process. Where that is no vendor's library, they need TVM's runtime and the C library, which
    a process that loads kernels has: to look through C++'s library would be most of the linker's work.
    """
    sources = companion_sources(objects, "cuda")
    calls_vendor = any(source != str(WORKSPACE_ALLOCATOR) for source in sources)
    with scratch_folder() as path:
        compiled = [path / f"companion-{at}.o" for at in range(len(sources))]
        for file, source in zip(compiled, sources, strict=True):
            file.write_bytes(_companion(source))
        _linked(library, objects, [*map(str, compiled), *([LINKED_WITH] if calls_vendor else ["-nostdlib"])])


@functools.cache
def _companion(source: str) -> bytes:
    """Return the object file of a source that is linked with kernels; raise ToolchainError with the compiler's last line."""
    with scratch_folder() as path:
        run([compiler(), *COMPILED_WITH, "-c", source, "-o", "companion.o"], path, f"compiling {Path(source).name}")
        return (path / "companion.o").read_bytes()


def _linked(library: Path, objects: Sequence[Path], added: Sequence[str]) -> None:
    """Link objects into `library`, with what is added."""
    with scratch_folder() as path:
        # A kernel that calls a vendor's library alone has no device code of its own.
        count = sum(SECTION.encode() + b"\0" in each.read_bytes() for each in objects)
        script = _SCRIPT.format(head=" ".join(_head(count)), section=SECTION)
        (path / "modules.ld").write_text(script, encoding="ascii")
        (path / "objects.rsp").write_text("".join(f'"{each.resolve()}"\n' for each in objects), encoding="utf-8")
        flags = ["-Wl,--build-id=none", "-Wl,-T,modules.ld"]
        command = [compiler(), "-shared", "-o", str(library.resolve()), "@objects.rsp", *added, *flags]
        run(command, path, f"linking {library.name}")


def _head(count: int) -> list[str]:
    """Return the linker script's data for the import tree of a library with `count` modules, which import nothing, and its kind."""
    begins = [0] + [count] * (count + 1)
    imports = list(range(1, count + 1))
    tree = [len(begins), *begins, len(imports), *imports]
    return [*(f"QUAD({number})" for number in (*tree, len(LIBRARY))), *(f"BYTE({byte})" for byte in LIBRARY)]


def sized(content: bytes) -> bytes:
    """Return content behind its size, as TVM serialises strings and modules."""
    return struct.pack("<Q", len(content)) + content
