"""Owns assembling an artifact: one shared library, TVM's database, sources and the manifest, published whole.

Knows nothing of TVM itself, of tuning or of plans.

    <name>-<version>/<target>/
      manifest.json                         what is in it; SHA-256 of every other file
      lib/<name>-<digest>.so                the kernels of all entries
      kernels.zip                           each kernel by itself: <symbol>.o, for models that link it into their own library,
                                            and <symbol>.py, its scheduled TensorIR; if declared also include/<entry>.cuh or .h
      database/database_workload.json       MetaSchedule's JSON database, for compilations that replay the schedules
      database/database_tuning_record.json
      database_intrinsics/                  the same, of schedules that name tensor intrinsics: TVM reads it where they are registered
      traceless/<computation>.json        each computation without a trace, and the function that implements it, as TVM's JSON
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kerneldecl.artifact.archive import ARCHIVE, write_archive
from kerneldecl.artifact.manifest import DATABASE, MANIFEST, SCHEMA, TUNING_RECORDS, WITH_INTRINSICS, WORKLOADS, traceless_file, with_digest
from kerneldecl.errors import ArtifactError
from kerneldecl.model import Arch, Workload
from kerneldecl.rows import rows_field
from kerneldecl.store.files import write_whole
from kerneldecl.store.keys import arch_fields, compilers, digest
from kerneldecl.store.keys import symbol as symbol_of
from kerneldecl.store.local import Miss
from kerneldecl.store.protocol import Store
from kerneldecl.store.results import Lowered, TuneResult
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.toolchain.linkers import Linker
from kerneldecl.toolchain.rows_dispatch import RowsDispatch, compile_dispatch


class Part(NamedTuple):
    """One entry of an artifact."""

    workload: Workload
    lowered: Lowered
    tuned: TuneResult
    ranges: tuple[tuple[int, int], ...] | None = None
    """Of rows that are known at run time: the last number of each range, and that which its kernel is tuned for."""
    header: tuple[str, str] = ("", "")
    """File name of its header, and the digest of that; empty without."""


@dataclass(frozen=True, kw_only=True)
class Linked:
    """What an artifact is made of: the entries of one target."""

    name: str
    version: str
    target: str
    arch: Arch
    toolchain: Mapping[str, str]
    key: str
    parts: tuple[Part, ...]
    missing: Mapping[str, str]
    """Why entries of the target are left out, by name."""


def link(linked: Linked, store: Store, folder: Path, linker: Linker) -> None:
    """Write the artifact beside its place and move it there; raise ArtifactError if a blob is missing.

    To be called by one process at a time for a folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))  # renaming would blame the fresh one
    remove_left(folder)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        _write(linked, store, fresh, linker)
        for place in (fresh, *filter(Path.is_dir, fresh.rglob("*"))):
            place.chmod(0o755)  # whoever gets the artifact can read it, whatever the builder's umask
        _swap(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def left_beside(folder: Path) -> list[Path]:
    """Return what lies beside an artifact while it is linked, and afterwards if that was killed."""
    return list(folder.parent.glob(f".{folder.name}-*"))


def remove_left(folder: Path) -> None:
    """Remove what a build has left that was killed while it linked; to be called by one process at a time for a folder."""
    for left in left_beside(folder):
        shutil.rmtree(left)


def _swap(fresh: Path, folder: Path) -> None:
    """Put the fresh folder in place. Between the two renames of an update there is no artifact, never half of one."""
    if folder.exists():
        old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-old-"))
        folder.replace(old)
        fresh.replace(folder)
        shutil.rmtree(old)
    else:
        fresh.replace(folder)


def _write(linked: Linked, store: Store, folder: Path, linker: Linker) -> None:
    kernels = _kernels(part.tuned for part in linked.parts)
    records = list(kernels.values())
    families = [_family(parts, kernels) for parts in _by_rows(linked.parts).values()]
    dispatches = {family["symbol"]: compile_dispatch(_dispatch(family)) for family in families}
    library = _write_library(linked, records, store, folder, linker, dispatches)
    dispatching = ((f"{symbol}.o", content) for symbol, content in dispatches.items())
    write_archive(folder / ARCHIVE, [*_members(records, store), *dispatching, *_headers(linked.parts, store)])
    held = {record.computation: json.loads(_blob(store, record, "database")) for record in records}
    traceless = {computation: found for computation, found in held.items() if "trace" not in found}
    _write_databases([record for record in records if record.computation not in traceless], held, folder)
    for computation, found in traceless.items():
        write_whole(folder / traceless_file(computation), json.dumps(found, sort_keys=True), durable=True)
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
        "entries": [_entry(part, kernels, traceless) for part in sorted(linked.parts, key=lambda part: part.workload.name)],
        **({"rows": families} if families else {}),
        "missing": dict(linked.missing),
        "files": files,
    }
    write_whole(folder / MANIFEST, with_digest(manifest), durable=True)


