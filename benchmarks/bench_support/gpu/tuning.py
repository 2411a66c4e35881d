"""Owns the tuning for a comparison: it builds a separate workspace with kerneldecl, and reads its records.

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

from bench_support.gpu.kernels import Built, Entry, label_of, proposals

from kerneldecl.api import run_build
from kerneldecl.declare.document import declare
from kerneldecl.model import Candidate, Trial
from kerneldecl.planning.workspace import FILE, Workspace, workspace_of
from kerneldecl.serial import trial_from_json
from kerneldecl.stages.session import Options
from kerneldecl.toolchain.cuda_objects import link_cuda_library
from kerneldecl.tuning.events import Event, Finished


@dataclass
class Stopwatch:
    """Receives a build's events and times each entry's tuning, from the end of the entry before."""

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
    """Result of tuning one workload."""

    best: Built
    winner: Candidate
    first: Candidate
    """The model's first choice among the candidates that passed."""
    policy: str
    candidates: Sequence[Mapping[str, Any]]
    """Result of each candidate: those of the winner's policy in order of prediction, then those of other policies, which failed."""


def tuned(entries: Sequence[Entry], top_k: int, jobs: int, folder: Path) -> tuple[dict[str, Tuned], dict[str, float]]:
    """Tune the workloads with `kerneldecl build`; return the results and the seconds of tuning, by name, without failures."""
    workspace = _workspace(entries, top_k, folder)
    stopwatch = Stopwatch()
    done = run_build(workspace, (), Options(require_measured=True, jobs=jobs), stopwatch)
    for entry, reason in done.failures.items():
        print(f"{entry}: {reason}", file=sys.stderr)
    results = {entry.workload.name: entry.tuned.json for entry in done.plan.entries if entry.tuned}
    known = [entry for entry in entries if entry.name in results]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        orders = pool.map(proposals, known, [results[entry.name]["policy"] for entry in known], [top_k] * len(known))
        found = {entry.name: _tuned(results[entry.name], order, workspace) for entry, order in zip(known, orders, strict=True)}
    return found, stopwatch.secs


def _workspace(entries: Sequence[Entry], top_k: int, folder: Path) -> Workspace:
    """Return a workspace in `folder` with these entries only, each with `top_k` candidates."""
    root = entries[0].root
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes((root / FILE).read_bytes())
    declaration = declare(root)
    targets = {entry.workload.target for entry in entries}
    chosen = replace(
        declaration,
        targets=tuple(target for target in declaration.targets if target[0] in targets),
        workloads=tuple(replace(entry.workload, top_k=top_k) for entry in entries),
        path=folder / FILE,
        digest="",  # the declaration differs from the file
    )
    return workspace_of(folder, chosen)


def _tuned(result: Mapping[str, Any], order: Sequence[Candidate], workspace: Workspace) -> Tuned:
    """Read a record; `order` has the candidates as its policy ranked them."""
    winner = Candidate.from_json(result["winner"])
    measured = {found.candidate: found for found in map(trial_from_json, result["trials"])}
    ranked = [candidate for candidate in order if candidate in measured]
    others = [candidate for candidate in measured if candidate not in set(ranked)]
    content = workspace.store.read_blob(result["object"])
    assert isinstance(content, bytes), "the build has just put it there"
    path = workspace.root / f"{result['object']}.o"
    path.write_bytes(content)
    link_cuda_library(path.with_suffix(".so"), [path])
    best = Built(label_of(winner), str(path.with_suffix(".so")), result["symbol"])
    first = next(candidate for candidate in (*ranked, winner) if measured[candidate].samples)
    candidates = [_outcome(measured[each]) for each in (*ranked, *others)]
    return Tuned(best=best, winner=winner, first=first, policy=result["policy"], candidates=candidates)


def _outcome(found: Trial) -> dict[str, Any]:
    known = {"label": label_of(found.candidate), "predicted_secs": found.predicted_secs, "registers": found.registers}
    known |= {"smem_bytes": found.smem_bytes, "spill_bytes": found.spill_bytes, "error": found.error}
    return {**known, **({"secs": found.run_secs} if found.samples else {"failure": found.failure})}
