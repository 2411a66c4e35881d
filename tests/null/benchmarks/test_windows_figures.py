"""The figures that benchmarks/windows.py prints: which entries bandwidth judges, which torch does, in both protocols."""

from __future__ import annotations

from typing import Any

import windows

from kerneldecl.declare.document import declare


def row(entry: str, rule: str, least_bytes: float, secs: float, torch_secs: float) -> dict[str, Any]:
    times = {"best": secs, "torch one": torch_secs, "torch other": 2 * torch_secs}
    slow = {name: 2 * each if name == "best" else each for name, each in times.items()}
    return {"entry": entry, "rule": rule, "least_bytes": least_bytes, "secs": secs, "protocols": {"steady": times, "isolated": slow}}


def test_large_kernels_are_judged_by_bandwidth_and_small_ones_by_torchs_best() -> None:
    rows = [row("large", "cumsum", 88e6, 25e-6, 1.0), row("small", "rotary", 1e6, 1e-6, 1.5e-6), row("other", "sort", 1e9, 1.0, 0.1)]
    found = {figure["figure"]: figure for figure in windows.judged(rows, 4e12, {})}
    assert [(figure["reached"], figure["worst"]) for figure in found.values()] == [
        (0.8, "large 0.8"),
        (1.5, "small 1.5"),
        (0.4, "large 0.4"),
        (0.75, "small 0.75"),
    ]


def test_a_kernel_that_was_not_timed_is_counted_and_not_judged() -> None:
    [large, *_] = windows.judged([{"entry": "a", "rule": "cumsum", "least_bytes": 1e9, "failure": "wrong"}], 4e12, {})
    assert (large["verdict"], large["entries"]) == ("not measured", "0 of 1")


def test_every_entry_is_for_the_gpu_whose_peak_judges_it() -> None:
    declared = declare(windows.ROOT)
    assert {workload.target for workload in declared.workloads} == {"h200"}
    assert {workload.rule for workload in declared.workloads} >= windows.BANDWIDTH_BOUND
