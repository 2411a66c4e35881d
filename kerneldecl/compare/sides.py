"""Owns the reading of what is compared: the entries of an artifact, of a lock file, or of the lock of a git revision, with their records.

Knows nothing of what is made of them. All of it is data that anybody may have written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kerneldecl.artifact.manifest import read_manifest
from kerneldecl.compare.verdict import Measured
from kerneldecl.errors import ArtifactError, DeclarationError, Problem
from kerneldecl.model import Candidate
from kerneldecl.package.folder import Package, is_package
from kerneldecl.package.place import is_packed, opened_package
from kerneldecl.planning.git_files import git_files
from kerneldecl.planning.lockfile import locked_entries
from kerneldecl.planning.workspace import LOCK
from kerneldecl.store.inside import UnsafeFileError, is_digest, read_regular
from kerneldecl.store.keys import lines_of
from kerneldecl.store.local import LocalStore, Record, judged
from kerneldecl.store.results import TuneResult
from kerneldecl.timing import timing_of

_MOST_LOCK_BYTES = 1 << 28

Records = Callable[[Sequence[str]], Mapping[str, Record]]
"""Gives the tune records of keys, as far as they are known."""
Side = Mapping[str, Measured]


def read_side(root: Path, named: str, known: Side = MappingProxyType({})) -> Side:
    """Return the entries of what is named: an artifact's folder, a package, a lock file, or a git revision of the workspace.

    An entry of a lock that is as one of `known` is that one, and its record is not read.
    Raise ArtifactError for an artifact that is not sound, DeclarationError for what is none of them.
    """
    path = root / named
    if is_package(path) or is_packed(path):
        with opened_package(path, None) as package:
            return _of_package(package)
    if path.is_dir():
        return _of_artifact(root, path)
    if path.is_file():
        return _of_lock(str(path), _text(path), _stored(path.parent / "cache", root / "cache"), known)
    return _of_lock(f"workloads.lock of {named}", _of_revision(root, named), lambda keys: _committed(root, named, keys), known)


def _text(path: Path) -> str:
    try:
        return read_regular(path, _MOST_LOCK_BYTES).decode(errors="replace")
    except (OSError, UnsafeFileError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None


def _of_artifact(root: Path, folder: Path) -> Side:
    manifest = read_manifest(folder)
    if isinstance(manifest, str):
        raise ArtifactError(f"{folder}: {manifest}")
    target = manifest["target"]
    entries = {f"{entry['name']}@{target}": entry for entry in manifest["entries"]}
    # An artifact lies in dist/NAME-VERSION/TARGET of its workspace.
    records = _stored(folder.resolve().parents[2] / "cache", root / "cache")([str(entry.get("key")) for entry in entries.values()])
    return {name: _with_record(_of_entry(name, entry), records.get(str(entry.get("key")))) for name, entry in entries.items()}


def _of_entry(name: str, entry: Mapping[str, Any]) -> Measured:
    try:
        secs = None if entry["unmeasured"] or entry["run_secs"] is None else float(entry["run_secs"])
        winner = str(Candidate.from_json(entry["winner"]))
        return Measured(name, str(entry["key"]), winner, secs, is_verified=secs is not None and entry["verdict"]["verified"] is True)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ArtifactError(f"the manifest's entry {name} is damaged") from None


def _of_package(package: Package) -> Side:
    """Return the entries with what the package's statement says of their measurement."""
    target = package.manifest["target"]
    said = {str(entry["name"]): entry for entry in package.measured.predicate["entries"]}
    entries = (_of_entry(f"{entry['name']}@{target}", entry) for entry in package.manifest["entries"])
    return {entry.name: _as_said(entry, said[entry.name.removesuffix(f"@{target}")]) for entry in entries}


def _as_said(entry: Measured, said: Mapping[str, Any]) -> Measured:
    try:
        samples = tuple(float(each) for each in said.get("samples", ()))
        timings = tuple((str(name), tuple(map(float, each))) for name, each in sorted(said.get("timings", {}).items()))
    except (TypeError, ValueError, AttributeError):
        raise ArtifactError(f"what the package says of {entry.name} is damaged") from None
    return replace(entry, samples=samples, timing=str(said.get("timing", "")), timings=timings) if samples else entry


def _of_lock(place: str, text: str, records: Records, known: Side) -> Side:
    entries = locked_entries(text)
    if entries is None:
        raise ArtifactError(
            f"{place}: not a lock that kerneldecl has written; name a workloads.lock, an artifact's folder or a git revision"
        )
    blocks = [_of_block(entry) for entry in entries if not entry.get("missing")]
    found = records([block.key for block in blocks if not _is_as(block, known.get(block.name))])
    return {
        block.name: known[block.name] if _is_as(block, known.get(block.name)) else _with_record(block, found.get(block.key))
        for block in blocks
    }


def _is_as(block: Measured, known: Measured | None) -> bool:
    """Say whether a lock's entry is one that is known; locks have times in four figures."""
    if known is None or (block.key, block.winner, block.code) != (known.key, known.winner, known.code):
        return False
    return (block.run_secs and f"{block.run_secs:.4g}") == (known.run_secs and f"{known.run_secs:.4g}")


def _of_block(entry: Mapping[str, Any]) -> Measured:
    time_us = entry.get("time_us")
    secs = time_us * 1e-6 if type(time_us) in {int, float} and time_us > 0 else None  # type: ignore[operator]  # just checked
    return Measured(
        name=str(entry["name"]),
        key=str(entry["key"]),
        winner=str(entry.get("winner", "")),
        run_secs=secs,
        is_verified=secs is not None and not entry.get("unverified"),
        code=str(entry.get("object", "")),
    )


def _with_record(entry: Measured, record: Record | None) -> Measured:
    """Return an entry with what its record adds: samples of the winner's time, its code, and what its tuning depends on."""
    if record is None:
        return entry
    found = TuneResult(record.key, record.result)
    winner = found.trials[0]
    if str(found.winner) != entry.winner or not winner.samples or entry.run_secs is None:
        return entry  # it was measured again since
    lines = lines_of(record.manifest)
    return replace(
        entry,
        run_secs=winner.run_secs,
        code=found.blobs["object"],
        samples=winner.samples,
        timing=timing_of(*(lines.get(name, "").strip('"') for name in ("arch.kind", "search.protocol"))),
        timings=winner.timings,
        manifest=record.manifest,
    )


def _stored(*caches: Path) -> Records:
    stores = [LocalStore(cache) for cache in dict.fromkeys(caches)]
    places = [(store, is_local) for store in stores for is_local in (False, True)]

    def records(keys: Sequence[str]) -> Mapping[str, Record]:
        found = ((key, store.read("tune", key, is_local=is_local)) for store, is_local in reversed(places) for key in keys)
        return {key: record for key, record in found if isinstance(record, Record)}

    return records


def _of_revision(root: Path, revision: str) -> str:
    (content,) = git_files(root, revision, [LOCK])
    if content is None:
        sentence = f"{revision} is no artifact's folder, no lock file and no git revision with a {LOCK}"
        raise DeclarationError([Problem(revision, sentence.removeprefix(f"{revision} "), "name one of them")])
    return content.decode(errors="replace")


def _committed(root: Path, revision: str, keys: Sequence[str]) -> Mapping[str, Record]:
    sound = [key for key in keys if is_digest(key)]
    contents = git_files(root, revision, [f"cache/record/tune/{key}.json" for key in sound])
    found = {key: judged(content, "tune", key, key) for key, content in zip(sound, contents, strict=True) if content is not None}
    return {key: record for key, record in found.items() if isinstance(record, Record)}
