"""Owns what must be the same on a worker as here for its results to stand under our keys: kerneldecl itself and the tools.

Knows nothing of how workers are reached.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from kerneldecl.errors import ToolchainError
from kerneldecl.plugins.find import PACKAGE
from kerneldecl.store.keys import digest
from kerneldecl.toolchain import nvcc
from kerneldecl.toolchain.versions import PACKAGES, installed, is_cuda

Likeness = Mapping[str, str]


@functools.cache
def likeness() -> dict[str, str]:
    """Return what of this machine's software decides results: a digest of kerneldecl's files, and versions of packages."""
    package = PACKAGE
    files = sorted(path for path in package.rglob("*") if path.is_file() and path.suffix in {".py", ".ptx", ".toml"})
    rules = package.parent / "rules"  # in a checkout they lie beside the package, in a wheel inside of it
    files += sorted(rules.glob("*.py")) if (package.parent / "pyproject.toml").is_file() else []
    content = b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in files)
    return {"kerneldecl": digest(content)[:16], **{package: installed(package) for package in PACKAGES.values()}}


def why_unlike(theirs: Likeness) -> str:
    """Return what differs here from the machine of the build, as a phrase; empty where nothing does."""
    ours = likeness()
    different = [f"{name} is {ours[name] or 'missing'}, not {wanted}" for name, wanted in theirs.items() if ours[name] != wanted]
    return ", ".join(different)


@functools.cache
def why_no_compiler(arch: str, declared: str) -> str:
    """Return why this machine does not compile device code for an arch as declared, as a sentence; empty where it does."""
    try:
        compiler = nvcc.compiler_for(arch)
    except ToolchainError as error:
        return str(error)
    return "" if is_cuda(compiler.version, declared) else f"{compiler.path} is of CUDA {compiler.version}, not {declared}"
