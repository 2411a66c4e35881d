"""Owns the steps of a comparison on a GPU: tuning, building rivals in many processes, comparing entry by entry.

Knows nothing of how results are printed or judged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from bench_support.gpu.comparison import Job, Row, compare, described
from bench_support.gpu.kernels import Built, Entry, build_candidate, build_default, label_of
from bench_support.gpu.tuning import Tuned, tuned
from bench_support.own_process import OwnProcess


@dataclass(frozen=True)
class Settings:
    """Options of the command line."""

    top_k: int
    rounds: int
    jobs: int
    rivals: frozenset[str]


def tuned_rows(entries: Sequence[Entry], settings: Settings, folder: Path) -> tuple[list[Row], dict[str, Tuned], dict[str, float]]:
    """Tune the entries; return each one's row, the results of tuning by name, and the seconds of tuning by name."""
    found, tuning_secs = tuned(entries, settings.top_k, settings.jobs, folder)
    rows = [{**described(entry), "candidates": list(found[entry.name].candidates) if entry.name in found else []} for entry in entries]
    return rows, found, tuning_secs


def comparisons(
    entries: Sequence[Entry], found: dict[str, Tuned], settings: Settings, gpu: OwnProcess, folder: Path
) -> Iterator[tuple[str, Row]]:
    """Compare entry by entry; yield an entry's name and the fields for its row."""
    spawn = get_context("spawn")
    # Reading TVM's tensor intrinsics takes a process half a minute: few processes do it, and GEMM is compared last.
    with ProcessPoolExecutor(settings.jobs, spawn) as pool, ProcessPoolExecutor(max(1, settings.jobs // 4), spawn) as few:
        waiting: dict[str, tuple[Future[Built] | None, Future[Built] | None]] = {}
        for entry in entries:
            one = found.get(entry.name)
            differs = one is not None and label_of(one.first) != one.best.label
            first = pool.submit(build_candidate, entry, one.first, str(folder)) if one and differs else None
            default = few.submit(build_default, entry, str(folder)) if one and "dlight" in settings.rivals else None
            waiting[entry.name] = first, default
        for entry in sorted(entries, key=lambda entry: entry.workload.rule == "matmul"):
            if entry.name not in found:
                yield entry.name, {"failure": "tuning failed"}
                continue
            start = time.perf_counter()
            best = found[entry.name].best
            first, default = waiting[entry.name]
            job = Job(
                entry=entry,
                best=best,
                first=first.result() if first else best,
                default=default.result() if default else None,
                rivals=settings.rivals,
                rounds=settings.rounds,
            )
            waited_secs = time.perf_counter() - start
            row = {"label": best.label, "best": _rank(found[entry.name]), **_compared(job, gpu)}
            yield entry.name, {**row, "phase_secs": {"compilers": waited_secs, **row.get("phase_secs", {})}}


def _rank(one: Tuned) -> int:
    """Return where the model had put the best candidate, counted from 0."""
    return [candidate["label"] for candidate in one.candidates].index(one.best.label)


def _compared(job: Job, gpu: OwnProcess) -> Row:
    """Compare; without the default schedule if that broke the process."""
    try:
        return gpu.ask(compare, job)
    except RuntimeError as error:
        if job.default is None:
            return {"failure": str(error)}
        row = _compared(replace(job, default=None), gpu)
        return {**row, "rival_failures": {**row.get("rival_failures", {}), "dlight": str(error)}}
