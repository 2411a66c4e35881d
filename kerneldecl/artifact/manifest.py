"""Owns an artifact's manifest: where artifacts lie, how a manifest is read and checked, the digest of itself in it.

Knows nothing of how artifacts are linked or loaded, and imports neither planner nor linker. A manifest is data that anybody may have
written: every file that an artifact's users open is listed in it by digest, and lies inside the artifact's folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

from kerneldecl.artifact.archive import ARCHIVE
from kerneldecl.errors import printable
from kerneldecl.store.inside import MOST_JSON_BYTES, Inside, UnsafeFileError, is_digest, read_regular
from kerneldecl.store.keys import digest
from kerneldecl.store.result_types import is_signature
from kerneldecl.toolchain.machines import machine_of_triple

SCHEMA = 5
MANIFEST = "manifest.json"
DATABASE, WITH_INTRINSICS = "database", "database_intrinsics"
"""Folders of the database that stock TVM opens, and of the one whose schedules name tensor intrinsics, which may be absent."""
TUNING_RECORDS, WORKLOADS = "database_tuning_record.json", "database_workload.json"
"""Files of a database, as TVM names them."""
OTHER_KERNELS = "the artifact holds other kernels"
_NO_DIGEST = "0" * 64
_SYMBOL = re.compile(r"kd_[0-9a-f]{20}")


def artifact_folder(root: Path, name: str, version: str, target: str) -> Path:
    return root / "dist" / f"{name}-{version}" / target


def machine_of(manifest: Mapping[str, Any]) -> str:
    """Return the machine that an artifact's library is for, as `uname -m` names it."""
    return machine_of_triple(str(manifest["arch"]["target"].get("mtriple", "")))


def traceless_file(computation: str) -> str:
    """Return where an artifact keeps the function without a trace of a computation, by the digest of its canonical TensorIR."""
    return f"traceless/{computation}.json"


def artifact_defect(folder: Path, key: str = "") -> str:
    """Return what is wrong with an artifact, as a phrase; empty if it is whole and, where a key is given, has that key."""
    manifest = read_manifest(folder)
    if isinstance(manifest, str):
        return manifest
    if key and manifest["key"] != key:
        return OTHER_KERNELS
    with Inside(folder) as inside:
        for name, expected in manifest["files"].items():
            try:
                found = inside.digest(name)
            except UnsafeFileError as error:
                return f"{printable(name)} of the artifact {error}"
            except OSError:
                return f"{printable(name)} is missing from the artifact"
            if found != expected:
                return f"{printable(name)} of the artifact has other content than its manifest says"
    return ""


def read_manifest(folder: Path) -> dict[str, Any] | str:
    """Return an artifact's manifest, whose fields have the right types and which has its own digest; or what is wrong with it."""
    try:
        text = read_regular(folder / MANIFEST, MOST_JSON_BYTES)
        manifest = json.loads(text)
    except FileNotFoundError:
        return "there is no artifact yet"
    except UnsafeFileError as error:
        return f"{MANIFEST} of the artifact {error}"
    except (OSError, ValueError, RecursionError):
        return f"{MANIFEST} of the artifact cannot be read"
    return next(_defects(manifest, text), "") or manifest


def symbols_of(manifest: Mapping[str, Any]) -> set[str]:
    """Return the symbols of an artifact's library."""
    return {each["symbol"] for each in (*manifest["entries"], *manifest.get("rows", ()))}


def with_called(manifest: Mapping[str, Any], symbols: Iterable[str]) -> list[str]:
    """Return symbols and, after those that take any number of rows, the kernels that they call."""
    tables = {family["symbol"]: [each["symbol"] for each in family["table"]] for family in manifest.get("rows", ())}
    return list(dict.fromkeys(found for symbol in symbols for found in (symbol, *tables.get(symbol, ()))))


def _defects(manifest: Any, text: bytes) -> Iterator[str]:
    """Yield what is wrong with a manifest of this text; what follows a defect may rely on it."""
    if not isinstance(manifest, dict) or not {"schema", "digest", "key", "entries", "missing", "files", "library"} <= manifest.keys():
        yield f"{MANIFEST} of the artifact lacks fields"
    if manifest["schema"] != SCHEMA:
        yield f"the artifact has schema {printable(str(manifest['schema'])[:20])}; this kerneldecl reads {SCHEMA}"
    own = str(manifest["digest"])
    if digest(text.replace(own.encode(errors="replace"), _NO_DIGEST.encode(), 1)) != own:
        yield f"{MANIFEST} of the artifact was changed after it was written"
    yield from (f"{MANIFEST} of the artifact is wrong: {wrong}" for wrong in _wrong_fields(manifest))


def with_digest(manifest: Mapping[str, Any]) -> bytes:
    """Return the manifest's text with the digest of itself in it, taken while that is all zeros."""
    text = f"{_indented({**manifest, 'digest': _NO_DIGEST})}\n".encode()
    return text.replace(_NO_DIGEST.encode(), digest(text).encode(), 1)


