"""Owns the files that a new workspace starts with.

Knows nothing of what is done with them.
"""

from __future__ import annotations

from pathlib import Path

from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.store.files import write_whole

WORKLOADS = """\
# What to build: operators, shapes, dtypes and targets. `kerneldecl schema` prints a JSON Schema for editors.
edition = 1

[artifact]
name = "my-kernels"
version = "0.1.0"

[target.host]
arch = "host"                     # this machine's CPU

[defaults]
targets = ["host"]
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

IGNORED = """\
# kerneldecl: artifacts, and of the store all but the records of declared archs
/dist/
*.part
/cache/*
!/cache/record/
"""


def initialise(root: Path) -> list[Path]:
    """Write workloads.toml, and what git is to ignore; return the files written or added to. Refuse where there is one."""
    workloads = root / "workloads.toml"
    if workloads.exists():
        raise DeclarationError([Problem("workloads.toml", 0, "", "there is one already", "remove it first or use another folder (-C)")])
    write_whole(workloads, WORKLOADS, durable=False)
    return [workloads, *ignore_results(root)]


def ignore_results(root: Path) -> list[Path]:
    """Have git ignore what a build writes and anyone can make again; return the file if it was written or added to."""
    ignore = root / ".gitignore"
    before = ignore.read_text(encoding="utf-8") if ignore.exists() else ""
    if IGNORED in before:
        return []
    write_whole(ignore.resolve(), f"{before}{IGNORED}", durable=False)
    return [ignore]
