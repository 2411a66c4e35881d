"""Owns linking: object files into a shared library by the system's C++ compiler.

Knows nothing of what the objects hold.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kerneldecl.errors import ToolchainError
from kerneldecl.toolchain.last_words import last_words

COMPILERS = ("g++", "c++", "clang++")


def compiler() -> str:
    """Return the path of the first C++ compiler on PATH; raise ToolchainError where there is none."""
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise ToolchainError(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)}); install one, e.g. `apt-get install g++`")


def link_shared_library(library: Path, objects: Sequence[Path]) -> None:
    """Link object files, in the order given, into `library`; raise ToolchainError with what the linker says."""
    # Objects are named in a file: a thousand names are too long for a command line. No build id: the library's own name
    # already has a digest of the content.
    with tempfile.NamedTemporaryFile("w", suffix=".rsp", encoding="utf-8") as names:
        names.write("".join(f'"{path}"\n' for path in objects))
        names.flush()
        command = [compiler(), "-shared", "-o", str(library), f"@{names.name}", "-Wl,--build-id=none"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ToolchainError(f"linking {library.name} failed: {last_words(result)}")
