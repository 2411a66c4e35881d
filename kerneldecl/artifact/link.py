"""Owns assembling an artifact: one shared library, TVM's database, sources and the manifest, published whole.

Knows nothing of TVM itself, of tuning or of plans.

    <name>-<version>/<target>/
      manifest.json                         what is in it; SHA-256 of every other file
      lib/<name>-<digest>.so                the kernels of all entries
      objects/<symbol>.o                    each kernel by itself, for models that link it into their own library
      database/database_workload.json       MetaSchedule's JSON database, for compilations that replay the schedules
      database/database_tuning_record.json
      specialised/<computation>.json        each computation without a trace, and the function that implements it, as TVM's JSON
      source/<symbol>.py                    the scheduled TensorIR of each kernel
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kerneldecl.errors import ArtifactError
from kerneldecl.model import Arch, Workload
from kerneldecl.planning.plan import is_measured
from kerneldecl.store.files import write_whole
from kerneldecl.store.keys import arch_fields, compilers, digest
from kerneldecl.store.local import LocalStore, Miss, Record
from kerneldecl.toolchain.cuda_objects import link_cuda_library
from kerneldecl.toolchain.cxx import link_shared_library

SCHEMA = 3
MANIFEST = "manifest.json"
_NO_DIGEST = "0" * 64
Linker = Callable[[Path, Sequence[Path]], None]
LINKERS: Mapping[str, Linker] = MappingProxyType({"cpu": link_shared_library, "cuda": link_cuda_library})
"""What links objects into a library, by kind of arch."""


class Part(NamedTuple):
    """One entry of an artifact: the workload, the result of its lower record, its tune record."""

    workload: Workload
    lowered: Mapping[str, Any]
    tuned: Record


@dataclass(frozen=True)
class Linked:
    """What an artifact is made of: the entries of one target."""

    name: str
    version: str
    target: str
    arch: Arch
    toolchain: Mapping[str, str]
    key: str
    parts: tuple[Part, ...]


def artifact_folder(root: Path, name: str, version: str, target: str) -> Path:
    return root / "dist" / f"{name}-{version}" / target


def link(linked: Linked, store: LocalStore, folder: Path, linker: Linker) -> None:
    """Write the artifact beside its place and move it there; raise ArtifactError if a blob is missing.

    To be called by one process at a time for a folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(left)  # of a build that was killed while it linked; nobody else links here now
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        _write(linked, store, fresh, linker)
        fresh.chmod(0o755)
        _swap(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _swap(fresh: Path, folder: Path) -> None:
    """Put the fresh folder in place. Between the two renames of an update there is no artifact, never half of one."""
    if folder.exists():
        old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-old-"))
        folder.replace(old)
        fresh.replace(folder)
        shutil.rmtree(old)
    else:
        fresh.replace(folder)


def _write(linked: Linked, store: LocalStore, folder: Path, linker: Linker) -> None:
    kernels = _kernels(part.tuned for part in linked.parts)
    records = list(kernels.values())
    library = _write_library(linked, records, store, folder, linker)
    _write_objects(records, store, folder / "objects")
    held = {record.result["computation"]: json.loads(_blob(store, record, "database")) for record in records}
    specialised = {computation: found for computation, found in held.items() if "trace" not in found}
    _write_database([record for record in records if record.result["computation"] not in specialised], held, folder / "database")
    for computation, found in specialised.items():
        write_whole(folder / specialised_file(computation), json.dumps(found, sort_keys=True), durable=True)
    for record in records:
        write_whole(folder / "source" / f"{record.result['symbol']}.py", _blob(store, record, "source"), durable=True)
    files = {str(path.relative_to(folder)): digest(path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest = {
        "schema": SCHEMA,
        "name": linked.name,
        "version": linked.version,
        "target": linked.target,
        "key": linked.key,
        "arch": {"name": linked.arch.name, **arch_fields(linked.arch)},
        "toolchain": compilers(linked.arch, linked.toolchain),
        "library": library,
        "entries": [_entry(part, kernels, specialised) for part in sorted(linked.parts, key=lambda part: part.workload.name)],
        "files": files,
    }
    write_whole(folder / MANIFEST, _with_digest(manifest), durable=True)


def _with_digest(manifest: Mapping[str, Any]) -> bytes:
    """Return the manifest's text with the digest of itself in it, taken while that is all zeros."""
    text = (json.dumps({**manifest, "digest": _NO_DIGEST}, indent=1, sort_keys=True) + "\n").encode()
    return text.replace(_NO_DIGEST.encode(), digest(text).encode(), 1)


def _has_its_digest(folder: Path, manifest: Mapping[str, Any]) -> bool:
    text = (folder / MANIFEST).read_bytes().replace(str(manifest["digest"]).encode(), _NO_DIGEST.encode(), 1)
    return digest(text) == str(manifest["digest"])


def _kernels(records: Iterable[Record]) -> dict[str, Record]:
    """Return the record that each symbol's kernel comes from, sorted by symbol.

    Searches with other settings may have found several kernels of one computation. A symbol can stand for one: the
    fastest of those that are within everyone's tolerance, measured ones before others.
    """
    by_symbol: dict[str, list[Record]] = {}
    for record in records:
        by_symbol.setdefault(record.result["symbol"], []).append(record)
    return {symbol: _best(several) for symbol, several in sorted(by_symbol.items())}


def _best(records: Sequence[Record]) -> Record:
    strictest = min(record.result["tolerance"] for record in records)
    measured = [record for record in records if is_measured(record)]
    # Where nobody has measured any, each is as good as its policy expects.
    right = [record for record in measured if record.result["error"] <= strictest] or records
    return min(right, key=lambda record: (record.result["run_secs"], record.key))


def _write_library(linked: Linked, records: Sequence[Record], store: LocalStore, folder: Path, linker: Linker) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        objects = [Path(scratch) / f"{record.result['symbol']}.o" for record in records]
        for path, record in zip(objects, records, strict=True):
            path.write_bytes(_blob(store, record, "code"))
        built = Path(scratch) / "library.so"
        linker(built, objects)
        content = built.read_bytes()
    # The loader takes a path that it has seen for the library that it has loaded: a digest in the name keeps them apart.
    name = f"lib/{linked.name}-{digest(content)[:16]}.so"
    write_whole(folder / name, content, durable=True)
    (folder / name).chmod(0o755)
    return name


def _write_objects(records: Sequence[Record], store: LocalStore, folder: Path) -> None:
    for record in records:
        write_whole(folder / f"{record.result['symbol']}.o", _blob(store, record, "code"), durable=True)


def specialised_file(computation: str) -> str:
    """Return where an artifact keeps the specialised function of a computation, by the digest of its canonical TensorIR."""
    return f"specialised/{computation}.json"


def _write_database(records: Sequence[Record], held: Mapping[str, Any], folder: Path) -> None:
    workloads: list[str] = []
    lines: list[str] = []
    for record in records:
        database = held[record.result["computation"]]
        for workload in database["workloads"]:
            fields = [database["trace"], [record.result["run_secs"]], database["target"], database["args"]]
            lines.append(json.dumps([len(workloads), fields], separators=(",", ":")))
            workloads.append(workload)
    write_whole(folder / "database_workload.json", "".join(f"{line}\n" for line in workloads), durable=True)
    write_whole(folder / "database_tuning_record.json", "".join(f"{line}\n" for line in lines), durable=True)


def _blob(store: LocalStore, record: Record, name: str) -> bytes:
    content = store.read_blob(record.result[name])
    if isinstance(content, Miss):
        raise ArtifactError(f"cannot link {record.result['symbol']}: {content.reason}; build again to make it")
    return content


def _entry(part: Part, kernels: Mapping[str, Record], specialised: Collection[str]) -> dict[str, Any]:
    workload, lowered, record = part
    result = kernels[record.result["symbol"]].result
    return {
        "name": workload.name,
        "rule": workload.rule,
        "attrs": dict(workload.attrs),
        "tags": list(workload.tags),
        "symbol": result["symbol"],
        **lowered["signature"],
        "key": record.key,
        "computation": result["computation"],
        "specialised": specialised_file(result["computation"]) if result["computation"] in specialised else "",
        "winner": result["winner"],
        "run_secs": result["run_secs"],
        "flops": lowered["flops"],
        "least_bytes": lowered["least_bytes"],
        "verdict": {"verified": result["error"] is not None, "error": result["error"], "tolerance": record.result["tolerance"]},
        "unmeasured": not result.get("is_measured", True),
        "provenance": result["provenance"],
    }


def artifact_defect(folder: Path, key: str = "") -> str:
    """Return what is wrong with an artifact, as a phrase; empty if it is whole and, where a key is given, has that key."""
    manifest = read_manifest(folder)
    if isinstance(manifest, str):
        return manifest
    if not _has_its_digest(folder, manifest):
        return f"{MANIFEST} of the artifact was changed after it was written"
    if key and manifest["key"] != key:
        return "the artifact holds other kernels"
    for name, expected in manifest["files"].items():
        try:
            content = (folder / name).read_bytes()
        except OSError:
            return f"{name} is missing from the artifact"
        if digest(content) != expected:
            return f"{name} of the artifact has other content than its manifest says"
    return ""


def read_manifest(folder: Path) -> dict[str, Any] | str:
    """Return an artifact's manifest, or what is wrong with it as a phrase."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return "there is no artifact yet"
    except (OSError, ValueError):
        return f"{MANIFEST} of the artifact cannot be read"
    if not isinstance(manifest, dict) or not {"schema", "digest", "key", "entries", "files", "library"} <= manifest.keys():
        return f"{MANIFEST} of the artifact lacks fields"
    if manifest["schema"] != SCHEMA:
        return f"the artifact has schema {manifest['schema']}; this kerneldecl reads {SCHEMA}"
    return manifest
