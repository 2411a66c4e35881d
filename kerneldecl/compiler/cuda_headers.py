"""Owns what CUDA's headers declare, between builds: it is read once for a compiler, an arch and flags, and kept for all workspaces.

Knows nothing of kernels. It is kept in the user's temporary folder: it holds for this machine alone, and takes a second to read again.
Nothing is waited for: while one process reads the headers, others compile with the headers themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kerneldecl.errors import LockHeldError, ToolchainError
from kerneldecl.store.files import write_whole
from kerneldecl.store.keys import key, manifest
from kerneldecl.store.lock import exclusive
from kerneldecl.store.scratch import temporary_folder
from kerneldecl.toolchain import nvcc
from kerneldecl.toolchain.declarations import Declaration, Headers, parsed

_PTXAS = "--ptxas-options"
"""Flags that no header sees."""
_CHOOSES_HOST = ("NVCC_CCBIN", *nvcc.FLAGS_BESIDES)

_known: dict[str, Headers] = {}
"""What this process has read, by key."""


def headers_for(arch: str, flags: Sequence[str]) -> Headers | None:
    """Return what the headers declare for an arch and nvcc's flags; None while another process reads them, or where nobody can."""
    seen = [flag for flag in flags if not flag.startswith(_PTXAS)]
    wanted = key(manifest("headers", {"headers": nvcc.HEADERS, "arch": arch, "flags": seen, **_compilers(arch)}))
    if wanted not in _known:
        with contextlib.suppress(LockHeldError, ToolchainError, ValueError, OSError):
            folder = temporary_folder()
            _known[wanted] = _kept(folder / f"headers-{wanted}.json") or _read(folder / f"headers-{wanted}.json", arch, seen)
    return _known.get(wanted)


def _compilers(arch: str) -> dict[str, str]:
    """Return whose the headers are: nvcc's, and those of the compiler whose preprocessor it uses."""
    compiler = nvcc.compiler_for(arch)
    given = {name: os.environ.get(name, "") for name in _CHOOSES_HOST}
    host = shutil.which(given["NVCC_CCBIN"] or "gcc") or ""
    status = Path(host).stat() if host else None
    described = f"{Path(host).resolve()} {status.st_size} {status.st_mtime_ns}" if status else ""
    return {"nvcc": compiler.version, "path": compiler.path, "host": described, **given}


def _kept(path: Path) -> Headers | None:
    """Return what a file holds; None where there is none, or another thing in it."""
    try:
        return _from_json(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError, LookupError):
        return None


def _read(path: Path, arch: str, flags: Sequence[str]) -> Headers:
    """Return what the headers declare, and keep it; raise LockHeldError where another process is about it, else as `compile_cubin` does."""
    with exclusive(path.with_suffix(".lock"), "reading CUDA's headers", lambda _: None, wait=False):
        headers = _kept(path) or parsed(nvcc.preprocessed_headers(arch, flags))
        write_whole(path, json.dumps(_json(headers)), durable=False)
    return headers


def _json(headers: Headers) -> dict[str, Any]:
    blocks = list(dict.fromkeys(each.blocks for each in headers.declarations))
    places = {each: place for place, each in enumerate(blocks)}
    rows = [[each.text, places[each.blocks], sorted(each.names), each.is_type, each.is_operator] for each in headers.declarations]
    return {"blocks": blocks, "declarations": rows, "macros": headers.macros}


def _from_json(held: Mapping[str, Any]) -> Headers:
    blocks = [tuple(each) for each in held["blocks"]]
    rows = ((text, blocks[place], frozenset(names), *kind) for text, place, names, *kind in held["declarations"])
    return Headers(tuple(Declaration(*row) for row in rows), held["macros"])
