"""Owns using an artifact: checking it, loading it, calling its kernels.

Knows nothing of how it was made, and needs neither a compiler nor the workspace that it came from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kerneldecl.artifact.manifest import MANIFEST, artifact_defect, read_manifest
from kerneldecl.errors import ArtifactError


class Artifact(Mapping[str, Callable[..., object]]):
    """The kernels of a loaded artifact by entry name, each called as `artifact[name](*inputs, *outputs)`."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        from kerneldecl.artifact.kernels import load_library

        self.folder = folder
        self.manifest = manifest
        self._symbols = {entry["name"]: entry["symbol"] for entry in manifest["entries"]}
        self.library = load_library(folder / manifest["library"], manifest["arch"]["kind"])

    def __getitem__(self, name: str) -> Callable[..., object]:
        """Return a kernel; it takes NumPy or torch arrays (anything with DLPack), inputs first, and writes the outputs."""
        from kerneldecl.artifact.kernels import kernel_of

        if name in self.manifest["missing"]:
            raise KeyError(f"{name!r} is not in {self.folder}, which was linked without it: {self.manifest['missing'][name]}")
        if name not in self._symbols:
            raise KeyError(f"{name!r} is not in {self.folder}; it holds {', '.join(self._symbols)}")
        return kernel_of(self.library, self._symbols[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._symbols)

    def __len__(self) -> int:
        return len(self._symbols)

    def __repr__(self) -> str:
        return f"<Artifact {self.manifest['name']} {self.manifest['version']} for {self.manifest['target']}: {len(self)} kernels>"


def load(path: str | Path, threads: int | None = None) -> Artifact:
    """Load the artifact in a folder, or in the one target's folder below it; set the threads of this process's kernels.

    Without `threads` they are the cores that the kernels were tuned for, as far as this process may use so many.
    Every file is compared with the manifest before any code is loaded; raise ArtifactError where one differs.
    """
    folder, manifest = checked_artifact(path)
    from kerneldecl.artifact.kernels import set_threads

    allowed = len(os.sched_getaffinity(0))
    cores = manifest["arch"]["cpu"]["cores"] if manifest["arch"]["kind"] == "cpu" else allowed
    set_threads(threads or min(cores, allowed))
    return Artifact(folder, manifest)


def checked_artifact(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the manifest of the artifact in a folder, or in the one target's folder below it.

    Raise ArtifactError where there is none, or where a file differs from what the manifest says.
    """
    folder = _artifact_folder(Path(path))
    if defect := artifact_defect(folder):
        raise ArtifactError(f"{folder}: {defect}; build it again")
    manifest = read_manifest(folder)
    assert not isinstance(manifest, str), "artifact_defect has read it"
    return folder, manifest


def _artifact_folder(path: Path) -> Path:
    if (path / MANIFEST).is_file():
        return path
    below = sorted(found.parent for found in path.glob(f"[!.]*/{MANIFEST}"))
    if len(below) == 1:
        return below[0]
    choices = f"; choose one of {', '.join(str(folder) for folder in below)}" if below else ""
    raise ArtifactError(f"{path} holds {len(below) or 'no'} artifact{'s' if len(below) > 1 else ''}{choices}")
