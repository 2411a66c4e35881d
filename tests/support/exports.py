"""Owns exports of the repository's H200 entries from their committed records, made in this process.

Knows nothing of what is tested.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kerneldecl.compiler import actions
from kerneldecl.export.actions import export
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.workspace import open_workspace
from kerneldecl.serial import to_json
from kerneldecl.stages.headers import about, figures
from kerneldecl.stages.session import make_plan
from kerneldecl.store.local import LocalStore, Record
from kerneldecl.store.results import TuneResult
from kerneldecl.tuning.task import spec_of
from support.repository import REPOSITORY

OF_EACH_KIND = (
    "elementwise_add@h200",
    "transpose@h200",
    "reduce_sum@h200",
    "softmax@h200",
    "layer_norm[shape=128x4096]@h200",
    "gemv[n=1024,k=1024]@h200",
    "gemv_i4@h200",
    "conv2d_1x1@h200",
    "conv2d_7x7[dtype=float16]@h200",
    "conv2d_7x7[dtype=float32]@h200",
    "matmul_float32[layout=nt,m=1024,n=1024,k=1024]@h200",
    "matmul_float16[layout=nt,m=1024,n=1024,k=1024]@h200",
    "matmul_float16[layout=nt,m=8192,n=8192,k=8192]@h200",
)
"""Entries of every template that has won one; the last has clusters, a workspace and a kernel in front."""


@functools.cache
def entries(target: str = "h200") -> dict[str, EntryPlan]:
    """Return the repository's entries for a target that have committed records, also those that today's references have not seen."""
    plan = make_plan(open_workspace(REPOSITORY))
    store = LocalStore(REPOSITORY / "cache")
    read = (store.read("tune", path.stem, is_local=False) for path in (REPOSITORY / "cache" / "record" / "tune").glob("*.json"))
    results = [TuneResult(record.key, record.result) for record in read if isinstance(record, Record)]
    recorded = {result.computation: result for result in results}
    found = (each for each in plan.entries if each.workload.target == target and each.lowered is not None)
    return {each.entry: with_record(each, recorded) for each in found if each.lowered.computation in recorded}


def with_record(entry: EntryPlan, recorded: Mapping[str, TuneResult]) -> EntryPlan:
    """Return an entry with the record of its computation, if it has none of its own."""
    if entry.tuned is not None or entry.lowered is None:
        return entry
    return dataclasses.replace(entry, tuned=recorded.get(entry.lowered.computation))


def spec(entry: EntryPlan) -> dict[str, Any]:
    assert entry.lowered is not None
    return spec_of(REPOSITORY, REPOSITORY / "cache", entry.workload, entry.lowered, {})


def scheduled(entry: EntryPlan) -> Any:
    """Return the scheduled module of an entry's winner."""
    assert entry.tuned is not None
    return actions.scheduled_winner(spec(entry), entry.tuned.winner, entry.arch)


def exported(entry: EntryPlan, form: str = "cuda", name: str = "exported") -> str:
    assert entry.lowered is not None
    assert entry.tuned is not None
    asked = {"format": form, "name": name, "about": about(entry), "figures": figures(entry), "signature": entry.lowered.signature}
    return export(spec(entry), entry.tuned.winner.to_json(), to_json(entry.arch), asked)["text"]


def header(entry: EntryPlan, folder: Path, name: str = "exported") -> Path:
    path = folder / f"{name}.cuh"
    path.write_text(exported(entry, "cuda", name), encoding="utf-8")
    return path


def instructions(sass: str) -> list[list[str]]:
    """Return the instructions of each kernel of a disassembled cubin: without addresses, labels' numbers or names."""
    kernels = re.split(r"^\s*\.section\s+\.text\.", sass, flags=re.MULTILINE)[1:]
    found = [re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", kernel) for kernel in kernels]
    return sorted([re.sub(r"\(\.L_x_\d+\)", "(label)", line) for line in lines] for lines in found)
