"""Owns using an artifact: checking it, loading it, calling its kernels.

Knows nothing of how it was made, and needs neither a compiler nor the workspace that it came from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerneldecl.artifact.manifest import MANIFEST, artifact_defect, read_manifest
from kerneldecl.artifact.thread_pool import set_threads
from kerneldecl.diagnostics.units import counted
from kerneldecl.errors import ArtifactError

if TYPE_CHECKING:
    from kerneldecl.artifact.call import Kernel
    from kerneldecl.artifact.dispatch import Dispatch


_MOST_NAMED = 12
"""Entries that a message names."""


class Artifact(Mapping[str, "Kernel"]):
    """The kernels of a loaded artifact by entry name, each called as `artifact[name](*inputs)` or `artifact[name](*inputs, *outputs)`."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        # Not at the first call, which would take three times as long.
        from kerneldecl.artifact.call import Kernel
        from kerneldecl.artifact.kernels import load_library

        self._kernel_of = Kernel
        self.folder = folder
        self.manifest = manifest
        self._entries = {entry["name"]: entry for entry in manifest["entries"]}
        self._any_rows = {family["name"]: family for family in manifest.get("rows", ())}
        self._kernels: dict[str, Kernel] = {}
        self.library = load_library(folder / manifest["library"], manifest["arch"]["kind"])

    def __getitem__(self, name: str) -> Kernel:
        """Return a kernel; raise KeyError, which names those that there are, where there is none of that name."""
        if name not in self._kernels:
            self._kernels[name] = self._kernel(name)
        return self._kernels[name]

    def dispatch(self, name: str, fallback: Callable[..., Any] | None = None) -> Dispatch:
        """Return one function for all entries that one declaration was expanded to: it chooses by its arguments' shapes and dtypes.

        Arguments that no entry takes are given to `fallback`, if there is one. Raise KeyError where no entry has that name.
        """
        from kerneldecl.artifact.dispatch import Dispatch

        of_any_rows = {entry for family in self._any_rows.values() for entry in family["entries"]}
        found = [each for each in self if each not in of_any_rows and (each == name or each.startswith(f"{name}["))]
        if not found and name in self._any_rows:
            raise KeyError(f"{name!r} is one kernel that takes any number of rows: call artifact[{name!r}]")
        if not found:
            raise KeyError(
                f"no entry of {self.folder} is called {name!r}; it holds {', '.join(sorted({each.partition('[')[0] for each in self}))}"
            )
        return Dispatch(name, [self[each] for each in found], fallback)

    def torch_ops(self, namespace: str) -> Any:
        """Register every kernel as an operator of torch, and return their namespace, `torch.ops.<namespace>`.

        An entry `proj[m=8]` becomes the operator `proj_m_8`; entries that one declaration was expanded to become `proj` as well, which
        chooses by shape. torch.compile and torch.export keep the operators. Needs torch.
        """
        from kerneldecl.artifact.torch_operators import register

        return register(self, namespace)

    def _kernel(self, name: str) -> Kernel:
        if name in self._any_rows:
            from kerneldecl.artifact.call import AnyRowsKernel

            family = self._any_rows[name]
            return AnyRowsKernel(family, self.library.get_function(family["symbol"]), self.manifest["arch"]["kind"])
        if name in self.manifest["missing"]:
            raise KeyError(f"{name!r} is not in {self.folder}, which was linked without it: {self.manifest['missing'][name]}")
        if name not in self._entries:
            raise KeyError(f"{name!r} is not in {self.folder}; {self._instead(name)}")
        entry = self._entries[name]
        return self._kernel_of(entry, self.library.get_function(entry["symbol"]), self.manifest["arch"]["kind"])

    def _instead(self, name: object) -> str:
        """Return what to ask for instead of an entry that is not there."""
        from kerneldecl.diagnostics.messages import nearest

        if sizes := [each for each in self._entries if each.startswith(f"{name}[")]:
            return f"dispatch({name!r}) chooses among its sizes, and one of them is {sizes[0]!r}"
        names = (*self._any_rows, *self._entries)
        near = nearest(str(name).partition("@")[0], names)
        few = names[:_MOST_NAMED]
        more = f" and {len(names) - len(few)} more" if len(names) > len(few) else ""
        return (f"did you mean {near!r}? " if near else "") + f"it holds {', '.join(few)}{more}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return (
            f"<Artifact {self.manifest['name']} {self.manifest['version']} for {self.manifest['target']}: {counted(len(self), 'kernel')}>"
        )


def load(path: str | Path, threads: int | None = None) -> Artifact:
    """Load the artifact in a folder, or in the one target's folder below it; set the threads of this process's kernels.

    Without `threads` they are the cores that the kernels were tuned for, as far as this process may use so many.
    Every file is compared with the manifest before any code is loaded; raise ArtifactError where one differs.
    """
    folder, manifest = checked_artifact(path)
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
    way_out = choices or "; `kerneldecl build` links them into dist/NAME-VERSION/TARGET, which is the folder to give"
    raise ArtifactError(f"{path} holds {len(below) or 'no'} artifact{'s' if len(below) > 1 else ''}{way_out}")
