"""Owns the comparison of windows and places with torch on a GPU: pooling, lookups, arg-max, cumulative sums, rotary, and its goals.

Knows nothing of how kernels are tuned, timed or compared: windows/workloads.toml declares the entries, and the rest is as in gpu.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_support.gpu.comparison import Row
from bench_support.gpu.figures import LARGE_BYTES, each, figure, protocol_ratio
from gpu import compare_workspace

ROOT = Path(__file__).parent / "windows"
PEAK_BYTES_PER_S = 4.4e12
"""Bandwidth of an H200's DRAM that torch's addition reaches."""
BANDWIDTH_BOUND = frozenset({"adaptive_pool2d", "arg_reduce", "cumsum", "embedding", "pool2d", "rotary"})
PROTOCOLS = ("steady", "isolated")


def judged(rows: Sequence[Row], add_bytes_per_s: float, tuning_secs: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the figures whose entries are among the rows, one for each protocol."""
    del add_bytes_per_s, tuning_secs
    bound = [row for row in rows if row["rule"] in BANDWIDTH_BOUND]
    large, small = ([row for row in bound if (row["least_bytes"] >= LARGE_BYTES) == is_it] for is_it in (True, False))
    found = []
    for protocol in PROTOCOLS:
        shares = {row["entry"]: _share(row, protocol) for row in large}
        ratios = each(small, lambda row, protocol=protocol: protocol_ratio(row, protocol))  # type: ignore[misc]
        found.append(figure(f"64 MB and more, {protocol}: of {PEAK_BYTES_PER_S / 1e12} TB/s", 0.9, min, shares))
        found.append(figure(f"less than 64 MB, {protocol}: of torch's best", 1.2, min, ratios))
    return found


def _share(row: Row, protocol: str) -> float | None:
    """Return a kernel's least bytes a second as a share of the peak; None where none was timed."""
    return row["least_bytes"] / row["protocols"][protocol]["best"] / PEAK_BYTES_PER_S if "protocols" in row else None


if __name__ == "__main__":
    compare_workspace(ROOT, "Time windows and places on this GPU beside torch.", judged, 8)
