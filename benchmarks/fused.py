"""Owns the comparison of fused rows and gated GEMMs with torch, eager and compiled, on a GPU, and its goals.

Knows nothing of how kernels are tuned, timed or compared: fused/workloads.toml declares the entries, and the rest is as in gpu.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_support.gpu.comparison import Row
from bench_support.gpu.figures import LARGE_BYTES, bandwidth, each, figure, isolated_figures, torch_ratio
from gpu import compare_workspace

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


if __name__ == "__main__":
    compare_workspace(ROOT, "Time fused rows and gated GEMMs on this GPU beside torch, eager and compiled.", judged, 12)
