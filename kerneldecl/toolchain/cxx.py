"""Owns linking: object files into a shared library by the system's C++ compiler.

Knows nothing of what the objects hold.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kerneldecl.errors import ToolchainError
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.toolchain.companions import companions
from kerneldecl.toolchain.last_words import last_words

COMPILERS = ("g++", "c++", "clang++")


def compiler() -> str:
    """Return the path of the first C++ compiler on PATH; raise ToolchainError where there is none."""
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise ToolchainError(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)}); install one, e.g. `apt-get install g++`")


def link_shared_library(library: Path, objects: Sequence[Path]) -> None:
    """Link object files for CPUs, in the order given, with what they call; raise ToolchainError with what the linker says."""
    # Objects are named in a file: a thousand names are too long for a command line. No build id: the library's own name
    # already has a digest of the content.
    with scratch_folder() as folder:
        (folder / "objects.rsp").write_text("".join(f'"{each.resolve()}"\n' for each in objects), encoding="utf-8")
        command = [compiler(), "-shared", "-o", str(library.resolve()), "@objects.rsp", *companions(objects, "cpu"), "-Wl,--build-id=none"]
        run(command, folder, f"linking {library.name}")


def run(command: Sequence[str], folder: Path, what: str) -> None:
    """Run a compiler or linker in a folder, which holds its temporary files too; raise ToolchainError with what it says where it fails."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ToolchainError(f"{what} failed: {last_words(result)}")
