"""The verdict on two tunings of one entry, the rows that several runs of a benchmark make, and the time that processes wait."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bench_support.kept_rows import FILE, KeptRows
from bench_support.recording import Span, busy_secs, gaps
from bench_support.repeats import changes, quantiles, summary, verdict

from kerneldecl.model import Candidate, Trial


def trial(name: str, secs: float, code: str = "", count: int = 30) -> Trial:
    return Trial(Candidate.of(name, {}), 1.0, code_digest=code or name, samples=(secs,) * count)


def test_the_same_candidate_or_the_same_code_is_the_same_winner() -> None:
    first = [trial("a", 1.0), trial("b", 2.0)]
    assert verdict(first, first[:1])["verdict"] == "same"
    assert verdict(first, [trial("c", 1.1, code="a")])["verdict"] == "same"


def test_a_tie_is_declared_where_one_race_saw_no_difference() -> None:
    close, clear = [trial("a", 1.0), trial("b", 1.004)], [trial("b", 1.0), trial("a", 1.2)]
    assert verdict(close, clear)["verdict"] == "tied"
    assert verdict(clear, close)["verdict"] == "tied"


def test_other_winners_are_as_far_apart_as_the_race_saw_them_that_saw_less() -> None:
    found = verdict([trial("a", 1.0), trial("b", 1.5)], [trial("b", 1.0), trial("a", 1.2)])
    assert found["verdict"] == "other"
    assert found["apart"] == pytest.approx(0.2)
    assert verdict([trial("a", 1.0)], [trial("b", 1.0)])["apart"] is None, "neither race has timed both"


def test_who_dropped_out_before_the_final_is_a_tie_if_it_was_as_fast() -> None:
    clear = [trial("b", 1.0), trial("a", 1.2)]
    assert verdict([trial("a", 1.0), trial("b", 1.001, count=3)], clear)["verdict"] == "tied"
    assert verdict([trial("a", 1.0), trial("b", 1.05, count=3)], clear)["verdict"] == "other"


def test_the_ratio_of_two_candidates_near_the_fastest_is_compared() -> None:
    first = [trial("a", 1.0), trial("b", 1.02), trial("slow", 1.2), trial("few", 1.01, count=3)]
    second = [trial("a", 2.0), trial("b", 2.0), trial("slow", 2.0), trial("few", 2.0)]
    assert changes(first, second) == [pytest.approx(math.log(1.02))]
    assert changes(first, []) == []
    assert quantiles([0.1, 0.3, 0.2])["50%"] == 0.2
    assert quantiles([]) == {"pairs": 0}


def test_a_summary_counts_ties_as_repeated() -> None:
    rows = [{"verdict": "same", "apart": 0.0}] * 2 + [{"verdict": "tied", "apart": 0.0}, {"verdict": "other", "apart": 0.03}]
    found = summary(rows)
    assert (found["same"], found["tied"], found["other"], found["same or tied"], found["most apart"]) == (2, 1, 1, 0.75, 0.03)
    assert summary([])["same or tied"] == 0.0


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    first = KeptRows(tmp_path, {"seed": 1, "rules": ["a"]})
    first.add_tuning(2, 3.0)
    first.add({"entry": "x", "ratio": 1.0})
    again = KeptRows(tmp_path, {"seed": 1, "rules": ["a"]})
    assert again.rows == {"x": {"entry": "x", "ratio": 1.0}}
    assert again.tunings == [(2, 3.0)]
    again.add({"entry": "y"})
    assert list(KeptRows(tmp_path, {"seed": 1, "rules": ["a"]}).rows) == ["x", "y"]
    assert (tmp_path / FILE).read_text(encoding="utf-8").count("asked") == 1


def test_rows_of_another_seed_are_not_mixed_in(tmp_path: Path) -> None:
    KeptRows(tmp_path, {"seed": 1})
    with pytest.raises(ValueError, match="take another folder"):
        KeptRows(tmp_path, {"seed": 2})


def test_a_process_waits_between_its_requests() -> None:
    spans = [Span(0, "cuda", "verify", 1.0, 2.0), Span(0, "cuda", "sample cool", 2.5, 3.0), Span(0, "cuda", "sample cool", 4.0, 5.0)]
    assert gaps(spans) == {"sample cool": 1.5}
    assert busy_secs(spans, 1.5, 4.5) == 0.5 + 0.5 + 0.5
