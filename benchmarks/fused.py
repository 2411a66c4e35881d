"""Owns the comparison of fused rows and gated GEMMs with torch, eager and compiled, on a GPU, and its goals.

Knows nothing of how kernels are tuned, timed or compared: fused/workloads.toml declares the entries, and the rest is as in gpu.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench_support.gpu.comparison import Row
from bench_support.gpu.figures import LARGE_BYTES, bandwidth, each, figure, isolated_figures, torch_ratio
from bench_support.gpu.run import Settings
from bench_support.table import show, write_json
from gpu import compared, entries_of

ROOT = Path(__file__).parent / "fused"
GATED = "matmul_gated"


def judged(rows: Sequence[Row], add_bytes_per_s: float, tuning_secs: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the figures whose entries are among the rows."""
    del tuning_secs
    large, small = (
        [row for row in rows if row["rule"] != GATED and (row["least_bytes"] > LARGE_BYTES) == is_it] for is_it in (True, False)
    )
    gated = [row for row in rows if row["rule"] == GATED and row["attrs"]["m"] >= 512]
    return [
        figure("over 64 MB: of torch's addition", 0.93, min, each(large, lambda row: bandwidth(row) / add_bytes_per_s)),
        figure("up to 64 MB: of torch's best", 1.2, min, each(small, torch_ratio)),
        figure("SwiGLU GEMM, 512 rows or more: of GEMMs and one more kernel", 1.15, min, each(gated, torch_ratio)),
        *isolated_figures(rows),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time fused rows and gated GEMMs on this GPU beside torch, eager and compiled.")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="entries, rule:NAME or tag:NAME, as in `kerneldecl build`")
    parser.add_argument("--top-k", type=int, default=12, help="candidates that are built and timed for each entry")
    parser.add_argument("--rounds", type=int, default=15, help="replays of each contender in the final comparison")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile at once")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, help="folder of the workspace, which a later run reuses; default: a temporary folder")
    given = parser.parse_args()
    if find_spec("torch") is None:
        sys.exit("this needs torch, built for CUDA: it is a rival, and its graphs and events are used for timing")
    entries = entries_of(ROOT, "h200", given.only or ["*"])
    settings = Settings(given.top_k, given.rounds, given.jobs, frozenset({"torch"}))
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="fused-") as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = compared(entries, settings, Path(folder), judged)
    show("Figures", found["figures"])
    write_json(given.json, found.pop("machine"), {"asked": vars(settings) | {"rivals": "torch"}, **found})


if __name__ == "__main__":
    main()
