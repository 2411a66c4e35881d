"""Owns where a package is: a registry, a tar or a wheel, or a folder; and bringing it into a folder, checked.

Knows nothing of what is done with it there. Nothing is left where it is not sound.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kerneldecl.errors import ArtifactError
from kerneldecl.package.folder import Package, read_package
from kerneldecl.package.registry import Reference, pull
from kerneldecl.package.tar import unpack_tar
from kerneldecl.package.wheel_file import WHEEL, unpack_wheel
from kerneldecl.store.inside import UnsafeFileError, opened_regular
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.store.signing import Verify

_CHUNK_BYTES = 1 << 20


def is_packed(path: Path) -> bool:
    """Say whether a path names a package as one file."""
    return path.suffix in {".tar", WHEEL} and not path.is_dir()


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


def bring(reference: Reference, folder: Path, verify: Verify | None) -> Reference:
    """Put the package at a reference into a new folder; return the reference with the digest of what came.

    Raise ArtifactError, with nothing left, where the folder is there, or what came is not sound or signed by nobody who is trusted.
    """
    with scratch_folder() as scratch:
        tar = scratch / "package.tar"
        found = pull(reference, tar)
        _place(tar, folder, verify, str(found))
    return found


def bring_file(path: Path, folder: Path, verify: Verify | None, expected: str) -> str:
    """Put the package that a file is into a new folder and return the file's digest, which is as expected where anything is.

    Raise as `bring`.
    """
    try:
        with opened_regular(path) as file:
            state = hashlib.sha256()
            while chunk := file.read(_CHUNK_BYTES):
                state.update(chunk)
            found = state.hexdigest()
    except (OSError, UnsafeFileError) as error:
        raise ArtifactError(f"{path} cannot be read: {getattr(error, 'strerror', '') or error}") from None
    if expected and found != expected:
        raise ArtifactError(f"{path} has the digest sha256:{found}; expected sha256:{expected}")
    _place(path, folder, verify, str(path))
    return found


def _place(packed: Path, folder: Path, verify: Verify | None, named: str) -> None:
    if folder.exists() or folder.is_symlink():
        raise ArtifactError(f"{folder} is there already; name another with -o, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
        fresh = Path(beside) / "package"
        unpack(packed, fresh)
        try:
            read_package(fresh, verify)
        except ArtifactError as error:
            raise ArtifactError(str(error).replace(str(fresh), named)) from None
        fresh.rename(folder)
