"""Owns the course of a comparison on a GPU: kernels tuned and built in many processes, then one contest after the other.

Knows nothing of how results are shown or judged.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Self

from _gpu_build import tuned
from _gpu_contest import GpuProcess, Job, Row, described, held
from _gpu_tuning import Built, Case, build_candidate, build_default, import_torch_first, proposals

MAX_BREAKS = 3
"""Candidates of one entry that may break the GPU's process before the entry is given up."""


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    top_k: int
    rounds: int
    jobs: int
    rivals: frozenset[str]
    tuner: str
    """build: kerneldecl's own build; here: every candidate is verified and timed within the contest."""


class Pools:
    """Processes that compile: some as kerneldecl does, some as TVM does where it finds CUDA."""

    def __init__(self, jobs: int, folder: str) -> None:
        spawn = get_context("spawn")
        self._folder = folder
        self._plain = ProcessPoolExecutor(jobs, spawn)
        self._with_torch = ProcessPoolExecutor(max(1, jobs // 4), spawn, import_torch_first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self._plain, self._with_torch):
            pool.shutdown(cancel_futures=True)

    def default(self, case: Case) -> Future[Built]:
        return self._with_torch.submit(build_default, case, self._folder)

    def candidates(self, cases: Sequence[Case], top_k: int) -> list[list[Future[Built]]]:
        """Have all candidates of all cases built, in that order."""
        proposed = self._plain.map(proposals, cases, [top_k] * len(cases))
        return [
            [self._plain.submit(build_candidate, case, proposal, self._folder) for proposal in several]
            for case, several in zip(cases, proposed, strict=True)
        ]


@dataclass(frozen=True)
class Prepared:
    """One entry's kernels, some of which may still be built."""

    case: Case
    contestants: Callable[[], Sequence[Built]]
    default: Future[Built] | None
    candidates: Sequence[Row] | None = None
    """What became of each candidate, if tuning has found that out before the contest."""


def prepared(cases: Sequence[Case], asked: Asked, pools: Pools, folder: str) -> tuple[list[Prepared], dict[str, float]]:
    """Return the entries' kernels, and the seconds that each entry's tuning took where kerneldecl's own build did it."""
    if asked.tuner == "here":
        built = pools.candidates(cases, asked.top_k)
        contestants = [functools.partial(_results, futures) for futures in built]
        outcomes, tuning_secs = [None] * len(cases), {}
    else:
        found, tuning_secs = tuned(cases, asked.top_k, asked.jobs, Path(folder))
        contestants = [functools.partial(list, found[case.name].contestants) for case in cases]
        outcomes = [found[case.name].candidates for case in cases]
    defaults = [pools.default(case) if "dlight" in asked.rivals else None for case in cases]
    return [Prepared(*each) for each in zip(cases, contestants, defaults, outcomes, strict=True)], tuning_secs


def _results(futures: Sequence[Future[Built]]) -> list[Built]:
    return [future.result() for future in futures]


def contests(entries: Sequence[Prepared], asked: Asked, gpu: GpuProcess) -> Iterator[Row]:
    """Yield each entry's row as it comes about."""
    for each in entries:
        start = time.perf_counter()
        job = Job(each.case, each.contestants(), each.default.result() if each.default else None, asked.rivals, asked.rounds)
        waited_secs = time.perf_counter() - start
        try:
            row = _contest(job, gpu)
        except RuntimeError as error:
            row = {**described(job.case), "candidates": [], "failure": str(error)}
        row["phase_secs"] = {"waiting for compilers": waited_secs, **row.get("phase_secs", {})}
        yield row if each.candidates is None else _with_candidates(row, each.candidates)


def _with_candidates(row: Row, candidates: Sequence[Row]) -> Row:
    labels = [candidate["label"] for candidate in candidates]
    return {**row, "candidates": candidates, **({"best": labels.index(row["label"])} if "label" in row else {})}


def _contest(job: Job, gpu: GpuProcess) -> Row:
    for _ in range(MAX_BREAKS):
        row: Row = gpu.ask(held, job)
        if "broken" not in row:
            return row
        gpu.close()
        job = replace(job, flaws={**job.flaws, row["broken"]: "broke the GPU's process"})
    raise RuntimeError(f"{MAX_BREAKS} candidates broke the GPU's process")
