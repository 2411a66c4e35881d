"""Owns an artifact as a compilation sees it: whether it fits a target, and each kernel's TensorIR, plain and scheduled.

Knows nothing of models.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tvm
from tvm.s_tir.meta_schedule.database import JSONDatabase

from kerneldecl.artifact.load import checked_artifact
from kerneldecl.artifact.manifest import DATABASE, WITH_INTRINSICS, WORKLOADS
from kerneldecl.compiler.canonical import canonical_module, load, module_digest, private_module
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.compiler.intrinsics import int4_dot, mma
from kerneldecl.compiler.passes import vector_math
from kerneldecl.compiler.prim_funcs import calls_vendor_library, is_tirx
from kerneldecl.errors import ArtifactError
from kerneldecl.model import Candidate
from kerneldecl.relax.difference import Shape, shape_of
from kerneldecl.store.keys import symbol
from kerneldecl.toolchain.versions import PACKAGES, installed

_NAME = re.compile(r"kd\.(?:mma|ldmatrix|clear)\.[\w.+]+")
"""Names of intrinsics in the text of traces."""
_IDENTITY = {"llvm": ("kind", "mcpu", "mattr"), "cuda": ("kind", "arch")}
"""Attributes of a target that determine which machines its code runs on, by kind of target."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of an artifact."""

    symbol: str
    entries: tuple[str, ...]
    func: Any
    """The computation as a PrimFunc, not scheduled."""
    trace: Any
    """The trace of its schedule; None where it is traceless."""
    traceless: Any = None
    """The PrimFunc that implements the computation without a trace; None where there is a trace."""
    arch: str = ""
    """The arch that a traceless TIRx function must be compiled for; empty if any."""
    calls_library: bool = False
    """Whether it calls a vendor's library, by functions that are linked with its object alone."""
    is_fallback: bool = False
    """Whether its template is one that fits every function."""
    upto: int = 0
    """The most rows that it takes, where it takes any number; 0 where the number is fixed."""

    @cached_property
    def digest(self) -> str:
        """The digest that it shares with the functions that it can replace, and with kernels of another index width."""
        return match_digest(self.func)

    @cached_property
    def shape(self) -> Shape:
        """The arguments and loop nests that an unmatched function is compared with."""
        return shape_of(self.func)

    @property
    def scheduled(self) -> Any:
        """The PrimFunc that is compiled: the traceless one, or the replayed trace's result."""
        if self.traceless is not None:
            return self.traceless.without_attr("global_symbol")
        schedule = tvm.s_tir.Schedule(private_module(self.func))
        self.trace.apply_to_schedule(schedule, remove_postproc=False)
        return schedule.mod["main"].without_attr("global_symbol")


@dataclass(frozen=True)
class Prebuilt:
    """An artifact that was checked and fits a target."""

    folder: Path
    name: str
    kernels: tuple[Kernel, ...]


def target_of(artifact: str | Path) -> tvm.target.Target:
    """Return the target that an artifact was built for; raise ArtifactError where it is damaged."""
    _, manifest = checked_artifact(artifact)
    return tvm.target.Target(manifest["arch"]["target"])


def read_prebuilt(artifact: str | Path, target: tvm.target.Target) -> Prebuilt:
    """Return an artifact's kernels; raise ArtifactError where it is damaged, or was built for another target or by another TVM."""
    folder, manifest = checked_artifact(artifact)
    if reason := _why_not_usable(manifest, target):
        raise ArtifactError(f"{folder}: {reason}")
    vector_math.register()
    return Prebuilt(folder, f"{manifest['name']} {manifest['version']}", _kernels(folder, json.dumps(manifest)))


def register_intrinsics(database: str | Path = "") -> None:
    """Register the intrinsics that kernels' traces name: without them, TVM cannot read `database_intrinsics/`.

    Given that folder, only those that its traces name: to parse all takes seconds.
    """
    vector_math.register()
    int4_dot.register_all()
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(database).glob("*.json"))] if database else []
    mma.register({name for text in texts for name in _NAME.findall(text)} if database else mma.all_names())


