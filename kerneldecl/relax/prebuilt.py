"""Owns what a compilation knows of an artifact: whether it may be used for a target, and each kernel's TensorIR, plain and scheduled.

Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tvm
from tvm.s_tir.meta_schedule.database import JSONDatabase

from kerneldecl.artifact.load import checked_artifact
from kerneldecl.compiler.canonical import canonical_module, load, module_digest, private_module, symbol
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.compiler.intrinsics import int4_dot, mma
from kerneldecl.compiler.passes import vector_math
from kerneldecl.compiler.prim_funcs import is_tirx
from kerneldecl.errors import ArtifactError
from kerneldecl.relax.difference import Shape, shape_of
from kerneldecl.toolchain.versions import PACKAGES, installed

_IDENTITY = {"llvm": ("kind", "mcpu", "mattr"), "cuda": ("kind", "arch")}
"""Of a target's attributes those that say which machines its code runs on."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of an artifact."""

    symbol: str
    entries: tuple[str, ...]
    func: Any
    """The computation as a PrimFunc, not scheduled."""
    trace: Any
    """Of its schedule; None where it is specialised."""
    specialised: Any = None
    """The PrimFunc that takes the computation's place; None where a trace leads there."""
    arch: str = ""
    """The one that a specialised function must be compiled for, if it must."""

    @cached_property
    def digest(self) -> str:
        """What it shares with the functions that it can stand for, and with kernels of another index width."""
        return match_digest(self.func)

    @cached_property
    def shape(self) -> Shape:
        """What a function that is not the kernel's is compared with."""
        return shape_of(self.func)

    @property
    def scheduled(self) -> Any:
        """The PrimFunc that is compiled: the specialised one, or the trace replayed."""
        if self.specialised is not None:
            return self.specialised.without_attr("global_symbol")
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
    """Return an artifact's kernels; raise ArtifactError where it is damaged, or was made for another target or by another TVM."""
    folder, manifest = checked_artifact(artifact)
    if objection := _objection(manifest, target):
        raise ArtifactError(f"{folder}: {objection}")
    register_intrinsics()
    return Prebuilt(folder, f"{manifest['name']} {manifest['version']}", _kernels(folder, manifest))


def register_intrinsics() -> None:
    """Have TVM know what schedules of kernels name: where it does not, it reads no database of a GPU's kernels."""
    vector_math.register()
    mma.register_all()
    int4_dot.register_all()


def _objection(manifest: Mapping[str, Any], target: tvm.target.Target) -> str:
    made_for, asked = manifest["arch"]["target"], {"kind": target.kind.name, **dict(target.attrs)}
    for name in _IDENTITY[made_for["kind"]]:
        if _value(asked, name) not in {_value(made_for, name), _wgmma_arch(manifest) if name == "arch" else ""}:
            return (
                f"the artifact is for {name} {_value(made_for, name) or 'none'}, this target has {_value(asked, name) or 'none'}; "
                f"compile for {dict(made_for)}, or build the artifact for this target"
            )
    made_by, here = manifest["toolchain"].get("tvm"), installed(PACKAGES["tvm"])
    return f"the artifact was made with TVM {made_by}, this is {here}; build it again" if made_by != here else ""


def _wgmma_arch(manifest: Mapping[str, Any]) -> str:
    """Return the other name that the GPU of an artifact has for compilers; empty where it has none."""
    return str(manifest["arch"].get("gpu", {}).get("wgmma_arch", ""))


def _value(attrs: Mapping[str, Any], name: str) -> str:
    value = attrs.get(name, "")
    return value if isinstance(value, str) else ",".join(sorted(map(str, value)))


def _kernels(folder: Path, manifest: Mapping[str, Any]) -> tuple[Kernel, ...]:
    entries: dict[str, list[str]] = {}
    for entry in manifest["entries"]:
        entries.setdefault(entry["symbol"], []).append(entry["name"])
    found = {**_scheduled(folder, entries), **_specialised(folder, manifest, entries)}
    if missing := sorted(entries.keys() - found.keys()):
        raise ArtifactError(f"{folder}: the database has no schedule of {', '.join(entries[missing[0]])}; build the artifact again")
    return tuple(found[name] for name in sorted(found))


def _scheduled(folder: Path, entries: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
    database = JSONDatabase(work_dir=str(folder / "database"))
    found: dict[str, Kernel] = {}
    for record in database.get_all_tuning_records():
        # The database holds a function twice, with attributes of Relax and without.
        func = record.workload.mod["main"]
        name = symbol(module_digest(canonical_module(func)))
        if name in entries:
            found[name] = Kernel(name, tuple(entries[name]), func, record.trace)
    return found


def _specialised(folder: Path, manifest: Mapping[str, Any], entries: Mapping[str, Sequence[str]]) -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for name, path in {entry["symbol"]: entry["specialised"] for entry in manifest["entries"] if entry["specialised"]}.items():
        held = json.loads((folder / path).read_bytes())
        func, made = (load(held[part])["main"] for part in ("workload", "function"))
        found[name] = Kernel(name, tuple(entries[name]), func, None, made, _wgmma_arch(manifest) if is_tirx(made) else "")
    return found
