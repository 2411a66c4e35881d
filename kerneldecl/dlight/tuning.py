"""Owns the workspace in which a module's functions are tuned: each an entry of rule `tensor_ir`, planned and built as any other.

Knows nothing of modules, nor of how the artifact is used.

The folder's workloads.toml grows with every module that is tuned there; entries with a record in the store are not tuned again.
The artifact's database is copied to the folder itself, where TVM's own passes look for it.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from kerneldecl.api import run_build
from kerneldecl.artifact.manifest import DATABASE, TUNING_RECORDS, WITH_INTRINSICS, WORKLOADS
from kerneldecl.compiler.canonical import canonical_module, module_digest
from kerneldecl.declare.document import parse
from kerneldecl.dlight import device
from kerneldecl.errors import DeclarationError
from kerneldecl.extract.extract import FUNCTIONS
from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.hardware.propose_arch import proposed_arch
from kerneldecl.model import Arch
from kerneldecl.planning.workspace import FILE, open_workspace
from kerneldecl.plugins.find import plugin_file
from kerneldecl.stages.session import Options
from kerneldecl.store.files import write_whole
from kerneldecl.toolchain import nvcc
from kerneldecl.toolchain.versions import PACKAGES, installed
from kerneldecl.tuning.events import Event, Finished, Note

_LOG = logging.getLogger(__name__)
_HEADER = "# Written by kerneldecl.dlight.ApplyFastTuning, which adds what it is given next; changes are lost."
_Table = dict[str, Any]


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning a module's functions."""

    artifact: Path | None
    """The artifact's folder; None where no function has a kernel."""
    failures: Mapping[str, str]
    """Reasons why functions have no kernel, by their files in the workspace."""
    unmeasured: str
    """The reason why winners are the policy's choice instead of the fastest; empty where they were measured."""


def tune_functions(root: Path, arch: Arch, functions: Mapping[str, Any], settings: Mapping[str, Any], jobs: int | None) -> Tuned:
    """Tune functions, given by the names of their entries, in a folder; `settings` are keys of the entries. Return the artifact.

    Raise ValueError where the folder holds something else, or kernels for another arch.
    """
    tables = _tables(root, arch)
    _write_arch(root, arch)
    for name, func in functions.items():
        path = file_of(func)
        if not (root / path).exists():
            write_whole(root / path, tvm.ir.save_json(canonical_module(func)["main"]), durable=False)
        table = tables.setdefault(
            path, {"name": _free(name, {known["name"] for known in tables.values()}), "rule": "tensor_ir", "file": path}
        )
        table.update(settings)
    unmeasured = why_not_measured_here(arch)
    write_whole(root / FILE, _text(arch, tables), durable=False)
    try:
        workspace = open_workspace(root)
    except DeclarationError as error:
        raise ValueError(f"{root} is damaged: {error}; give it another folder, or remove it") from None
    done = run_build(workspace, (), Options(require_measured=not unmeasured, jobs=jobs), _log)
    artifact = done.artifacts.get(arch.name)
    if artifact:
        for name in (WORKLOADS, TUNING_RECORDS):
            shutil.copy(artifact / DATABASE / name, root / name)
        shutil.rmtree(root / WITH_INTRINSICS, ignore_errors=True)
        if (artifact / WITH_INTRINSICS).is_dir():
            shutil.copytree(artifact / WITH_INTRINSICS, root / WITH_INTRINSICS)
    failures = {path: done.failures[entry] for path, table in tables.items() if (entry := f"{table['name']}@{arch.name}") in done.failures}
    if failures:
        # The next module's functions are tuned beside those that have kernels; what failed is tried again where it comes again.
        write_whole(root / FILE, _text(arch, {path: table for path, table in tables.items() if path not in failures}), durable=False)
    return Tuned(artifact, failures, unmeasured)


def file_of(func: Any) -> str:
    """Return a function's path in the workspace: its name is the digest of the computation."""
    return f"{FUNCTIONS}/{module_digest(canonical_module(func))[:20]}.json"


def _tables(root: Path, arch: Arch) -> dict[str, _Table]:
    """Return the entries of functions that were tuned here before, by file."""
    try:
        content = (root / FILE).read_bytes()
    except FileNotFoundError:
        if found := [name for name in (WORKLOADS, TUNING_RECORDS) if (root / name).exists()]:
            raise ValueError(f"{root / found[0]} is a database that ApplyFastTuning did not write; give it another folder") from None
        return {}
    if not content.startswith(_HEADER.encode()):
        raise ValueError(f"{root / FILE} is a workspace that ApplyFastTuning did not write; give it another folder")
    try:
        document = parse(content)
    except DeclarationError as error:
        raise ValueError(f"{error}; remove the file, and what the store knows is found again") from None
    if document["target"] != {arch.name: {"arch": arch.name}}:
        # A lookup in TVM's database does not compare the target of a schedule.
        raise ValueError(f"{root} has what was tuned for {', '.join(document['target'])}; give {arch.name} a folder of its own")
    return {table["file"]: table for table in document.get("workload", [])}


def _write_arch(root: Path, arch: Arch) -> None:
    """Write the file of a declared arch, which may be the user's own or describe this machine's GPU."""
    if arch.is_detected:
        return
    try:
        content = plugin_file("archs", Path.cwd(), arch.name).read_text(encoding="utf-8")
    except DeclarationError:
        gpu = device.gpu_here()
        assert gpu is not None, "an arch without a file was read from it"
        content = proposed_arch(gpu)
    path = root / "archs" / f"{arch.name}.toml"
    if not path.exists() or path.read_text(encoding="utf-8") != content:
        write_whole(path, content, durable=False)


def _text(arch: Arch, tables: Mapping[str, _Table]) -> str:
    tools = {tool: installed(package) for tool, package in PACKAGES.items()}
    if arch.gpu:
        tools["cuda"] = nvcc.compiler_for(str(dict(arch.tvm_target)["arch"])).version
    heads = ["edition = 1", '[artifact]\nname = "tuned"\nversion = "0.1.0"', _table("[toolchain]", tools)]
    heads.append(_table(f"[target.{arch.name}]", {"arch": arch.name}))
    entries = (_table("[[workload]]", table) for table in tables.values())
    return "\n\n".join([_HEADER, *heads, *entries]) + "\n"


def _table(header: str, values: Mapping[str, Any]) -> str:
    # JSON of strings, numbers and lists is TOML as well.
    return "\n".join([header, *(f"{key} = {json.dumps(value)}" for key, value in values.items())])


def _free(name: str, taken: Collection[str]) -> str:
    """Return the name as a valid name of an entry, with a number where it is taken."""
    base = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_") or "function"
    number, free = 1, base
    while free in taken:
        number += 1
        free = f"{base}_{number}"
    return free


def _log(event: Event) -> None:
    if isinstance(event, Finished):
        _LOG.log(logging.WARNING if event.has_failed else logging.INFO, "%s: %s", event.entry, event.text)
    elif isinstance(event, Note):
        _LOG.info("%s", event.text)
