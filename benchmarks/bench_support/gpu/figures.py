"""Owns the goals for kernels on a GPU: how each figure follows from the rows of a run, and whether its goal is reached.

Knows nothing of how rows are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

Row = Mapping[str, Any]

LARGE_BYTES = 64e6
"""Least traffic from which a memory-bound kernel is judged by its bandwidth."""
CONVOLUTIONS = {"conv2d_7x7[dtype=float16]": 1.5, "conv2d_7x7[dtype=float32]": 1.3, "conv2d_1x1": 0.95}
"""Goal of each convolution, as a share of cuDNN's speed."""
MEMORY_BOUND = frozenset({"elementwise", "reduce", "softmax", "layer_norm", "rms_norm", "gemv", "gemv_i4"})


def figures(rows: Sequence[Row], add_bytes_per_s: float) -> list[dict[str, Any]]:
    """Return a row for each figure: name, goal, what is reached, by how many entries of how many, the worst entry."""
    published = [row for row in rows if "published" in row["tags"]]
    vendor = [row for row in published if not _is_large_float16_gemm(row)]
    memory = [row for row in rows if row["rule"] in MEMORY_BOUND]
    large, small = ([row for row in memory if (row["least_bytes"] > LARGE_BYTES) == is_large] for is_large in (True, False))
    float32 = [row for row in published if row["rule"] == "matmul" and row["attrs"]["dtype"] == "float32"]
    float16 = [row for row in rows if _is_judged_float16_gemm(row)]

    def bandwidth_share(row: Row) -> float:
        return bandwidth(row) / add_bytes_per_s

    return [
        figure("table, of default dlight: slowest", 1.0, min, each(published, dlight_ratio)),
        figure("table, of default dlight: geometric mean", 4.0, geometric_mean, each(published, dlight_ratio)),
        figure("table, steady, of default dlight: geometric mean", 4.1, geometric_mean, each(published, _steady_dlight_ratio)),
        figure("memory bound, over 64 MB: of torch's addition", 0.92, min, each(large, bandwidth_share)),
        figure("memory bound, up to 64 MB: of torch", 1.0, min, each(small, torch_ratio)),
        figure("table without large float16 GEMM, of the vendor: geometric mean", 1.2, geometric_mean, each(vendor, torch_ratio)),
        figure("float32 GEMM: of cuBLAS", 0.9, min, each(float32, torch_ratio)),
        figure("float16 GEMM, 4096 and 8192: of cuBLAS", 0.55, min, each(float16, torch_ratio)),
        *(
            figure(f"{name}: of cuDNN", asked, min, each([row for row in published if row["entry"] == name], torch_ratio))
            for name, asked in CONVOLUTIONS.items()
        ),
        *isolated_figures(rows),
        figure("first by the model, of the best: geometric mean", 0.85, geometric_mean, each(rows, lambda row: row["first_share"])),
    ]


def search_space_figure(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how near the best of few candidates comes to the best of many, from rows with the former as first choice."""
    shares = each(rows, lambda row: row["first_share"])
    return figure("best of few candidates, of the best of many: geometric mean", 0.97, geometric_mean, shares)


def tuning_figures(tuning_secs: Mapping[str, float], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the figures of tuning time, whose goals are upper limits."""
    secs = {row["entry"]: tuning_secs.get(row["entry"]) for row in rows if "published" in row["tags"]}
    return [
        figure("tuning an operator, s at most", 6.0, max, secs, is_most=True),
        figure("tuning the table, s at most", 90.0, sum, secs, is_most=True),
    ]


def bandwidth(row: Row) -> float:
    """Return least bytes a second."""
    return float(row["least_bytes"] / row["secs"])


def dlight_ratio(row: Row) -> float | None:
    found = row["rivals"].get("dlight")
    return found and found["ratio"]


def _steady_dlight_ratio(row: Row) -> float | None:
    return protocol_ratio(row, "steady", "dlight")


def torch_ratio(row: Row) -> float | None:
    """Return the ratio to torch's fastest baseline."""
    return min((rival["ratio"] for name, rival in row["rivals"].items() if name.startswith("torch ")), default=None)


def protocol_ratio(row: Row, protocol: str, rival: str = "torch") -> float | None:
    """Return the ratio to the fastest baseline of torch, or of another rival, under a protocol; None where that was not measured."""
    secs = row.get("protocols", {}).get(protocol, {})
    return min((theirs / secs["best"] for name, theirs in secs.items() if name.startswith(rival)), default=None)


def isolated_figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the figures of kernels that are called one at a time, each behind a small kernel of torch's."""
    ratios = each(rows, lambda row: protocol_ratio(row, "isolated"))
    gemms = each([row for row in rows if row["rule"] == "matmul"], lambda row: protocol_ratio(row, "isolated"))
    return [
        figure("isolated, of torch's best: geometric mean", 1.35, geometric_mean, ratios),
        figure("isolated, GEMMs, of torch's best: geometric mean", 1.25, geometric_mean, gemms),
        figure("isolated, GEMMs: share under 0.97 of torch's best", 0.1, _share_of_slow, gemms, is_most=True),
    ]


def _share_of_slow(ratios: Collection[float]) -> float:
    return sum(ratio < 0.97 for ratio in ratios) / len(ratios)


def _is_large_float16_gemm(row: Row) -> bool:
    attrs = row["attrs"]
    return row["rule"] == "matmul" and attrs["dtype"] == "float16" and min(attrs["m"], attrs["n"], attrs["k"]) >= 4096


def _is_judged_float16_gemm(row: Row) -> bool:
    return _is_large_float16_gemm(row) and row["attrs"]["m"] in {4096, 8192} and row["attrs"]["accum_dtype"] != "float16"


def each(rows: Iterable[Row], value: Callable[[Row], float | None]) -> dict[str, float | None]:
    """Return the value of each row by entry; None where no candidate passed, or where nothing is comparable."""
    return {row["entry"]: value(row) if "secs" in row else None for row in rows}


def figure(
    what: str, asked: float, combine: Callable[[Any], float], values: Mapping[str, float | None], *, is_most: bool = False
) -> dict[str, Any]:
    """Return the row of a figure; `is_most` where less is better."""
    known = {entry: value for entry, value in values.items() if value is not None}
    entries = f"{len(known)} of {len(values)}"
    if not known:
        return {"figure": what, "asked": asked, "reached": None, "verdict": "not measured", "entries": entries}
    reached = combine(known.values())
    is_reached = reached <= asked if is_most else reached >= asked
    worst = max(known, key=known.__getitem__) if is_most else min(known, key=known.__getitem__)
    verdict = "reached" if is_reached else "MISSED"
    return {
        "figure": what, "asked": asked, "reached": round(reached, 3), "verdict": verdict, "entries": entries,
        "worst": f"{worst} {known[worst]:.3g}",
    }  # fmt: skip