def _indented(value: Any, margin: str = "\n") -> str:
    """Return what `json.dumps` does with `indent=1, sort_keys=True`, in half the time: with an indent that is Python throughout."""
    kind = type(value)
    if kind is str:
        return encode_basestring_ascii(value)
    if kind is int:
        return repr(value)
    if not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value)
    inner = f"{margin} "
    if isinstance(value, dict):
        items = [f"{encode_basestring_ascii(name)}: {_indented(item, inner)}" for name, item in sorted(value.items())]
        return f"{{{inner}{f',{inner}'.join(items)}{margin}}}"
    return f"[{inner}{f',{inner}'.join([_indented(item, inner) for item in value])}{margin}]"


def _wrong_fields(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield what users of a manifest must not meet: values of other types, files that are listed nowhere."""
    types: Mapping[str, type] = {"files": dict, "entries": list, "missing": dict, "library": str, "arch": dict, "toolchain": dict}
    types = {**types, "name": str, "version": str, "target": str}
    for name, expected in types.items():
        if not isinstance(manifest.get(name), expected):
            yield f"{name} is no {'table' if expected is dict else 'list' if expected is list else 'string'}"
            return
    files, arch = manifest["files"], manifest["arch"]
    if not all(map(is_digest, files.values())):
        yield "files holds what is no digest"
    if not all(isinstance(reason, str) for reason in manifest["missing"].values()):
        yield "missing holds what is no reason"
    if not isinstance(arch.get("model"), str) or not isinstance(arch.get("target"), dict) or not _has_device(arch):
        yield "arch describes no machine"
    # TVM opens both files of a database, whichever are listed.
    databases = {DATABASE, *(WITH_INTRINSICS for name in files if name.startswith(f"{WITH_INTRINSICS}/"))}
    needed = (manifest["library"], ARCHIVE, *(f"{folder}/{name}" for folder in sorted(databases) for name in (TUNING_RECORDS, WORKLOADS)))
    yield from (f"{printable(name)} is not among its files" for name in needed if name not in files)
    for position, entry in enumerate(manifest["entries"]):
        yield from (f"entries[{position}] {wrong}" for wrong in _wrong_entry(entry, files))
    families = manifest.get("rows", [])
    symbols = {entry["symbol"] for entry in manifest["entries"] if isinstance(entry, dict) and "symbol" in entry}
    if not isinstance(families, list):
        yield "rows is no list"
        return
    yield from (f"rows[{position}] {wrong}" for position, family in enumerate(families) for wrong in _wrong_family(family, symbols))


def _wrong_family(family: Any, symbols: set[str]) -> Iterator[str]:
    """Yield what is wrong with a kernel of any number of rows; its table names kernels of these symbols."""
    if not isinstance(family, dict) or not isinstance(family.get("name"), str) or not isinstance(family.get("attrs"), dict):
        yield "has no name or attributes"
    elif not is_signature(family) or not _SYMBOL.fullmatch(str(family.get("symbol", ""))) or not isinstance(family.get("rule"), str):
        yield "has no rule, symbol, inputs or outputs"
    elif type(family.get("upto")) is not int or not _are_places(family.get("varying"), family):
        yield "has no extents that vary, or no bound of them"
    elif not _are_ranges(family.get("table"), symbols) or not isinstance(family.get("entries"), list):
        yield "has no table of its kernels"


def _are_places(places: Any, family: Mapping[str, Any]) -> bool:
    """Say whether these are dimensions of a signature's arguments, of an input first."""
    args = [*family["inputs"], *family["outputs"]]
    if not isinstance(places, list) or not places or not all(isinstance(place, list) and len(place) == 2 for place in places):
        return False
    if not all(type(number) is int and number >= 0 for place in places for number in place):
        return False
    return places[0][0] < len(family["inputs"]) and all(arg < len(args) and dim < len(args[arg]["shape"]) for arg, dim in places)


def _are_ranges(table: Any, symbols: set[str]) -> bool:
    if not isinstance(table, list) or not table or not all(isinstance(each, dict) for each in table):
        return False
    return all(type(each.get("upto")) is int and type(each.get("tuned")) is int and each.get("symbol") in symbols for each in table)


def _has_device(arch: Mapping[str, Any]) -> bool:
    if arch.get("kind") == "cuda":
        return isinstance(arch.get("gpu"), dict)
    cpu = arch.get("cpu")
    return arch.get("kind") == "cpu" and isinstance(cpu, dict) and type(cpu.get("cores")) is int and cpu["cores"] > 0


def _wrong_entry(entry: Any, files: Mapping[str, str]) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield "is no table"
        return
    if not isinstance(entry.get("name"), str) or not isinstance(entry.get("rule"), str) or not isinstance(entry.get("attrs"), dict):
        yield "has no name, rule or attributes"
    if not is_signature(entry):
        yield "has no inputs or outputs"
    symbol, computation, traceless = (str(entry.get(name, "")) for name in ("symbol", "computation", "traceless"))
    if not is_digest(computation) or not _SYMBOL.fullmatch(symbol):
        yield "names no computation or no symbol"
        return
    if traceless and (traceless != traceless_file(computation) or traceless not in files):
        yield "has a function without a trace that is not among the files"
    winner, verdict = entry.get("winner"), entry.get("verdict")
    if not isinstance(winner, dict) or not isinstance(winner.get("template"), str) or not isinstance(winner.get("params"), dict):
        yield "has no winner"
    if not isinstance(verdict, dict) or type(verdict.get("tolerance")) not in {int, float}:
        yield "has no tolerance"
