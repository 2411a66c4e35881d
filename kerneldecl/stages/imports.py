"""Owns the packages that a workspace imports: which digest each has, bringing those that are not here, reading their records.

Knows nothing of what records mean. A package is brought once, into cache/import; it is checked, signature included, whenever it is used.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kerneldecl.declare.imports import Import
from kerneldecl.errors import ArtifactError
from kerneldecl.package.folder import RECORDS, read_package
from kerneldecl.package.place import bring, bring_file
from kerneldecl.package.registry import SCHEME, reference_of
from kerneldecl.planning.lockfile import pinned
from kerneldecl.planning.workspace import IMPORTED, Workspace
from kerneldecl.stages.session import Session
from kerneldecl.store.folder_cache import FolderCache
from kerneldecl.store.local import LocalStore
from kerneldecl.store.shared import Access, SharedStore
from kerneldecl.store.signing import Verify, verifier
from kerneldecl.tuning.events import Note


def imported(session: Session, lock: str, *, lacks_records: bool) -> Iterator[SharedStore]:
    """Yield the imported packages as stores to fetch from; bring those that are not here, as far as anything is lacking.

    Raise ArtifactError for one that is not what its digest or signature says, RegistryError where it cannot be had.
    """
    workspace = session.workspace
    if not workspace.declaration.imports:
        return
    trusted = workspace.declaration.trusted
    verify = verifier(trusted) if trusted else None
    found = [
        _brought(session, each, verify) if lacks_records or not each.digest else each
        for each in pinned(workspace.declaration.imports, lock)
    ]
    session.workspace = replace(workspace, declaration=replace(workspace.declaration, imports=tuple(found)))
    if lacks_records:
        for each in found:
            if each.name not in session.imports:
                session.imports[each.name] = _store(session, each, verify)
    yield from session.imports.values()


def _store(session: Session, package: Import, verify: Verify | None) -> SharedStore:
    folder = _folder(session.workspace, package)
    read_package(folder, verify)
    records = folder / RECORDS
    if not records.is_dir():
        raise ArtifactError(f"[import.{package.name}] has no records ({package.url}): it was pushed without its workspace")
    access = Access(functools.partial(FolderCache, records), f"{package.url} ([import.{package.name}])")
    return SharedStore(LocalStore(session.workspace.cache), access, lambda text: session.report(Note(text)))


def _brought(session: Session, package: Import, verify: Verify | None) -> Import:
    """Return an import with its digest once the package is in the cache."""
    workspace = session.workspace
    if package.digest and _folder(workspace, package).is_dir():
        return package
    session.report(Note(f"fetching [import.{package.name}] from {package.url}"))
    parent = workspace.cache / IMPORTED
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".") as beside:
        place = Path(beside) / "package"
        found = replace(package, digest=_digest_of(workspace, package, place, verify))
        try:
            place.rename(_folder(workspace, found))
        except OSError:
            if not _folder(workspace, found).is_dir():  # else another build has brought it meanwhile
                raise
    return found


def _digest_of(workspace: Workspace, package: Import, place: Path, verify: Verify | None) -> str:
    """Bring a package to a place and return its digest."""
    if package.url.startswith(SCHEME):
        asked = reference_of(package.url)
        if package.digest and asked.digest not in {"", package.digest}:
            raise ArtifactError(f"[import.{package.name}] names two digests: that of url and sha256:{package.digest}")
        return bring(replace(asked, digest=package.digest or asked.digest), place, verify).digest
    return bring_file(workspace.root / package.url, place, verify, package.digest)


def _folder(workspace: Workspace, package: Import) -> Path:
    return workspace.cache / IMPORTED / package.digest
