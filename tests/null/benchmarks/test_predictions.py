"""Owns the tests of what benchmarks/protocols.py makes of kernels' times: their sums, and which protocol comes nearest to a network.

Knows nothing of GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_support.models.predictions import predicted, ranked, recorded
from support.fakes import FakeRunner
from support.spaces import FAKES, Space

SECS = {"kd_a": {"cool": 1.0, "steady": 2.0, "isolated": 4.0}, "kd_b": {"cool": 10.0, "steady": 10.0}}


def test_each_kernel_counts_as_often_as_it_is_called_and_what_has_no_record_not_at_all() -> None:
    assert predicted(SECS, {"kd_a": 3, "kd_b": 1, "reshape": 7}) == {"cool": 13.0, "steady": 16.0}
    assert predicted(SECS, {"kd_a": 2}) == {"cool": 2.0, "steady": 4.0, "isolated": 8.0}
    assert predicted(SECS, {"reshape": 1}) == {}


def test_too_much_for_one_and_too_little_for_another_network_do_not_cancel() -> None:
    rows = [
        {"graph_secs": 1.0, "sums": {"cool": 0.5, "steady": 1.1, "isolated": 3.0}},
        {"graph_secs": 1.0, "sums": {"cool": 2.0, "steady": 1.2}},
    ]
    first, second = ranked(rows)
    assert (first["protocol"], second["protocol"]) == ("steady", "cool")
    assert second["off by"] == pytest.approx(2.0)
    assert second["sum / network"] == pytest.approx(1.0)
    assert ranked([]) == []


def test_times_come_from_the_records_of_the_artifacts_entries(tmp_path: Path) -> None:
    space = Space(tmp_path).write(FAKES)
    assert space.command("build", runner=FakeRunner()).code == 0
    found = recorded(space.root, space.artifact("box"))
    assert len(found) == 3
    for secs in found.values():
        assert secs["isolated"] == pytest.approx(4 * secs["steady"], rel=1e-3)
