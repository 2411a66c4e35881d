"""Owns the tests of what benchmarks/tuners.py makes of searches: shares of the best known, and costs beside each other.

Knows nothing of how policies search.
"""

from __future__ import annotations

import pytest
from tuners import COLD, OURS, TVM, WARM, YARDSTICK, beside_exhaustive, beside_learned, beside_metaschedule

from kerneldecl.compare.searches import Searched


def searched(entry: str, policy: str, run_us: float, search_secs: float = 1.0, first_us: float = 0.0) -> Searched:
    return Searched(entry, policy, run_secs=run_us * 1e-6, search_secs=search_secs, first_secs=first_us * 1e-6)


def test_what_auto_reaches_is_a_share_of_the_best_of_all_also_where_that_is_its_own() -> None:
    rows = beside_exhaustive(
        [
            searched("a", OURS, 10, first_us=20),
            searched("a", YARDSTICK, 9),
            searched("b", OURS, 5, first_us=5),
            searched("b", YARDSTICK, 50),
        ]
    )
    mean, least, first = (row["reached"] for row in rows)
    assert (mean, least) == (pytest.approx(0.9**0.5, abs=1e-3), 0.9)
    assert first == pytest.approx((9 / 20) ** 0.5, abs=1e-3)
    assert rows[1]["worst"] == "a 0.9"


def test_metaschedule_is_beaten_if_it_is_slower_and_costs_twenty_times_as_much() -> None:
    found = [searched("a", OURS, 10, 1.0), searched("a", TVM, 12, 40.0), searched("b", OURS, 10, 1.0), searched("b", TVM, 11, 10.0)]
    times, costs = beside_metaschedule(found)
    assert (times["reached"], times["verdict"]) == (1.1, "reached")
    assert (costs["reached"], costs["verdict"], costs["worst"]) == (0.1, "MISSED", "b 0.1")


def test_an_entry_without_a_right_candidate_is_not_measured() -> None:
    found = [searched("a", OURS, 10), Searched("a", TVM, failure="none of 3 candidates passed")]
    assert [row["verdict"] for row in beside_metaschedule(found)] == ["not measured", "not measured"]


def test_learned_searches_are_judged_by_the_best_of_all() -> None:
    found = [searched("a", OURS, 10), searched("a", YARDSTICK, 8), searched("a", COLD, 8), searched("a", WARM, 16)]
    assert [(row["reached"], row["verdict"]) for row in beside_learned(found)] == [(1.0, "reached"), (0.5, "MISSED")]
