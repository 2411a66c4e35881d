"""Owns the comparison of GEMM and convolutions on wgmma with cuBLAS and cuDNN, and its goals.

Knows nothing of how kernels are tuned, timed or compared: hopper/workloads.toml declares the entries, and the rest is as
in gpu.py.
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
from statistics import geometric_mean, median
from typing import Any

from bench_support.gpu.comparison import Row
from bench_support.gpu.figures import each, figure, isolated_figures, torch_ratio
from bench_support.gpu.run import Settings
from bench_support.table import show, write_json
from gpu import compared, entries_of

ROOT = Path(__file__).parent / "hopper"
SLOWEST, MEAN = min, geometric_mean
FIGURES = (
    ("cube", "float16 and bfloat16, 4096 to 16384 cubed: slowest, of cuBLAS", 1.02, SLOWEST),
    ("small_cube", "float16, 1024 cubed: slowest, of cuBLAS", 1.00, SLOWEST),
    ("float8", "float8: geometric mean, of cuBLAS", 1.10, MEAN),
    ("int8", "int8: geometric mean, of cuBLAS", 1.40, MEAN),
    ("int8_layouts", "int8 with an operand that is not contiguous along k: geometric mean, of cuBLAS", 1.00, MEAN),
    ("float64", "float64: geometric mean, of cuBLAS", 1.00, MEAN),
    ("tfloat32", "TF32 inputs: geometric mean, of cuBLAS", 1.00, MEAN),
    ("float16_accum", "float16 accumulators: geometric mean, of cuBLAS", 1.00, MEAN),
    ("narrow", "512-64-512 to 512-16-512: slowest, of cuBLAS", 1.20, SLOWEST),
    ("decode", "1 to 128 rows: geometric mean, of cuBLAS", 1.12, MEAN),
    ("decode", "1 to 128 rows: slowest, of cuBLAS", 0.97, SLOWEST),
    ("prefill", "300 to 1500 rows: geometric mean, of cuBLAS", 1.00, MEAN),
    ("ragged", "ragged sizes: geometric mean, of cuBLAS", 1.00, MEAN),
    ("conv2d", "convolutions: geometric mean, of cuDNN", 1.05, MEAN),
    ("conv2d", "convolutions: slowest, of cuDNN", 0.85, SLOWEST),
    ("grouped", "convolutions in groups: geometric mean, of cuDNN", 1.00, MEAN),
    ("grouped", "convolutions in groups: slowest, of cuDNN", 1.00, SLOWEST),
    ("grouped_float32", "the same and depthwise, float32: slowest, of cuDNN", 1.00, SLOWEST),
    ("depthwise", "depthwise convolutions: slowest, of cuDNN", 1.00, SLOWEST),
    ("fused", "with bias and gelu: slowest, of torch's best", 1.00, SLOWEST),
)
"""Tag, name of the figure, goal for the vendor's time by ours, and how the entries are combined."""


def judged(rows: Sequence[Row], add_bytes_per_s: float, tuning_secs: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the figures whose entries are among the rows."""
    del add_bytes_per_s
    tags = {tag for row in rows for tag in row["tags"]}
    found = [
        figure(what, settings, combine, each([row for row in rows if tag in row["tags"]], torch_ratio))
        for tag, what, settings, combine in FIGURES
        if tag in tags
    ]
    if {"plain", "fused"} <= tags:
        found.append(figure("with bias and gelu: slowest, of the plain GEMM's time", 1.03, max, fused_shares(rows), is_most=True))
    found += isolated_figures(rows)
    shares = each(rows, lambda row: row["first_share"])
    found.append(figure("first by the model, of the best: geometric mean", 0.95, geometric_mean, shares))
    secs = {row["entry"]: tuning_secs.get(row["entry"]) for row in rows}
    return [*found, figure("tuning an operator, median s", 6.0, median, secs, is_most=True)]


def fused_shares(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return the time of each GEMM with an epilogue by that of the plain GEMM of its size."""
    plain = {_size(row): row.get("secs") for row in rows if "plain" in row["tags"]}
    shares: dict[str, float | None] = {}
    for row in rows:
        if "fused" in row["tags"]:
            beside = plain.get(_size(row))
            shares[row["entry"]] = row["secs"] / beside if beside and "secs" in row else None
    return shares


def _size(row: Row) -> tuple[Any, ...]:
    return tuple(row["attrs"][name] for name in ("m", "n", "k", "layout", "dtype"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time GEMM and convolutions on a GPU with wgmma beside cuBLAS and cuDNN.")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="entries, rule:NAME or tag:NAME, as in `kerneldecl build`")
    parser.add_argument("--top-k", type=int, default=20, help="candidates that are built and timed for each entry")
    parser.add_argument("--rounds", type=int, default=15, help="replays of each contender in the final comparison")
    parser.add_argument("--rivals", default="torch", help="what to compare with: torch, triton, dlight")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile at once")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, help="folder of the workspace, which a later run reuses; default: a temporary folder")
    given = parser.parse_args()
    if find_spec("torch") is None:
        sys.exit("this needs torch, built for CUDA: it is a rival, and its graphs and events are used for timing")
    entries = entries_of(ROOT, "h200", given.only or ["*"])
    settings = Settings(given.top_k, given.rounds, given.jobs, frozenset(given.rivals.split(",")))
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="hopper-") as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = compared(entries, settings, Path(folder), judged)
    show("Figures", found["figures"])
    write_json(given.json, found.pop("machine"), {"asked": vars(settings) | {"rivals": given.rivals}, **found})


if __name__ == "__main__":
    main()
