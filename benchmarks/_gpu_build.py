"""Owns tuning for a comparison by kerneldecl itself: a workspace of its own is built, its records are read.

Knows nothing of what the tuned kernels are compared with.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _gpu_tuning import Built, Case, build_candidate, label_of, proposals

from kerneldecl import flow
from kerneldecl.api import run_build
from kerneldecl.cudalink import link_cuda_library
from kerneldecl.declare import declare
from kerneldecl.model import Candidate, Measurement, Proposal
from kerneldecl.planning import EntryPlan
from kerneldecl.progress import Event, Finished
from kerneldecl.tune import measurement_from_json
from kerneldecl.workspace import FILE, Workspace, workspace_of


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

    contestants: Sequence[Built]
    """The model's first choice and the winner; one kernel where they are the same, none where all candidates failed."""
    candidates: Sequence[Mapping[str, Any]]
    """What became of each, in order of prediction."""


def tuned(cases: Sequence[Case], top_k: int, jobs: int, folder: Path) -> tuple[dict[str, Tuned], dict[str, float]]:
    """Return what `kerneldecl build` makes of the workloads, by name, and how many seconds each one's tuning took."""
    workspace = _workspace(cases, top_k, folder)
    stopwatch = Stopwatch()
    done = run_build(workspace, (), flow.Options(keep_going=True), jobs, stopwatch)
    for entry, reason in done.failures.items():
        print(f"{entry}: {reason}", file=sys.stderr)
    by_name = {entry.workload.name: entry for entry in done.plan.entries}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        proposed = pool.map(proposals, cases, [top_k] * len(cases))
        waiting = {
            case.name: _waiting(case, by_name[case.name], list(found), pool.submit, workspace)
            for case, found in zip(cases, proposed, strict=True)
        }
        return {name: each() for name, each in waiting.items()}, stopwatch.secs


def _workspace(cases: Sequence[Case], top_k: int, folder: Path) -> Workspace:
    """Return a workspace in an empty folder that holds the cases alone, each with so many candidates."""
    root = cases[0].root
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


def _waiting(case: Case, entry: EntryPlan, proposed: Sequence[Proposal], submit: Any, workspace: Workspace) -> Callable[[], Tuned]:
    """Have the model's first choice built, and return what waits for it."""
    if entry.tuned is None:
        return lambda: Tuned((), ())
    result = entry.tuned.result
    measured = {found.candidate: found for found in map(measurement_from_json, result["measurements"])}
    order = [proposal.candidate for proposal in proposed if proposal.candidate in measured]
    winner = Candidate.from_json(result["winner"])
    best = _winner(case, winner, result, workspace)
    candidates = [_candidate(measured[each]) for each in order]
    first = next((candidate for candidate in order if measured[candidate].samples), winner)
    if first == winner:
        return lambda: Tuned((best,), candidates)
    built = submit(build_candidate, case, Proposal(first, measured[first].predicted_secs), str(workspace.root))
    return lambda: Tuned((built.result(), best), candidates)


def _winner(case: Case, candidate: Candidate, result: Mapping[str, Any], workspace: Workspace) -> Built:
    content = workspace.store.read_blob(result["code"])
    assert isinstance(content, bytes), "the build has just put it there"
    path = workspace.root / f"{result['code']}.o"
    path.write_bytes(content)
    link_cuda_library(path.with_suffix(".so"), [path])
    return Built(
        label_of(candidate), str(path.with_suffix(".so")), result["symbol"], note=f"tuned by {result['policy']} for {case.arch.name}"
    )


def _candidate(found: Measurement) -> dict[str, Any]:
    note = f"{found.registers} registers, {found.spill_bytes} bytes spilled"
    described = {"label": label_of(found.candidate), "predicted_secs": found.predicted_secs, "note": note, "error": found.error}
    return {**described, **({"secs": found.run_secs} if found.samples else {"failure": found.failure})}
