"""Owns the comparison of GEMM and convolutions on wgmma with cuBLAS and cuDNN, and its goals.

Knows nothing of how kernels are tuned, timed or compared: hopper/workloads.toml declares the entries, and the rest is as
in gpu.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from bench_support.gpu.comparison import Row
from bench_support.gpu.figures import each, figure, isolated_figures, torch_ratio
from gpu import compare_workspace

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


if __name__ == "__main__":
    compare_workspace(ROOT, "Time GEMM and convolutions on a GPU with wgmma beside cuBLAS and cuDNN.", judged, 20)