def _why_not_usable(manifest: Mapping[str, Any], target: tvm.target.Target) -> str:
    built_for, wanted = manifest["arch"]["target"], {"kind": target.kind.name, **dict(target.attrs)}
    for name in _IDENTITY[built_for["kind"]]:
        if _value(wanted, name) not in {_value(built_for, name), _wgmma_arch(manifest) if name == "arch" else ""}:
            return (
                f"the artifact is for {name} {_value(built_for, name) or 'none'}, this target has {_value(wanted, name) or 'none'}; "
                f"compile for {dict(built_for)}, or build the artifact for this target"
            )
    built_with, present = manifest["toolchain"].get("tvm"), installed(PACKAGES["tvm"])
    return f"the artifact was built with TVM {built_with}, this is {present}; build it again" if built_with != present else ""


def _wgmma_arch(manifest: Mapping[str, Any]) -> str:
    """Return the arch variant with wgmma of an artifact's GPU, such as sm_90a; empty where there is none."""
    return str(manifest["arch"].get("gpu", {}).get("wgmma_arch", ""))


def _value(attrs: Mapping[str, Any], name: str) -> str:
    value = attrs.get(name, "")
    return value if isinstance(value, str) else ",".join(sorted(map(str, value)))


@functools.lru_cache(maxsize=2)
def _kernels(folder: Path, text: str) -> tuple[Kernel, ...]:
    """Return the kernels of a manifest's text, which has the digest of every file: a compilation asks once for each attention and again."""
    manifest = json.loads(text)
    entries: dict[str, list[str]] = {}
    for entry in manifest["entries"]:
        entries.setdefault(entry["symbol"], []).append(entry["name"])
    found = {**_scheduled(folder, manifest["files"], entries), **_traceless(folder, manifest, entries)}
    if missing := sorted(entries.keys() - found.keys()):
        raise ArtifactError(f"{folder}: the database has no schedule of {', '.join(entries[missing[0]])}; build the artifact again")
    found = _with_any_rows(found, manifest)
    fallbacks = {entry["symbol"] for entry in manifest["entries"] if Candidate.from_json(entry["winner"]).is_fallback}
    return tuple(replace(found[name], is_fallback=found[name].is_fallback or name in fallbacks) for name in sorted(found))


def _with_any_rows(found: Mapping[str, Kernel], manifest: Mapping[str, Any]) -> dict[str, Kernel]:
    """Return the kernels with one for each number of rows that is known at run time, in place of those that its table names.

    Those compute the same. Where a model is compiled from schedules, it gets the kernel of the last range.
    """
    several = {entry["symbol"] for entry in manifest["entries"] if "rows" in entry}
    kept = {symbol: kernel for symbol, kernel in found.items() if symbol not in several}
    for family in manifest.get("rows", ()):
        last = found[family["table"][-1]["symbol"]]
        kept[family["symbol"]] = replace(last, symbol=family["symbol"], entries=(family["name"],), upto=family["upto"])
    return kept


def _scheduled(folder: Path, files: Collection[str], entries: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
    present = [name for name in (DATABASE, WITH_INTRINSICS) if f"{name}/{WORKLOADS}" in files]
    if WITH_INTRINSICS in present:
        register_intrinsics(folder / WITH_INTRINSICS)
    databases = [JSONDatabase(work_dir=str(folder / name)) for name in present]
    found: dict[str, Kernel] = {}
    for record in (record for database in databases for record in database.get_all_tuning_records()):
        # The database holds a function twice, with attributes of Relax and without.
        func = record.workload.mod["main"]
        name = symbol(module_digest(canonical_module(func)))
        if name in entries:
            found[name] = Kernel(name, tuple(entries[name]), func, record.trace)
    return found


def _traceless(folder: Path, manifest: Mapping[str, Any], entries: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for name, path in {entry["symbol"]: entry["traceless"] for entry in manifest["entries"] if entry["traceless"]}.items():
        held = json.loads((folder / path).read_bytes())
        func, implementation = (load(held[part])["main"] for part in ("workload", "function"))
        found[name] = Kernel(
            symbol=name,
            entries=tuple(entries[name]),
            func=func,
            trace=None,
            traceless=implementation,
            arch=_wgmma_arch(manifest) if is_tirx(implementation) else "",
            calls_library=calls_vendor_library(implementation),
        )
    return found
