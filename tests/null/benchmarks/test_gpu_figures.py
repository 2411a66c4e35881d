"""The figures that benchmarks/gpu.py prints: their entries, how these are combined, when a goal is reached."""

from __future__ import annotations

from typing import Any

import hopper
import pytest
import quantized
from bench_support.gpu.figures import figures, search_space_figure, tuning_figures

from kerneldecl.declare.document import declare


def row(entry: str, rule: str, attrs: dict[str, Any] | None = None, *, secs: float = 1e-3, **others: Any) -> dict[str, Any]:
    """Return a row of a run: by default of a published entry that moves 100 MB, as fast as torch and thrice as fast as dlight."""
    rivals = {"torch one": {"ratio": others.pop("torch", 1.0)}, "dlight": {"ratio": others.pop("dlight", 3.0)}}
    known = {"tags": ("published",), "least_bytes": 100e6, "first_share": 1.0, "rivals": rivals}
    return {"entry": entry, "rule": rule, "attrs": attrs or {}, "secs": secs, **known, **others}


def gemm(entry: str, dtype: str, size: int, **others: Any) -> dict[str, Any]:
    return row(entry, "matmul", {"dtype": dtype, "accum_dtype": "", "m": size, "n": size, "k": size}, **others)


def found(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    [figure] = [figure for figure in figures(rows, add_bytes_per_s=200e9) if name in figure["figure"]]
    return figure


def test_one_entry_slower_than_the_default_misses_the_goal_whatever_the_mean() -> None:
    rows = [row("a", "softmax", dlight=0.9), row("b", "softmax", dlight=40.0)]
    assert found(rows, "dlight: slowest")["verdict"] == "MISSED"
    assert found(rows, "dlight: slowest")["worst"] == "a 0.9"
    mean = found(rows, "table, of default dlight: geometric mean")
    assert (mean["reached"], mean["verdict"]) == (6.0, "reached")


def test_the_table_has_the_published_entries() -> None:
    assert found([row("a", "softmax", dlight=0.5, tags=())], "dlight: slowest")["verdict"] == "not measured"


def test_the_steady_figure_of_the_default_schedules_is_of_each_by_itself() -> None:
    steady = {"steady": {"best": 1.0, "dlight": 4.0, "torch one": 0.5}, "cool": {"best": 1.0, "dlight": 9.0}}
    figure = found([row("a", "softmax", protocols=steady), row("b", "softmax")], "steady, of default dlight")
    assert (figure["reached"], figure["entries"]) == (4.0, "1 of 2")


def test_large_kernels_are_judged_by_bandwidth_and_small_ones_by_torch() -> None:
    rows = [row("large", "gemv", torch=0.5), row("small", "gemv", torch=0.5, least_bytes=64e6)]
    assert found(rows, "over 64 MB")["worst"] == "large 0.5"  # 100 MB in 1 ms, of 200 GB/s
    assert found(rows, "up to 64 MB")["worst"] == "small 0.5"
    assert found(rows, "up to 64 MB")["entries"] == "1 of 1"


def test_torch_counts_with_its_fastest_baseline() -> None:
    rivals = {"torch slow": {"ratio": 3.0}, "torch fast": {"ratio": 1.5}, "triton": {"ratio": 0.1}}
    assert found([row("a", "conv2d", rivals=rivals)], "of the vendor")["reached"] == 1.5


def test_the_isolated_figures_are_by_torchs_fastest_and_count_slow_gemms() -> None:
    def behind(entry: str, ours: float, *theirs: float) -> dict[str, Any]:
        secs = {"best": ours, **{f"torch {at}": secs for at, secs in enumerate(theirs)}}
        return gemm(entry, "float16", 1024, protocols={"isolated": secs})

    rows = [
        behind("slow", 2.0, 1.0, 4.0),
        behind("fast", 1.0, 2.0),
        row("norm", "rms_norm", protocols={"isolated": {"best": 1.0, "torch": 8.0}}),
    ]
    assert found(rows, "isolated, of torch's best")["reached"] == 2.0
    assert found(rows, "isolated, GEMMs, of torch's best")["reached"] == 1.0
    share = found(rows, "isolated, GEMMs: share")
    assert (share["reached"], share["verdict"]) == (0.5, "MISSED")
    assert found([row("a", "softmax")], "isolated, of torch's best")["verdict"] == "not measured"


def test_large_float16_gemm_has_its_own_figure() -> None:
    rows = [
        gemm("half", "float16", 8192, torch=0.6),
        gemm("larger", "float16", 16384, torch=0.1),
        gemm("single", "float32", 8192, torch=1.0),
        gemm("few", "float16", 1024, torch=1.44),
    ]
    assert found(rows, "of the vendor")["reached"] == 1.2
    assert found(rows, "float32 GEMM")["reached"] == 1.0
    assert found(rows, "float16 GEMM, 4096")["worst"] == "half 0.6"


def test_an_entry_without_a_kernel_is_not_counted_but_shown() -> None:
    failed = {
        "entry": "b",
        "rule": "softmax",
        "attrs": {},
        "tags": ("published",),
        "least_bytes": 1e9,
        "candidates": [],
        "failure": "wrong",
    }
    figure = found([row("a", "softmax"), failed], "dlight: slowest")
    assert (figure["reached"], figure["entries"]) == (3.0, "1 of 2")


@pytest.mark.parametrize(("secs", "verdict"), [({"a": 6.0, "b": 5.0}, "reached"), ({"a": 6.1, "b": 5.0}, "MISSED")])
def test_tuning_time_is_a_limit(secs: dict[str, float], verdict: str) -> None:
    slowest, total = tuning_figures({**secs, "other": 99.0}, [row("a", "gemv"), row("b", "gemv"), row("other", "gemv", tags=())])
    assert slowest["verdict"] == verdict
    assert total["reached"] == pytest.approx(sum(secs.values()))


def test_few_candidates_are_compared_with_many() -> None:
    assert search_space_figure([row("a", "gemv", first_share=0.5), row("b", "gemv", first_share=2.0)])["reached"] == 1.0


def ranked(tag: str, entry: str, torch: float | None, **others: Any) -> dict[str, Any]:
    rivals = {} if torch is None else {"rivals": {"torch way": {"ratio": torch}}}
    attrs = {"m": 8, "n": 8, "k": 8, "layout": "nt", "dtype": "float16"}
    return {**row(entry, "matmul", attrs, tags=(tag,), **others), **rivals}


def on_hopper(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    [figure] = [figure for figure in hopper.judged(rows, 1.0, {row["entry"]: 2.0 for row in rows}) if name in figure["figure"]]
    return figure


def test_a_figure_on_hopper_is_judged_by_its_entries_alone() -> None:
    rows = [ranked("cube", "a", 1.05), ranked("cube", "b", 1.01), ranked("int8", "c", 1.5)]
    assert on_hopper(rows, "16384 cubed") | {"asked": 0} == {
        "figure": "float16 and bfloat16, 4096 to 16384 cubed: slowest, of cuBLAS",
        "asked": 0, "reached": 1.01, "verdict": "MISSED", "entries": "2 of 2", "worst": "b 1.01",
    }  # fmt: skip
    assert on_hopper(rows, "int8")["verdict"] == "reached"
    assert not [figure for figure in hopper.judged(rows, 1.0, {}) if "ragged" in figure["figure"]], "nothing of it was run"


def test_an_epilogue_is_judged_by_the_plain_gemm_of_its_size() -> None:
    plain, fused = ranked("plain", "p", 1.0, secs=1e-3), ranked("fused", "f", 1.2, secs=1.02e-3)
    assert on_hopper([plain, fused], "plain GEMM's time")["verdict"] == "reached"
    slow = on_hopper([plain, {**fused, "secs": 1.05e-3}], "plain GEMM's time")
    assert (slow["verdict"], slow["reached"]) == ("MISSED", 1.05)


def test_quantised_weights_are_judged_by_float16_of_the_same_rows() -> None:
    def entry(tag: str, m: int, secs: float) -> dict[str, Any]:
        by_protocol = {protocol: {"best": secs} for protocol in quantized.PROTOCOLS}
        return {"entry": f"{tag}[m={m}]", "tags": (tag,), "attrs": {"m": m, "n": 8, "k": 8}, "secs": secs, "protocols": by_protocol}

    rows = [entry("w4a16", 16, 1e-5), entry("float16", 16, 3.1e-5), entry("float16", 64, 1e-5), entry("w4a16", 64, 9e-6)]
    verdicts = {found["figure"]: found["verdict"] for found in quantized.judged(rows, 1.0, {})}
    assert verdicts == {
        f"W4A16, {m} rows, {protocol}: float16 / ours": verdict
        for m, verdict in ((16, "reached"), (64, "MISSED"))
        for protocol in ("steady", "isolated")
    }


def test_every_entry_on_hopper_has_a_figure() -> None:
    tags = {tag for tag, *_ in hopper.FIGURES} | {"plain"}
    assert {tag for workload in declare(hopper.ROOT).workloads for tag in workload.tags} == tags
