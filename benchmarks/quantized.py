"""Owns the comparison of quantised GEMMs on a GPU with float16 ones of the same sizes, in one run, and its goals.

Knows nothing of how kernels are tuned, timed or compared: quantized/workloads.toml declares the entries, and the rest is as
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
from typing import Any

from bench_support.gpu.comparison import Row
from bench_support.gpu.figures import bandwidth, each, figure
from bench_support.gpu.run import Settings
from bench_support.table import show, write_json
from gpu import compared, entries_of

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


def main() -> None:
    parser = argparse.ArgumentParser(description="Time quantised GEMMs on a GPU beside float16 ones of the same sizes.")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="entries, rule:NAME or tag:NAME, as in `kerneldecl build`")
    parser.add_argument("--top-k", type=int, default=12, help="candidates that are built and timed for each entry")
    parser.add_argument("--rounds", type=int, default=15, help="replays of each contender in the final comparison")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile at once")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--folder", type=Path, help="folder of the workspace, which a later run reuses; default: a temporary folder")
    given = parser.parse_args()
    if find_spec("torch") is None:
        sys.exit("this needs torch, built for CUDA: its graphs and events are used for timing")
    entries = entries_of(ROOT, "h200", given.only or ["*"])
    settings = Settings(given.top_k, given.rounds, given.jobs, frozenset({"torch"}))
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory(prefix="quantized-") as folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = compared(entries, settings, Path(folder), judged)
    show("Figures", found["figures"])
    write_json(given.json, found.pop("machine"), {"asked": {"top_k": given.top_k, "rounds": given.rounds}, **found})


if __name__ == "__main__":
    main()
