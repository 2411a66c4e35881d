"""Owns what a package is: a folder with an artifact, records to build on, and signed statements about both; and its check.

Knows nothing of registries, wheels or workspaces.

    artifact/…         the artifact, as a build has linked it
    records/ac, cas    what builds find in a shared cache: the entries' computations, candidates and tunings with their kernels
    provenance.json    an in-toto statement, in an envelope that may be signed: every other file by SHA-256, and what it was built from
    measured.json      another: on what the kernels were measured, how, and what came of it

A package is data that anybody may have written, until its signature is that of somebody who is trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneldecl.artifact.manifest import MANIFEST, artifact_defect, read_manifest
from kerneldecl.errors import ArtifactError, printable
from kerneldecl.package.statement import MEASURED_ON, PROVENANCE, Signed, read_envelope
from kerneldecl.package.tar import files_below
from kerneldecl.store.inside import MOST_JSON_BYTES, Inside, UnsafeFileError, read_regular
from kerneldecl.store.keys import digest
from kerneldecl.store.signing import Verify

ARTIFACT, RECORDS = "artifact", "records"
PROVENANCE_FILE, MEASURED_FILE = "provenance.json", "measured.json"
_STATEMENTS = (PROVENANCE_FILE, MEASURED_FILE)
_MANIFEST = f"{ARTIFACT}/{MANIFEST}"


@dataclass(frozen=True)
class Package:
    """A package whose files are what its statements say."""

    folder: Path
    manifest: Mapping[str, Any]
    provenance: Signed
    measured: Signed

    @property
    def name(self) -> str:
        """Artifact and version, such as my-kernels-0.1.0."""
        return f"{self.manifest['name']}-{self.manifest['version']}"

    @property
    def content(self) -> str:
        """Digest of all that it holds but for what is said about it: two builds of one thing agree."""
        return content_digest(self.provenance.subjects)

    @property
    def is_trusted(self) -> bool:
        return self.provenance.is_trusted and self.measured.is_trusted

    @property
    def signers(self) -> tuple[str, ...]:
        """Public keys that both statements name, in order."""
        return tuple(key for key in dict.fromkeys(self.provenance.signers) if key in self.measured.signers)


def content_digest(subjects: Mapping[str, str]) -> str:
    return digest("".join(f"{found}  {name}\n" for name, found in sorted(subjects.items())).encode())


def is_package(folder: Path) -> bool:
    return (folder / PROVENANCE_FILE).is_file()


def subjects_of(folder: Path) -> dict[str, str]:
    """Return the digest of every file of a package that its provenance is about."""
    with Inside(folder) as inside:
        return {name: inside.digest(name) for name in files_below(folder) if name not in _STATEMENTS}


def read_package(folder: Path, verify: Verify | None) -> Package:
    """Return a package once every file was compared; raise ArtifactError where anything is not as its statements say.

    Where there is something to verify signatures by, both statements must be signed by somebody who is trusted.
    """
    provenance = _statement(folder, PROVENANCE_FILE, PROVENANCE, verify)
    if defect := next(_wrong_files(folder, provenance.subjects), ""):
        raise ArtifactError(f"{folder}: {defect}")
    measured = _statement(folder, MEASURED_FILE, MEASURED_ON, verify)
    manifest = read_manifest(folder / ARTIFACT)
    if isinstance(manifest, str):
        raise ArtifactError(f"{folder / ARTIFACT}: {manifest}")
    if measured.subjects != {_MANIFEST: provenance.subjects.get(_MANIFEST)}:
        raise ArtifactError(f"{folder}: {MEASURED_FILE} is about another artifact")
    if defect := artifact_defect(folder / ARTIFACT) or next(_lies(manifest, measured.predicate), ""):
        raise ArtifactError(f"{folder}: {defect}")
    package = Package(folder, manifest, provenance, measured)
    if verify and not package.is_trusted:
        who = "it is signed by nobody who is trusted" if package.signers else "it is not signed"
        raise ArtifactError(f"{folder}: {who}; get it from where it was published, or name its key (--key, or keys in [trust])")
    return package


def _statement(folder: Path, name: str, kind: str, verify: Verify | None) -> Signed:
    try:
        return read_envelope(read_regular(folder / name, MOST_JSON_BYTES), kind, verify)
    except FileNotFoundError:
        raise ArtifactError(f"{folder} is no package: it has no {name}") from None
    except OSError as error:
        raise ArtifactError(f"{folder / name} cannot be read: {error.strerror}") from None
    except (UnsafeFileError, ArtifactError) as error:
        raise ArtifactError(f"{folder / name} {error}") from None


def _wrong_files(folder: Path, subjects: Mapping[str, str]) -> Iterator[str]:
    """Yield what of a package's files is not as its provenance says: each is listed, and nothing else is there."""
    with Inside(folder) as inside:
        defects = (inside.defect(name, expected, PROVENANCE_FILE) for name, expected in subjects.items())
        yield from filter(None, defects)
    yield from (
        f"{printable(name)} is not listed in {PROVENANCE_FILE}" for name in files_below(folder) if name not in {*subjects, *_STATEMENTS}
    )


def _lies(manifest: Mapping[str, Any], predicate: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is said of measurements that the artifact's manifest does not say."""
    listed = predicate.get("entries")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        yield f"{MEASURED_FILE} lists no entries"
        return
    if predicate.get("model") != manifest["arch"]["model"]:
        yield f"{MEASURED_FILE} tells of another device than the artifact's manifest"
    said = [(each.get("name"), each.get("seconds"), each.get("verdict")) for each in listed]
    if said != [(entry["name"], entry.get("run_secs"), entry["verdict"]) for entry in manifest["entries"]]:
        yield f"{MEASURED_FILE} tells of other entries, times or verdicts than the artifact's manifest"
