"""Owns the files that a new workspace starts with.

Knows nothing of what is done with them.
"""

from __future__ import annotations

from pathlib import Path

from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.store.files import ignore_results, write_whole

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


def initialise(root: Path) -> list[Path]:
    """Write workloads.toml and .gitignore; return the files written or extended. Refuse where there is a workloads.toml."""
    workloads = root / "workloads.toml"
    if workloads.exists():
        raise DeclarationError([Problem("workloads.toml", "there is one already", "remove it first or use another folder (-C)")])
    write_whole(workloads, WORKLOADS, durable=False)
    return [workloads, *ignore_results(root)]
