"""Owns the tests of what `show` tells of times: a column for each protocol, also of records that are older than protocols.

Knows nothing of TVM: workspaces are built with fakes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fakes import FakeRunner
from support.spaces import FAKES, Space

from kerneldecl.store.local import LocalStore, Record
from kerneldecl.store.record_text import record_bytes


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(tmp_path).write(FAKES)


def built(space: Space) -> None:
    assert space.command("build", runner=FakeRunner()).code == 0


def without_protocols(space: Space) -> None:
    """Rewrite all tune records as versions without protocols wrote them."""
    store = LocalStore(space.root / "cache")
    for path in space.records("tune"):
        record = store.read("tune", path.stem, is_local=False)
        assert isinstance(record, Record)
        result = json.loads(json.dumps(dict(record.result)))
        for trial in result["trials"]:
            trial.pop("timings", None)
        path.write_bytes(record_bytes("tune", record.manifest, result))


def test_times_under_every_protocol_have_a_column(space: Space) -> None:
    built(space)
    shown = space.command("show", "large").out
    head = next(line for line in shown.splitlines() if "predicted" in line)
    assert head.split()[:3] == ["steady", "isolated", "predicted"]
    found = json.loads(space.command("show", "large", "--json").out)
    assert (found["timing"], found["protocols"]) == ("steady", ["isolated"])
    winner, *others = found["candidates"]
    assert winner["timings"]["steady"] == winner["run_secs"]
    assert winner["timings"]["isolated"] == pytest.approx(4 * winner["run_secs"], rel=1e-3)
    assert all("isolated" not in other["timings"] for other in others), "they did not tie with the winner"
    assert "not timed" not in shown


def test_a_timing_that_is_declared_chooses_and_stands_first(space: Space) -> None:
    space.edit("workloads.toml", "[defaults]\n", '[defaults]\ntiming = "both"\n')
    built(space)
    head = next(line for line in space.command("show", "large").out.splitlines() if "predicted" in line)
    assert head.split()[:4] == ["both", "steady", "isolated", "predicted"]
    winner = json.loads(space.command("show", "large", "--json").out)["candidates"][0]
    assert winner["run_secs"] == pytest.approx(2 * winner["timings"]["steady"], rel=1e-3), "the geometric mean"


def test_an_older_record_is_read_and_told_to_lack_columns(space: Space) -> None:
    built(space)
    without_protocols(space)
    shown = space.command("show", "large").out
    head = next(line for line in shown.splitlines() if "predicted" in line)
    assert head.split()[:2] == ["steady", "predicted"]
    assert "the winner was not timed isolated: `kerneldecl build --retune 'large@box'` does that" in shown
    assert space.command("build", runner=FakeRunner()).code == 0, "nothing is measured again for that"


def test_timing_that_changes_nothing_re_keys_nothing(space: Space) -> None:
    built(space)
    space.edit("workloads.toml", "[defaults]\n", '[defaults]\ntiming = "steady"\n')
    runner = FakeRunner()
    assert space.command("build", runner=runner).code == 0
    assert not runner.counts["sample"]
    space.edit("workloads.toml", 'timing = "steady"', 'timing = "isolated"')
    assert "workloads.toml: timing steady -> isolated" in space.command("why", "large").out
    assert space.command("build", runner=runner).code == 0
    assert runner.counts["sample"]
