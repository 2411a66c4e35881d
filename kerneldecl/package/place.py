"""Owns where a package is: a registry, a tar or a wheel, or a folder; and bringing it into a folder, checked.

Knows nothing of what is done with it there. Nothing is left where it is not sound.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kerneldecl.errors import ArtifactError
from kerneldecl.package.folder import Package, is_package, read_package
from kerneldecl.package.registry import SCHEME, pull, reference_of
from kerneldecl.package.tar import unpack_tar
from kerneldecl.package.wheel_file import WHEEL, unpack_wheel
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.store.signing import Verify


def is_packed(path: Path) -> bool:
    """Say whether a path names a package as one file."""
    return path.suffix in {".tar", WHEEL} and path.is_file()


@contextlib.contextmanager
def opened_package(path: Path, verify: Verify | None) -> Iterator[Package]:
    """Provide the package that a folder or a file is, checked; raise ArtifactError where it is not sound."""
    if not is_packed(path):
        yield read_package(path, verify)
        return
    with scratch_folder() as scratch:
        unpack(path, scratch / "package")
        try:
            package = read_package(scratch / "package", verify)
        except ArtifactError as error:
            raise ArtifactError(str(error).replace(str(scratch / "package"), str(path))) from None
        yield package


def unpack(path: Path, folder: Path) -> None:
    """Write the files of a package into a new folder; raise ArtifactError where the file is not one that kerneldecl writes."""
    folder.mkdir()
    (unpack_wheel if path.suffix == WHEEL else unpack_tar)(path, folder)


def bring(url: str, folder: Path, verify: Verify | None) -> tuple[Package, str]:
    """Put the package at a reference into a new folder; return it with the reference that has the digest of what came.

    Raise ArtifactError, with nothing left, where the folder is there, or what came is not sound or signed by nobody who is trusted.
    """
    if folder.exists() or folder.is_symlink():
        raise ArtifactError(f"{folder} is there already; name another with -o, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder() as scratch, tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
        tar, fresh = scratch / "package.tar", Path(beside) / "package"
        found = str(pull(reference_of(url), tar))
        unpack(tar, fresh)
        try:
            read_package(fresh, verify)
        except ArtifactError as error:
            raise ArtifactError(str(error).replace(str(fresh), found)) from None
        fresh.rename(folder)
    return read_package(folder, verify), found


__all__ = ["SCHEME", "bring", "is_package", "is_packed", "opened_package", "unpack"]
