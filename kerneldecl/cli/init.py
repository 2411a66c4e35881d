"""Owns the files that a new workspace starts with.

Knows nothing of what is done with them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kerneldecl.diagnostics.messages import unknown
from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.plugins.find import HOST, plugin_names
from kerneldecl.store.files import ignore_results, write_whole

SCHEMA = "workloads.schema.json"
_HEAD = """\
#:schema ./workloads.schema.json
# What to build: operators, shapes, dtypes and targets. Editors that know the line above (Even Better TOML, Taplo) complete this file.
edition = 1

[artifact]
name = {name}
version = "0.1.0"

"""
_TARGET = """\
[target.{arch}]
arch = "{arch}"

"""
_ENTRIES = """\
[defaults]
targets = {targets}
policy = "auto"
top_k = 20                        # candidates that are built and timed for each workload

[[workload]]
name = "projection"
rule = "matmul"
m = [16, 512]                     # a list expands: one workload for each value
n = 512
k = 512
layout = "nt"
dtype = "float32"
epilogue = ["bias", "relu"]
"""


def initialise(root: Path, targets: Sequence[str] = (), *, name: str = "my-kernels", entries: bool = True) -> list[Path]:
    """Write workloads.toml, its schema and .gitignore; return the files written or extended.

    Without `entries` the file declares targets alone, for a model's entries to follow. Raise DeclarationError where there is a
    workloads.toml already, or a target is no arch.
    """
    workloads = root / "workloads.toml"
    if workloads.exists():
        raise DeclarationError([Problem("workloads.toml", "there is one already", "remove it first or use another folder (-C)")])
    archs = tuple(dict.fromkeys(targets)) or (HOST,)
    known = plugin_names("archs", root)
    if wrong := [Problem("workloads.toml", *unknown("arch", arch, known)) for arch in archs if arch not in known]:
        raise DeclarationError(wrong)
    text = _HEAD.format(name=json.dumps(name)) + "".join(_TARGET.format(arch=arch) for arch in archs)
    write_whole(workloads, text + (_ENTRIES.format(targets=json.dumps(list(archs))) if entries else ""), durable=False)
    return [workloads, write_schema(root), *ignore_results(root)]


def write_schema(root: Path) -> Path:
    """Write the JSON Schema of the workspace's workloads.toml beside it, and return the file."""
    from kerneldecl.declare.json_schema import json_schema

    file = root / SCHEMA
    write_whole(file, json.dumps(json_schema(root), indent=1) + "\n", durable=False)
    return file
