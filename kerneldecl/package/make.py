"""Owns the making of a package: an artifact and its records put into a folder, and what is said of them.

Knows nothing of plans, registries or wheels: its caller names the records of the artifact.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerneldecl.artifact.manifest import MANIFEST
from kerneldecl.errors import ArtifactError
from kerneldecl.package.folder import ARTIFACT, MEASURED_FILE, PROVENANCE_FILE, RECORDS, subjects_of
from kerneldecl.package.statement import BUILD, MEASURED_ON, PROVENANCE, enveloped
from kerneldecl.store.folder_cache import FolderCache
from kerneldecl.store.keys import lines_of
from kerneldecl.store.local import LocalStore, Record
from kerneldecl.store.protocol import Wanted
from kerneldecl.store.shared import Access, SharedStore
from kerneldecl.store.signing import Sign
from kerneldecl.timing import timing_of
from kerneldecl.toolchain.versions import installed

_DEPENDENCIES = ("templates.", "candidates.", "search.reference", "computation")
"""Beginnings of the lines of a tune manifest that have digests of what an entry was built from."""


@dataclass(frozen=True)
class Origin:
    """Where an artifact comes from, as far as that is known."""

    store: LocalStore | None = None
    records: Sequence[Wanted] = ()
    """The records of its entries: computations, candidates, tunings."""
    commit: str = ""
    """The git revision of the workspace; empty where it is in none, or was changed since."""
    tuned: Mapping[str, Record] = field(default_factory=dict)
    """The tune record of each entry, by name."""


def make_package(folder: Path, artifact: Path, manifest: Mapping[str, Any], origin: Origin, sign: Sign | None) -> None:
    """Write a package into an empty folder; raise ArtifactError where a record that belongs to it is not there."""
    for name in (*manifest["files"], MANIFEST):
        place = folder / ARTIFACT / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(artifact / name, place, follow_symlinks=False)
    _write_records(folder / RECORDS, origin)
    subjects = subjects_of(folder)
    about = {f"{ARTIFACT}/{MANIFEST}": subjects[f"{ARTIFACT}/{MANIFEST}"]}
    (folder / MEASURED_FILE).write_bytes(enveloped(MEASURED_ON, about, measured_on(manifest, origin.tuned), sign))
    (folder / PROVENANCE_FILE).write_bytes(enveloped(PROVENANCE, subjects, provenance(manifest, origin), sign))


def _write_records(folder: Path, origin: Origin) -> None:
    if origin.store is None or not origin.records:
        return
    folder.mkdir()
    access = Access(functools.partial(FolderCache, folder), str(folder), writes=True, is_required=True)
    shared = SharedStore(origin.store, access, lambda _: None)
    try:
        shared.share(origin.records)
        shared.finish()
    finally:
        shared.close()
    wanted = len(dict.fromkeys(origin.records))
    if shared.shared != wanted:
        raise ArtifactError(
            f"{wanted - shared.shared} records of the artifact, or kernels that they name, are not in the store; build again"
        )


def provenance(manifest: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """Return what an artifact was built from, as SLSA has it (slsa.dev/spec/v1.0/provenance)."""
    lines = {name: lines_of(record.manifest) for name, record in origin.tuned.items()}
    digests = {(line, value.strip('"')) for found in lines.values() for line, value in found.items() if line.startswith(_DEPENDENCIES)}
    dependencies: list[dict[str, Any]] = [{"name": line, "digest": {"sha256": value.split()[-1]}} for line, value in sorted(digests)]
    if origin.commit:
        dependencies.insert(0, {"name": "workspace", "digest": {"gitCommit": origin.commit}})
    declared = [{name: entry.get(name) for name in ("name", "rule", "attrs", "tags")} for entry in manifest["entries"]]
    parameters = {name: manifest[name] for name in ("name", "version", "target")}
    return {
        "buildDefinition": {
            "buildType": BUILD,
            "externalParameters": {**parameters, "entries": declared},
            "internalParameters": {"arch": manifest["arch"], "toolchain": manifest["toolchain"]},
            "resolvedDependencies": dependencies,
        },
        "runDetails": {
            "builder": {"id": "urn:kerneldecl", "version": {"kerneldecl": installed("kerneldecl")}},
            "metadata": {"invocationId": manifest["key"]},
        },
    }


def measured_on(manifest: Mapping[str, Any], tuned: Mapping[str, Record]) -> dict[str, Any]:
    """Return on what each kernel was measured, by which protocol, how long it took, and whether it was right."""
    entries = [_measured(entry, tuned.get(entry["name"])) for entry in manifest["entries"]]
    return {"model": manifest["arch"]["model"], "kind": manifest["arch"]["kind"], "entries": entries, "missing": manifest["missing"]}


def _measured(entry: Mapping[str, Any], record: Record | None) -> dict[str, Any]:
    said = {name: entry.get(name) for name in ("name", "symbol", "winner", "verdict")}
    said |= {"seconds": entry.get("run_secs"), "device": entry.get("provenance") or {}}
    if record is None:
        return said
    lines, result = lines_of(record.manifest), record.result
    winner = result["trials"][0]
    protocol = lines.get("search.protocol", "").strip('"')
    said |= {"protocol": protocol, "timing": timing_of(lines.get("arch.kind", "").strip('"'), protocol)}
    said |= {"samples": winner.get("samples", []), "timings": winner.get("timings", {}), "code": winner.get("code_digest", "")}
    return said | {"conditions": result.get("conditions", {}), "peaks": result.get("measured_peaks", {}), "record": record.key}
