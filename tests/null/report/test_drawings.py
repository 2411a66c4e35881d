"""Owns the tests of the report's drawings: what stands where, what is left out, what text of others becomes.

Knows nothing of browsers, or of where the figures come from.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerneldecl.model import Candidate, Trial
from kerneldecl.planning.roofline import Roofline
from kerneldecl.report.data import Built, Busy, Entry, Revision, Tried
from kerneldecl.report.entry import detail, folded, strip
from kerneldecl.report.history import courses, history
from kerneldecl.report.models import best_of, models, predictions, summary
from kerneldecl.report.ratios import MOST, Ratio, ratios
from kerneldecl.report.roofline import has_place, roofline
from kerneldecl.report.scale import Linear, Log
from kerneldecl.report.searches import searched, searches
from kerneldecl.report.svg import spread
from kerneldecl.report.timeline import timeline
from kerneldecl.tuning.race import NOISE

BOUND = Roofline(flops=1e6, least_bytes=1e6, peak_flops_per_s=1e12, dram_bytes_per_s=1e11)
ENTRY = Entry(name="sum[n=8]@box", target="box", rule="sum", attrs="n=8", roofline=BOUND, dtype="float32", is_measured=True, run_secs=2e-5)


def entry(name: str = "sum[n=8]@box", secs: float = 2e-5, flops: float = 1e6, **more: object) -> Entry:
    bound = BOUND._replace(flops=flops)
    return replace(ENTRY, name=name, run_secs=secs, roofline=bound, **more)  # type: ignore[arg-type]


def trial(secs: float, predicted: float = 1e-5, *, size: int = 8, failure: str = "") -> Trial:
    return Trial(Candidate.of("tiles", {"size": size, "order": "nm"}), predicted, samples=() if failure else (secs,) * 3, failure=failure)


@given(st.floats(1e-9, 1e9), st.floats(1.01, 1e6))
def test_ticks_lie_on_their_axis(low: float, factor: float) -> None:
    for axis in (Log(low, low * factor, 0.0, 100.0), Linear(low, low * factor, 0.0, 100.0)):
        assert all(-0.2 <= axis(value) <= 100.2 for value in axis.ticks())


@given(st.lists(st.floats(0, 300), min_size=1, max_size=12))
def test_names_are_spread_so_that_none_hides_another(places: list[float]) -> None:
    moved = sorted(spread(places, 14.0))
    assert all(below - above >= 14.0 - 1e-6 for above, below in itertools.pairwise(moved))
    if all(abs(a - b) >= 14.0 for i, a in enumerate(places) for b in places[:i]):
        assert spread(places, 14.0) == pytest.approx(places), "what is apart stays where it is"


def places_of(svg: str) -> dict[str, tuple[float, float]]:
    """Return where the dots of a drawing stand, by what they lead to."""
    return {name: (float(x), float(y)) for name, x, y in re.findall(r'href="#(\w+)".*?cx="([\d.]+)" cy="([\d.]+)"', svg)}


def test_a_kernel_as_fast_as_the_memory_stands_on_the_slope_and_one_at_peak_on_the_roof() -> None:
    slope, flat, slower = entry("a@box", 1e-5), entry("b@box", 1e-3, flops=1e9), entry("c@box", 4e-5)
    assert (slope.share, flat.share, slower.share) == (pytest.approx(1.0), pytest.approx(1.0), pytest.approx(0.25))
    svg = roofline([slope, flat, slower], {"a@box": "e0", "b@box": "e1", "c@box": "e2"})
    (x0, y0), (x1, y1) = (tuple(map(float, re.findall(r"[\d.]+", part))) for part in re.findall(r'class="roof" d="M(.*?)L(.*?)"', svg)[0])
    dots = places_of(svg)
    assert dots["e0"][1] == pytest.approx(y0 + (dots["e0"][0] - x0) / (x1 - x0) * (y1 - y0), abs=0.3)
    assert dots["e1"][1] == pytest.approx(y1, abs=0.1)
    assert dots["e2"][0] == dots["e0"][0]
    assert dots["e2"][1] > dots["e0"][1], "slower is lower"
    assert 'aria-label="c@box: 40.0 us, 25% of its roof; 25.0 GFLOP/s, 25.0 GB/s"' in svg


def test_what_computes_nothing_has_no_place_under_a_roof() -> None:
    assert not has_place(entry(flops=0.0))
    assert not has_place(replace(ENTRY, run_secs=0.0))
    assert has_place(ENTRY)


def test_a_strip_has_the_band_of_noise_and_says_how_slow_what_is_beyond_its_end_is() -> None:
    svg = strip((1.00e-5, 1.01e-5, 1.02e-5), 1e-5)
    left, right = map(float, re.findall(r'class="tie" d="M([\d.]+) 0H([\d.]+)', svg)[0])
    x = Linear(0.985e-5, 1.08e-5, 0.0, 220.0)
    assert (left, right) == (pytest.approx(x(1e-5), abs=0.1), pytest.approx(x(1e-5 * (1 + NOISE)), abs=0.1))
    assert [int(at) for at in re.findall(r"M(\d+) 10h0", svg)] == [round(x(secs)) for secs in (1.00e-5, 1.01e-5, 1.02e-5)]
    assert "2.00\N{MULTIPLICATION SIGN} →" in strip((2e-5,) * 3, 1e-5)
    assert "← 0.50" in strip((0.5e-5,) * 3, 1e-5)


def test_candidates_show_the_parameters_in_which_they_differ() -> None:
    shared, names, cells = folded([Candidate.of("tiles", {"m": m, "order": "nm"}) for m in (8, 16)])
    assert (shared, names, cells) == ("All are tiles with order=nm. ", ["m"], [["8"], ["16"]])
    shared, names, cells = folded([Candidate.of("tiles", {"m": 8}), Candidate.of("rows", {"m": 8, "split": True})])
    assert (shared, names, cells) == ("All have m=8. ", ["template", "parameters"], [["tiles", ""], ["rows", "split=true"]])


def test_details_hold_the_winner_ties_and_reasons_of_failures() -> None:
    tried = (Tried(trial(1e-5, size=1), "p", is_tied=True), Tried(trial(1e-5, size=2), "p", is_tied=True))
    failed = Tried(trial(0.0, size=3, failure="wrong <result>"), "p")
    html = detail(entry(tried=(*tried, failed), others=()), ())
    assert re.findall(r'class="off">(\w+)</span></th><td>', html) == ["winner", "tied"]
    assert "tiles(order=nm size=3)</code> wrong &lt;result&gt;" in html
    assert "<h3>1 candidate without a time</h3>" in html


def test_entries_that_come_later_do_not_move_the_mean() -> None:
    old = entry("a@box", 1e-5, history=(2e-5, 1e-5, 1e-5))
    new = entry("b@box", 9e-5, history=(None, 9e-5, 9e-5))
    found = courses([old, new])
    assert [(course.name, course.factors) for course in found] == [("a@box", (1.0, 0.5, 0.5)), ("b@box", (None, 1.0, 1.0))]
    svg = history(found, [Revision("1a", "2026-01-01", "x"), Revision("2b", "2026-02-01", "y"), Revision("", "now", "")])
    assert "0.50\N{MULTIPLICATION SIGN} mean of all" in svg
    assert svg.count('class="thin"') == 1, "one entry has changed"
    assert [found for found in re.findall(r">([\w-]+)</text>", svg) if found in {"01-01", "02-01", "now"}] == ["01-01", "02-01", "now"]


def test_an_entry_of_one_time_has_no_history() -> None:
    assert courses([entry(history=(None, 1e-5)), entry(history=())]) == []


def test_of_many_factors_the_ends_are_drawn_and_the_middle_is_counted() -> None:
    found = [Ratio(f"entry{place}", 1.5 - place / 100, "") for place in range(2 * MOST + 5)]
    svg = ratios(found, "label", "slower", "faster")
    assert svg.count("<circle") == 2 * MOST
    assert f"… 5 more, from {1.5 - MOST / 100:.3g} to {1.5 - (MOST + 4) / 100:.3g}" in svg


def test_what_is_faster_stands_right_of_one() -> None:
    svg = ratios([Ratio("a", 2.0, "2 us / 1 us"), Ratio("b", 0.5, "1 us / 2 us")], "label", "slower", "faster")
    (one,) = re.findall(r'class="base" d="M([\d.]+)', svg)
    (fast, right), (slow, left) = re.findall(r'<circle class="(\w+)" cx="([\d.]+)"', svg)
    assert (fast, slow) == ("fast", "slow")
    assert float(left) < float(one) < float(right)
    assert float(right) - float(one) == pytest.approx(float(one) - float(left), abs=0.3), "twice as fast is as far as half as fast"


def test_models_are_judged_by_candidates_that_were_measured() -> None:
    tried = (Tried(trial(1e-5, 2e-5), "p"), Tried(trial(2e-5, 2e-5), "p"), Tried(trial(0, 1.0, failure="no"), "p"), Tried(trial(1e-5), "q"))
    first, second = models([entry(policy="p", tried=tried, best_of=(0.5, 1.0))])
    assert (first.policy, first.winners, first.pairs) == ("p", 1, ((1e-5, 2e-5), (2e-5, 2e-5)))
    assert (second.policy, second.winners, second.best_of) == ("q", 0, ())
    assert summary(first) == "predicted / measured: median 1.50, 80 % of 2 candidates between 1.00 and 2.00"
    assert predictions(first).count("h0") == 2
    assert "this entry" in best_of(first)


def test_searches_of_one_entry_are_drawn_beside_each_other() -> None:
    found = searched([entry(searches=(("auto", ((1.0, 4e-5), (2.0, 1e-5))), ("library", ((0.5, 2e-5),))))])
    assert found == {"auto": [((1.0, pytest.approx(4.0)), (2.0, pytest.approx(1.0)))], "library": [((0.5, pytest.approx(2.0)),)]}
    svg = searches(found)
    assert {"auto", "library"} <= set(re.findall(r'class="name">([\w ]+)</text>', svg))


def test_a_process_that_hardly_rests_is_one_piece_and_those_that_measure_come_last() -> None:
    measured = [Busy("measure cuda 9", "sample", at / 1000, 0.00099) for at in range(5000)]
    compiled = [Busy("compile 7", "build tiled", 0.0, 1.0), Busy("compile 7", "build tiled", 4.0, 2.0, has_failed=True)]
    svg = timeline(Built(10.0, "", (*measured, *compiled)))
    assert re.findall(r'text-anchor="end">([\w ]+)</text>', svg) == ["compile", "measure cuda"]
    pieces = {kind: path.count("M") for kind, path in re.findall(r'class="busy (\w+)" d="([^"]*)"', svg)}
    assert pieces == {"compile": 2, "measure": 1}
    assert "busy 30%, 2 requests" in svg