def _kernels(records: Iterable[TuneResult]) -> dict[str, TuneResult]:
    """Return the record that each symbol's kernel comes from, sorted by symbol.

    Searches with other settings may have found several kernels of one computation. A symbol can stand for one: the
    fastest of those that are within everyone's tolerance, measured ones before others, and of these the verified ones.
    """
    by_symbol: dict[str, list[TuneResult]] = {}
    for record in records:
        by_symbol.setdefault(record.symbol, []).append(record)
    return {symbol: _best(several) for symbol, several in sorted(by_symbol.items())}


def _best(records: Sequence[TuneResult]) -> TuneResult:
    strictest = min(record.tolerance for record in records)
    # One without an error is not known to be wrong; the strictest entry's own is none that is.
    right = [record for record in records if record.error is None or record.error <= strictest]
    return min(right, key=lambda record: (not record.is_measured, not record.is_verified, record.run_secs, record.key))


def _by_rows(parts: Sequence[Part]) -> dict[str, list[Part]]:
    """Return the parts of which several make one kernel of any number of rows, by its name, in order of their rows."""
    several: dict[str, list[Part]] = {}
    for part in parts:
        if part.workload.rows and part.ranges:
            several.setdefault(part.workload.rows.name, []).append(part)
    return {name: sorted(found, key=_tuned_rows) for name, found in several.items()}


def _tuned_rows(part: Part) -> int:
    assert part.workload.rows is not None, "these have rows"
    return part.workload.rows.of(dict(part.workload.attrs))


def _family(parts: Sequence[Part], kernels: Mapping[str, TuneResult]) -> dict[str, Any]:
    """Return what the manifest says of a kernel of any number of rows: its signature at the largest that is tuned, and its table."""
    workload, lowered, _, ranges, _ = parts[-1]
    assert workload.rows is not None, "these have rows"
    assert ranges is not None, "these have rows"
    symbols = {_tuned_rows(part): kernels[part.tuned.symbol].symbol for part in parts}
    return {
        "name": workload.rows.name,
        "rule": workload.rule,
        "attrs": dict(workload.attrs),
        "symbol": symbol_of(lowered.any_rows),
        "upto": workload.rows.upto,
        "varying": [list(place) for place in lowered.varying],
        **lowered.signature,
        "table": [{"upto": upto, "tuned": tuned, "symbol": symbols[tuned]} for upto, tuned in ranges],
        "entries": [part.workload.name for part in parts],
    }


def _dispatch(family: Mapping[str, Any]) -> RowsDispatch:
    argument, dim = family["varying"][0]
    table = tuple((each["upto"], each["symbol"]) for each in family["table"])
    return RowsDispatch(family["symbol"], family["name"], argument, dim, table)


def _write_library(
    linked: Linked, records: Sequence[TuneResult], store: Store, folder: Path, linker: Linker, dispatches: Mapping[str, bytes]
) -> str:
    with scratch_folder() as scratch:
        objects = [scratch / f"{record.symbol}.o" for record in records]
        for path, record in zip(objects, records, strict=True):
            path.write_bytes(_blob(store, record, "object"))
        for symbol, content in dispatches.items():
            objects.append(scratch / f"{symbol}.o")
            objects[-1].write_bytes(content)
        built = scratch / "library.so"
        linker(built, objects)
        content = built.read_bytes()
    # The loader takes a path that it has seen for the library that it has loaded: a digest in the name keeps them apart.
    name = f"lib/{linked.name}-{digest(content)[:16]}.so"
    write_whole(folder / name, content, durable=True)
    (folder / name).chmod(0o755)
    return name


