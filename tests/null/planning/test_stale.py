"""Owns the tests of how `check --stale` tells of what is to be measured, in text and JSON.

Knows nothing of how that is found.
"""

from __future__ import annotations

from kerneldecl.cli.stale import Stale, stale_json, stale_text

FOUND = (
    Stale("gemm@gpu", "tune", "these candidates were never measured", "Test GPU", 20, is_accepted=False),
    Stale("relu@gpu", "lower", "no record of relu yet", "Test GPU", 2, is_accepted=True),
    Stale("a@host", "tune", "not verified by today's reference", "CPU", 5, is_accepted=False),
)


def test_what_is_stale_is_told_by_entry_and_in_minutes_of_each_device() -> None:
    json = stale_json(FOUND)
    assert json["schema"] == 1
    assert [each["entry"] for each in json["stale"]] == ["gemm@gpu", "relu@gpu", "a@host"]
    assert json["devices"] == {"Test GPU": {"candidates": 22, "minutes": 0.04}, "CPU": {"candidates": 5, "minutes": 0.01}}
    assert stale_text(json).splitlines() == [
        "tune     gemm@gpu  these candidates were never measured",
        "lower    relu@gpu  no record of relu yet",
        "tune     a@host    not verified by today's reference",
        "Test GPU would have to measure 22 candidates: 0.04 minutes",
    ]


def test_nothing_stale_is_one_line() -> None:
    assert stale_text(stale_json(())) == "nothing has to be tuned"
