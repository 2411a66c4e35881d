"""Owns tuning for a comparison by kerneldecl itself: a workspace of its own is built, its records are read.

Knows nothing of what the tuned kernels are compared with.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _gpu_kernels import Built, Case, label_of, proposals

from kerneldecl import flow
from kerneldecl.api import run_build
from kerneldecl.declare.document import declare
from kerneldecl.model import Candidate, Trial
from kerneldecl.planning.workspace import FILE, Workspace, workspace_of
from kerneldecl.toolchain.cuda_objects import link_cuda_library
from kerneldecl.tuning.events import Event, Finished
from kerneldecl.tuning.search import measurement_from_json


@dataclass
class Stopwatch:
    """Hears a build's events and takes the time of each entry's tuning, from the end of the one before."""

    secs: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished):
            now = time.perf_counter()
            if event.kind == "tune":
                self.secs[event.entry.rpartition("@")[0]] = now - self.last
                print(f"tuned {event.entry} in {now - self.last:.1f} s: {event.text}", file=sys.stderr, flush=True)
            self.last = now


@dataclass(frozen=True)
class Tuned:
    """What tuning made of one workload."""

    best: Built
    winner: Candidate
    first: Candidate
    """The model's first choice among those that passed."""
    policy: str
    candidates: Sequence[Mapping[str, Any]]
    """What became of each: those of the winner's policy in order of prediction, then those of others, which failed."""


def tuned(cases: Sequence[Case], top_k: int, jobs: int, folder: Path) -> tuple[dict[str, Tuned], dict[str, float]]:
    """Return what `kerneldecl build` makes of the workloads, by name, and how many seconds each one's tuning took.

    Without those that failed.
    """
    workspace = _workspace(cases, top_k, folder)
    stopwatch = Stopwatch()
    done = run_build(workspace, (), flow.Options(require_measured=True), jobs, stopwatch)
    for entry, reason in done.failures.items():
        print(f"{entry}: {reason}", file=sys.stderr)
    results = {entry.workload.name: entry.tuned.result for entry in done.plan.entries if entry.tuned}
    known = [case for case in cases if case.name in results]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        orders = pool.map(proposals, known, [results[case.name]["policy"] for case in known], [top_k] * len(known))
        found = {case.name: _tuned(results[case.name], order, workspace) for case, order in zip(known, orders, strict=True)}
    return found, stopwatch.secs


def _workspace(cases: Sequence[Case], top_k: int, folder: Path) -> Workspace:
    """Return a workspace in a folder that holds the cases alone, each with so many candidates."""
    root = cases[0].root
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes((root / FILE).read_bytes())
    declaration = declare(root)
    targets = {case.workload.target for case in cases}
    chosen = replace(
        declaration,
        targets=tuple(target for target in declaration.targets if target[0] in targets),
        workloads=tuple(replace(case.workload, top_k=top_k) for case in cases),
        path=folder / FILE,
        digest="",  # it is not what the file says
    )
    return workspace_of(folder, chosen)


def _tuned(result: Mapping[str, Any], order: Sequence[Candidate], workspace: Workspace) -> Tuned:
    """Read a record; `order` is how its policy ranked the candidates."""
    winner = Candidate.from_json(result["winner"])
    measured = {found.candidate: found for found in map(measurement_from_json, result["measurements"])}
    ranked = [candidate for candidate in order if candidate in measured]
    others = [candidate for candidate in measured if candidate not in set(ranked)]
    content = workspace.store.read_blob(result["code"])
    assert isinstance(content, bytes), "the build has just put it there"
    path = workspace.root / f"{result['code']}.o"
    path.write_bytes(content)
    link_cuda_library(path.with_suffix(".so"), [path])
    best = Built(label_of(winner), str(path.with_suffix(".so")), result["symbol"])
    first = next(candidate for candidate in (*ranked, winner) if measured[candidate].samples)
    return Tuned(best, winner, first, result["policy"], [_outcome(measured[each]) for each in (*ranked, *others)])


def _outcome(found: Trial) -> dict[str, Any]:
    known = {"label": label_of(found.candidate), "predicted_secs": found.predicted_secs, "registers": found.registers}
    known |= {"smem_bytes": found.smem_bytes, "spill_bytes": found.spill_bytes, "error": found.error}
    return {**known, **({"secs": found.run_secs} if found.samples else {"failure": found.failure})}
