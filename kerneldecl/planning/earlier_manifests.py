"""Owns the manifests that a plan is compared with: those of the last build here, else those behind the committed lock.

Knows nothing of what their lines mean. In a fresh clone nothing was built yet: workloads.lock names the tune records, and these the
computations whose other records were committed with them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from kerneldecl.planning import lockfile
from kerneldecl.planning.action import Kind
from kerneldecl.planning.last_build import State
from kerneldecl.planning.workspace import LOCK, Workspace
from kerneldecl.store.keys import changed_lines, lines_of
from kerneldecl.store.local import Record
from kerneldecl.store.regular import read_file


class EarlierManifests:
    """Finds manifests of earlier builds; records are read when first asked for."""

    def __init__(self, workspace: Workspace, last: State) -> None:
        self._workspace, self._last = workspace, last
        self._detected = {target: arch.is_detected for target, arch in workspace.inputs.archs.items()}

    def manifest(self, entry: str, kind: Kind, new: str) -> str:
        """Return the manifest of an entry's (or target's) action before that of now, `new`; empty where there is none."""
        if entry in self._last.keys:
            is_local = kind == "link" or self._is_local(entry)
            return self._read(kind, self._last.keys[entry].get(kind, ""), is_local=is_local)
        return self._recorded(entry, kind, new) if kind != "link" and not self._is_local(entry) else ""

    def _is_local(self, entry: str) -> bool:
        return self._detected.get(entry.rpartition("@")[2], True)

    def _read(self, kind: Kind, record_key: str, *, is_local: bool) -> str:
        found = self._workspace.store.read(kind, record_key, is_local=is_local) if record_key else None
        return found.manifest if isinstance(found, Record) else ""

    def _recorded(self, entry: str, kind: Kind, new: str) -> str:
        """Return what the lock's record of an entry, or a record of its computation that differs least from `new`, has as its manifest."""
        tuned = self._read("tune", self._locked.get(entry, ""), is_local=False)
        if kind == "tune" or not tuned:
            return tuned
        found = (self._lowered if kind == "lower" else self._proposed).get(lines_of(tuned).get("computation", ""), [])
        return min(found, key=lambda text: len(changed_lines(text, new)), default="")

    @functools.cached_property
    def _locked(self) -> Mapping[str, str]:
        try:
            return lockfile.keys_by_entry(read_file(self._workspace.root / LOCK).decode(errors="replace"))
        except OSError:
            return {}

    @functools.cached_property
    def _lowered(self) -> Mapping[str, list[str]]:
        """Manifests of lower records by the computation that they hold, as manifests write it."""
        found: dict[str, list[str]] = {}
        for record in self._workspace.store.all("lower", is_local=False):
            found.setdefault(f'"{record.result["computation"]}"', []).append(record.manifest)
        return found

    @functools.cached_property
    def _proposed(self) -> Mapping[str, list[str]]:
        """Manifests of propose records by their computation."""
        found: dict[str, list[str]] = {}
        for record in self._workspace.store.all("propose", is_local=False):
            found.setdefault(lines_of(record.manifest).get("computation", ""), []).append(record.manifest)
        return found
