"""Owns the comparison of products and convolutions on wgmma with cuBLAS and cuDNN, and the figures asked of them.

Knows nothing of how kernels are tuned, timed or contested: hopper/workloads.toml declares what is compared, and the rest is
as in gpu.py.
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

from _gpu_contest import Row
from _gpu_figures import each, figure, torch_ratio
from _gpu_run import Asked
from _table import show, write_json
from gpu import cases_of, compared

ROOT = Path(__file__).parent / "hopper"
SLOWEST, MEAN = min, geometric_mean
FIGURES = (
    ("cube", "float16 and bfloat16, 4096 to 16384 cubed: slowest, of cuBLAS", 1.02, SLOWEST),
    ("small_cube", "float16, 1024 cubed: slowest, of cuBLAS", 1.00, SLOWEST),
    ("float8", "float8: geometric mean, of cuBLAS", 1.10, MEAN),
    ("int8", "int8: geometric mean, of cuBLAS", 1.40, MEAN),
    ("tfloat32", "float32 read as TF32: geometric mean, of cuBLAS", 1.00, MEAN),
    ("float16_sums", "sums in float16: geometric mean, of cuBLAS", 1.00, MEAN),
    ("narrow", "512-64-512 to 512-16-512: slowest, of cuBLAS", 1.20, SLOWEST),
    ("decode", "1 to 128 rows: geometric mean, of cuBLAS", 1.12, MEAN),
    ("decode", "1 to 128 rows: slowest, of cuBLAS", 0.97, SLOWEST),
    ("prefill", "300 to 1500 rows: geometric mean, of cuBLAS", 1.00, MEAN),
    ("ragged", "ragged sizes: geometric mean, of cuBLAS", 1.00, MEAN),
    ("conv2d", "convolutions: geometric mean, of cuDNN", 1.05, MEAN),
    ("conv2d", "convolutions: slowest, of cuDNN", 0.85, SLOWEST),
    ("fused", "with bias and gelu: slowest, of torch's best", 1.00, SLOWEST),
)
"""Tag, what it is, what is asked of the vendor's time by ours, and over which entries."""


def judged(rows: Sequence[Row], add_bytes_per_s: float, tuning_secs: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the figures whose entries are among the rows."""
    del add_bytes_per_s
    tags = {tag for row in rows for tag in row["tags"]}
    found = [
        figure(what, asked, combine, each([row for row in rows if tag in row["tags"]], torch_ratio))
        for tag, what, asked, combine in FIGURES
        if tag in tags
    ]
    if {"plain", "fused"} <= tags:
        found.append(figure("with bias and gelu: slowest, of the plain product's time", 1.03, max, fused_shares(rows), is_most=True))
    shares = each(rows, lambda row: row["first_share"])
    found.append(figure("first by the model, of the best: geometric mean", 0.95, geometric_mean, shares))
    secs = {row["entry"]: tuning_secs.get(row["entry"]) for row in rows}
    return [*found, figure("tuning an operator, median s", 6.0, median, secs, is_most=True)]


def fused_shares(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return the time of each product with an epilogue by that of the plain product of its size."""
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
    parser = argparse.ArgumentParser(description="Time products and convolutions on a GPU with wgmma beside cuBLAS and cuDNN.")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="entries, rule:NAME or tag:NAME, as in `kerneldecl build`")
    parser.add_argument("--top-k", type=int, default=20, help="candidates that are built and timed for each entry")
    parser.add_argument("--rounds", type=int, default=15, help="replays of each contender in the final contest")
    parser.add_argument("--rivals", default="torch", help="who else takes part: torch, triton, dlight")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile at once")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, help="where the workspace lies, to be used again; default: a temporary folder")
    given = parser.parse_args()
    if find_spec("torch") is None:
        sys.exit("this needs torch, built for CUDA: it is compared with, and its graphs and events take the times")
    cases = cases_of(ROOT, "h200", given.only or ["*"])
    asked = Asked(given.top_k, given.rounds, given.jobs, frozenset(given.rivals.split(",")))
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="hopper-") as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = compared(cases, asked, Path(folder), judged)
    show("Figures", found["figures"])
    write_json(given.json, found.pop("machine"), {"asked": vars(asked) | {"rivals": given.rivals}, **found})


if __name__ == "__main__":
    main()