def _members(records: Sequence[TuneResult], store: Store) -> Iterator[tuple[str, bytes]]:
    for record in records:
        yield f"{record.symbol}.o", _blob(store, record, "object")
        yield f"{record.symbol}.py", _blob(store, record, "source")


def _headers(parts: Sequence[Part], store: Store) -> Iterator[tuple[str, bytes]]:
    """Yield headers as members of the archive; where the names of several entries differ in signs alone, with a digest in their own."""
    found = [part.header for part in parts if part.header[0]]
    names = Counter(name for name, _ in found)
    for plain, blob in sorted(found):
        stem, dot, ending = plain.partition(".")
        name = plain if names[plain] == 1 else f"{stem}-{blob[:8]}{dot}{ending}"
        content = store.read_blob(blob)
        if isinstance(content, Miss):
            raise ArtifactError(f"cannot link {name}: {content.reason}; build again to make it")
        yield f"include/{name}", content


def _write_databases(records: Sequence[TuneResult], held: Mapping[str, Any], folder: Path) -> None:
    """Write the database that stock TVM opens, and beside it one of the schedules that need intrinsics, if there are any."""
    needy = [record for record in records if _names_intrinsics(held[record.computation]["trace"])]
    _write_database([record for record in records if record not in needy], held, folder / DATABASE)
    if needy:
        _write_database(needy, held, folder / WITH_INTRINSICS)


def _names_intrinsics(trace: Any) -> bool:
    """Say whether a schedule's trace names tensor intrinsics: opening a database, TVM replays all traces, and fails at unknown names."""
    instructions, _decisions = trace
    return any(name == "Tensorize" for name, *_ in instructions)


def _write_database(records: Sequence[TuneResult], held: Mapping[str, Any], folder: Path) -> None:
    workloads: list[str] = []
    lines: list[str] = []
    for record in records:
        database = held[record.computation]
        # TVM's lookup takes no record without times: it prefers none to a guess.
        times = [record.run_secs] if record.is_measured else None
        for workload in database["workloads"]:
            fields = [database["trace"], times, database["target"], database["args"]]
            lines.append(json.dumps([len(workloads), fields], separators=(",", ":")))
            workloads.append(workload)
    write_whole(folder / WORKLOADS, "".join(f"{line}\n" for line in workloads), durable=True)
    write_whole(folder / TUNING_RECORDS, "".join(f"{line}\n" for line in lines), durable=True)


def _blob(store: Store, record: TuneResult, name: str) -> bytes:
    content = store.read_blob(record.blobs[name])
    if isinstance(content, Miss):
        raise ArtifactError(f"cannot link {record.symbol}: {content.reason}; build again to make it")
    return content


def _entry(part: Part, kernels: Mapping[str, TuneResult], traceless: Collection[str]) -> dict[str, Any]:
    workload, lowered, record, *_ = part
    kernel = kernels[record.symbol]
    return {
        "name": workload.name,
        "rule": workload.rule,
        "attrs": dict(workload.attrs),
        **workload.nan_field,
        **rows_field(workload.rows, workload.attrs),
        "tags": list(workload.tags),
        "symbol": kernel.symbol,
        **lowered.signature,
        "key": record.key,
        "computation": kernel.computation,
        "traceless": traceless_file(kernel.computation) if kernel.computation in traceless else "",
        "winner": kernel.winner.to_json(),
        "run_secs": kernel.run_secs if kernel.is_measured else None,
        "predicted_secs": kernel.trials[0].predicted_secs,
        "flops": lowered.json["flops"],
        "least_bytes": lowered.json["least_bytes"],
        "verdict": {"verified": kernel.error is not None, "error": kernel.error, "tolerance": record.tolerance},
        "unmeasured": not kernel.is_measured,
        "measured": kernel.coverage,
        "provenance": kernel.provenance,
    }
