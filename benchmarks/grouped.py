"""Owns the comparison of grouped GEMMs with torch's, and its goal.

Knows nothing of how kernels are built or timed: grouped/workloads.toml declares the entries, a policy proposes candidates, each is verified
against torch in float64, and all contenders are timed, interleaved.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from attention import LIMIT_SECS, built, candidate_of, judged_first, raced, say, table_row
from bench_support.gpu.comparison import Row, described, gpu_described
from bench_support.gpu.figures import each, figure
from bench_support.gpu.kernels import proposals
from bench_support.own_process import OwnProcess
from bench_support.table import machine, show, show_machine, write_json
from gpu import clocks, entries_of

ROOT = Path(__file__).parent / "grouped"
POLICY = "wgmma_matmul_grouped"
GOAL = 1.5
"""Time of torch._grouped_mm by ours, asked of entries tagged `goal`."""


def judged(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the figures whose entries are among the rows."""
    goal = [row for row in rows if "goal" in row["tags"] and "torch _grouped_mm" in row.get("ratios", {})]
    asked = figure("of torch._grouped_mm", GOAL, min, each(goal, lambda row: row["ratios"]["torch _grouped_mm"]))
    return ([asked] if goal else []) + judged_first(rows, sampled=False)


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description="Time grouped GEMMs of a GPU with wgmma beside torch._grouped_mm.")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="entries, or tag:NAME, as in `kerneldecl build`")
    parser.add_argument("--top-k", type=int, default=12, help="candidates that are built and timed for each entry")
    parser.add_argument("--also", action="append", default=[], metavar="PARAMS", help="one more candidate: name=value …")
    parser.add_argument("--rounds", type=int, default=11, help="replays of each contender")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further entry after so many seconds")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile at once")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if find_spec("torch") is None:
        sys.exit("this needs torch, built for CUDA: it is a rival, and its graphs and events are used for timing")
    start, rows = time.perf_counter(), []
    entries = entries_of(ROOT, "h200", given.only or ["*"])
    gpu = OwnProcess()
    about: Row = machine() | gpu.ask(gpu_described)
    show_machine(about)
    print(f"{about['gpu']}, torch {about['torch']}; {clocks()}", flush=True)
    also = [candidate_of(POLICY, text) for text in given.also]
    with tempfile.TemporaryDirectory(prefix="grouped-") as folder, ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        asked = [pool.submit(proposals, entry, POLICY, given.top_k) for entry in entries]
        chosen = [dict.fromkeys([*one.result(), *also]) for one in asked]
        waiting = [[pool.submit(built, entry, one, folder) for one in many] for entry, many in zip(entries, chosen, strict=True)]
        for entry, kernels in zip(entries, waiting, strict=True):
            if time.perf_counter() - start > given.seconds:
                print(f"{entry.name}: not run, the time is over", flush=True)
                continue
            row = described(entry)
            try:
                row |= gpu.ask(raced, entry, [kernel.result() for kernel in kernels], given.rounds, limit_secs=LIMIT_SECS)
            except RuntimeError as error:
                row |= {"failure": str(error)}
            rows.append(row)
            say(row, time.perf_counter() - start)
        pool.shutdown(cancel_futures=True)
    gpu.close()
    print(f"all in {time.perf_counter() - start:.0f} s; {clocks()}")
    show("Grouped GEMM (_grouped_mm: its time by ours; first: the model's first choice, as a share of the best)", [*map(table_row, rows)])
    figures = judged(rows)
    show("Figures", figures)
    write_json(given.json, about, {"figures": figures, "entries": rows})


if __name__ == "__main__":
    main()
