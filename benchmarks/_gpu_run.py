"""Owns the course of a comparison on a GPU: workloads tuned, rivals built in many processes, one contest after the other.

Knows nothing of how results are shown or judged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from _gpu_contest import GpuProcess, Job, Row, described, held
from _gpu_kernels import Built, Case, build_candidate, build_default, label_of
from _gpu_tuning import Tuned, tuned


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    top_k: int
    rounds: int
    jobs: int
    rivals: frozenset[str]


def tuned_rows(cases: Sequence[Case], asked: Asked, folder: Path) -> tuple[list[Row], dict[str, Tuned], dict[str, float]]:
    """Return each case's row as tuning leaves it, what tuning found, by name, and how long it took."""
    found, tuning_secs = tuned(cases, asked.top_k, asked.jobs, folder)
    rows = [{**described(case), "candidates": list(found[case.name].candidates) if case.name in found else []} for case in cases]
    return rows, found, tuning_secs


def contests(cases: Sequence[Case], found: dict[str, Tuned], asked: Asked, gpu: GpuProcess, folder: Path) -> Iterator[tuple[str, Row]]:
    """Yield what each case's contest adds to its row, by the case's name, as it comes about."""
    spawn = get_context("spawn")
    # Reading TVM's own tensor intrinsics takes a process half a minute: a few do it, while all but products have their contests.
    with ProcessPoolExecutor(asked.jobs, spawn) as pool, ProcessPoolExecutor(max(1, asked.jobs // 4), spawn) as few:
        waiting: dict[str, tuple[Future[Built] | None, Future[Built] | None]] = {}
        for case in cases:
            one = found.get(case.name)
            is_other = one is not None and label_of(one.first) != one.best.label
            first = pool.submit(build_candidate, case, one.first, str(folder)) if one and is_other else None
            default = few.submit(build_default, case, str(folder)) if one and "dlight" in asked.rivals else None
            waiting[case.name] = first, default
        for case in sorted(cases, key=lambda case: case.workload.rule == "matmul"):
            if case.name not in found:
                yield case.name, {"failure": "tuning failed"}
                continue
            start = time.perf_counter()
            best = found[case.name].best
            first, default = waiting[case.name]
            job = Job(case, best, first.result() if first else best, default.result() if default else None, asked.rivals, asked.rounds)
            waited_secs = time.perf_counter() - start
            row = {"label": best.label, "best": _rank(found[case.name]), **_contest(job, gpu)}
            yield case.name, {**row, "phase_secs": {"compilers": waited_secs, **row.get("phase_secs", {})}}


def _rank(one: Tuned) -> int:
    """Return where the model had put the best candidate, counted from 0."""
    return [candidate["label"] for candidate in one.candidates].index(one.best.label)


def _contest(job: Job, gpu: GpuProcess) -> Row:
    """Hold the contest; without the default schedule if that broke the process."""
    try:
        return gpu.ask(held, job)
    except RuntimeError as error:
        if job.default is None:
            return {"failure": str(error)}
        row = _contest(replace(job, default=None), gpu)
        return {**row, "rival_failures": {**row.get("rival_failures", {}), "dlight": str(error)}}
