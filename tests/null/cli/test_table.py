"""Owns the tests of tables and quantities as text.

Knows nothing of what commands print in them.
"""

from __future__ import annotations

import pytest

from kerneldecl.cli.report import _stacked
from kerneldecl.cli.table import folded, table
from kerneldecl.diagnostics.units import amount, counted, duration


@pytest.mark.parametrize(
    ("secs", "text"),
    [
        (0.0, "0 ns"),
        (3.2e-9, "3.20 ns"),
        (165.54e-6, "166 us"),
        (999.6e-6, "1.00 ms"),
        (37.22e-3, "37.2 ms"),
        (0.9994, "999 ms"),
        (12.0, "12.0 s"),
        (154.4, "154 s"),
        (86400.0, "86400 s"),
    ],
)
def test_seconds_have_three_figures_and_a_unit_that_fits(secs: float, text: str) -> None:
    assert duration(secs) == text


def test_amounts_have_a_prefix() -> None:
    assert [amount(count, "B") for count in (0, 7, 1024, 999_900, 3.2e9, 4.7e15)] == [
        "0 B",
        "7.00 B",
        "1.02 kB",
        "1.00 MB",
        "3.20 GB",
        "4700 TB",
    ]


def test_counts_have_their_noun() -> None:
    assert [counted(1, "entry", "entries"), counted(2, "entry", "entries"), counted(1, "action")] == ["1 entry", "2 entries", "1 action"]


def test_parameters_in_which_candidates_of_one_template_differ_are_columns() -> None:
    found = folded(["gemm(a=1 b=2 c=3)", "gemm(a=1 b=4 c=3)", "gemm(a=2 b=4 c=3)"])
    assert found.shared == ("all gemm c=3",)
    assert found.names == ("a", "b")
    assert found.rows == (("1", "2"), ("1", "4"), ("2", "4"))
    assert found.in_one_column.rows == (("a=1 b=2",), ("a=1 b=4",), ("a=2 b=4",))


def test_candidates_of_several_templates_lack_what_those_of_a_template_share() -> None:
    found = folded(["gemm(a=1 b=2 c=3)", "gemm(a=1 b=4 c=3)", "simt(a=1 d=2)", "given_0"])
    assert found.rows == (("gemm(b=2)",), ("gemm(b=4)",), ("simt(a=1 d=2)",), ("given_0",))
    assert found.shared == ("all gemm have a=1 c=3",)


@pytest.mark.parametrize("candidates", [["gemm(a=1 b=2)"], ["given_0", "given_1"], ["simt()", "simt()"], []])
def test_other_candidates_stay_whole(candidates: list[str]) -> None:
    assert folded(candidates).rows == tuple((each,) for each in candidates)
    assert folded(candidates).shared == ()


def test_a_table_fits_its_window_by_wrapping_the_last_column() -> None:
    rows = [("projection", "37.2 ms", "gemm(block_m=64 block_n=128 stages=3)"), ("b", "1.00 us", "simt")]
    assert table(("entry", "time", "winner"), rows, 0) == [
        "entry          time  winner",
        "projection  37.2 ms  gemm(block_m=64 block_n=128 stages=3)",
        "b           1.00 us  simt",
    ]
    narrow = table((), rows, 46)
    assert narrow == [
        "projection  37.2 ms  gemm(block_m=64",
        "                     block_n=128 stages=3)",
        "b           1.00 us  simt",
    ]
    assert max(map(len, narrow)) <= 46


def test_names_of_a_plan_that_leave_no_room_are_folded_to_the_window() -> None:
    entry = "projection_of_a_model[m=16of4096,n=28672,k=4096,dtype=float16,layout=nt,epilogue=bias]@h200"
    lines = _stacked(("lower (propose, tune, build)", entry, "no record of it yet"), 80)
    assert lines == [
        "projection_of_a_model[m=16of4096,n=28672,k=4096,dtype=float16,layout=nt,",
        "  epilogue=bias]@h200: lower (propose, tune, build)",
        "  no record of it yet",
    ]
    assert all(len(line) <= 40 for line in _stacked(("lower (propose, tune, build, rows)", entry, "no record of it yet"), 40))
