"""Owns the test of how times of single calls become shares of kernels."""

from __future__ import annotations

from kerneldecl.deploy.bench import shares


def test_a_call_in_which_the_machine_was_busy_does_not_count() -> None:
    samples = [{"gemm": 3e-6, "norm": 1e-6, "vm.builtin.reshape": 1.0}, {"gemm": 3e-6, "norm": 8e-3}, {"gemm": 3e-6, "norm": 1e-6}]
    rows = shares(samples, {"gemm": 6, "norm": 3, "vm.builtin.reshape": 3})
    assert [(row["name"], row["calls"], round(row["share"], 6)) for row in rows] == [("gemm", 2, 0.75), ("norm", 1, 0.25)]
