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
from kerneldecl.toolchain.machines import here, machine_of_object

COMPILERS = ("g++", "c++", "clang++")


def compiler(machine: str = "") -> str:
    """Return the path of the first C++ compiler on PATH for a machine, by default this one; raise ToolchainError where there is none.

    Those for other machines are named as Debian and Fedora name them: aarch64-linux-gnu-g++.
    """
    is_here = machine in {"", here()}
    names = COMPILERS if is_here else (f"{machine}-linux-gnu-g++",)
    for name in names:
        if path := shutil.which(name):
            return path
    package = "g++" if is_here else f"g++-{machine.replace('_', '-')}-linux-gnu"
    what = "no C++ compiler on PATH" if is_here else f"no cross compiler for {machine} on PATH"
    raise ToolchainError(f"{what} (looked for {', '.join(names)}); install one, e.g. `apt-get install {package}`")


def link_shared_library(library: Path, objects: Sequence[Path]) -> None:
    """Link object files for CPUs, in the order given, with what they call; raise ToolchainError with what the linker says.

    Objects for another machine are linked by its cross compiler.
    """
    # Objects are named in a file: a thousand names are too long for a command line. No build id: the library's own name
    # already has a digest of the content.
    linker = compiler(machine_of_object(objects[0].read_bytes()) if objects else "")
    with scratch_folder() as folder:
        (folder / "objects.rsp").write_text("".join(f'"{each.resolve()}"\n' for each in objects), encoding="utf-8")
        command = [linker, "-shared", "-o", str(library.resolve()), "@objects.rsp", *companions(objects, "cpu"), "-Wl,--build-id=none"]
        run(command, folder, f"linking {library.name}")


def run(command: Sequence[str], folder: Path, what: str) -> None:
    """Run a compiler or linker in a folder, which holds its temporary files too; raise ToolchainError with what it says where it fails."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ToolchainError(f"{what} failed: {last_words(result)}")
