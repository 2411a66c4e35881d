"""Owns the file with each kernel's object and scheduled TensorIR by itself: `<symbol>.o` and `<symbol>.py` in a zip.

Knows nothing of libraries or manifests. One file for all: a null build asks for its time alone, where ten thousand files would take
it longer than all else. Nothing in it is compressed, so its parts can be no larger than it is.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable
from pathlib import Path

from kerneldecl.errors import ArtifactError

ARCHIVE = "kernels.zip"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The first date that a zip can hold: archives of the same kernels are byte-equal."""


def write_archive(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write an archive and have it on the disk."""
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members:
            info = zipfile.ZipInfo(name, _EPOCH)
            info.external_attr = 0o644 << 16
            archive.writestr(info, content)
        archive.close()
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())


def read_member(path: Path, name: str) -> bytes:
    """Return one member of an archive; raise ArtifactError where it is not there, or not as `write_archive` writes it."""
    try:
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo(name)
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > path.stat().st_size:
                raise ArtifactError(f"{path}: {name} is compressed; build the artifact again")
            return archive.read(info)
    except (KeyError, OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        raise ArtifactError(f"{path} has no {name} that can be read ({error}); build the artifact again") from None


def unpack_objects(path: Path, symbols: Iterable[str], folder: Path) -> list[Path]:
    """Write the objects of kernels into a folder, for a linker, and return their paths in order."""
    found = []
    for symbol in symbols:
        place = folder / f"{symbol}.o"
        place.write_bytes(read_member(path, place.name))
        found.append(place)
    return found
