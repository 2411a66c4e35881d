"""Owns the comparison of quantised GEMMs on a GPU with float16 ones of the same sizes, in one run, and its goals.

Knows nothing of how kernels are tuned, timed or compared: quantized/workloads.toml declares the entries, and the rest is as
in gpu.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_support.gpu.comparison import Row
from bench_support.gpu.figures import bandwidth, each, figure
from gpu import compare_workspace

ROOT = Path(__file__).parent / "quantized"
W4A16 = {1: 3.2, 8: 3.2, 16: 3.0, 64: 2.2, 256: 1.2}
"""Goal for the time of float16 by that of 4-bit weights, by rows."""
FLOAT8 = {(4096, 7168, 16384): 1350.0, (4096, 4096, 7168): 1300.0}
"""Goal in TFLOP/s by size; smaller ones are judged by bandwidth."""
BANDWIDTH_SHARE = 0.9
"""Goal for the bytes a second of a GEMM of few rows, of torch's addition."""
PROTOCOLS = ("steady", "isolated")


def judged(rows: Sequence[Row], add_bytes_per_s: float, tuning_secs: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the figures whose entries are among the rows."""
    del tuning_secs
    found = []
    plain = {row["attrs"]["m"]: row for row in rows if "float16" in row["tags"] and "secs" in row}
    for row in rows:
        if "secs" not in row:
            continue
        m, size = row["attrs"]["m"], tuple(row["attrs"][name] for name in ("m", "n", "k"))
        if "w4a16" in row["tags"] and m in plain:
            for protocol in PROTOCOLS:
                ratio = _secs(plain[m], protocol) / _secs(row, protocol)
                found.append(figure(f"W4A16, {m} rows, {protocol}: float16 / ours", W4A16[m], min, {row["entry"]: ratio}))
        elif "float8" in row["tags"] and size in FLOAT8:
            rate = row["flops"] / _secs(row, "steady") / 1e12
            found.append(figure(f"float8 with blocks, {'x'.join(map(str, size))}: TFLOP/s", FLOAT8[size], min, {row["entry"]: rate}))
        elif "float8" in row["tags"]:
            share = each([row], lambda found: bandwidth(found) / add_bytes_per_s)
            found.append(figure(f"float8 with blocks, {m} rows: of torch's addition", BANDWIDTH_SHARE, min, share))
    return found


def _secs(row: Row, protocol: str) -> float:
    return float(row["protocols"][protocol]["best"])


if __name__ == "__main__":
    compare_workspace(ROOT, "Time quantised GEMMs on a GPU beside float16 ones of the same sizes.", judged, 12)
