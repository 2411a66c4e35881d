"""Owns the tests of policies' searches beside each other: who is fastest, what is drawn, what the command takes.

Knows nothing of builds: times are made up.
"""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from support.spaces import FAKES, Space

from kerneldecl.cli.compare import contenders
from kerneldecl.compare.curves import svg
from kerneldecl.compare.searches import Searched, fastest, of_best, wins
from kerneldecl.errors import DeclarationError, ExitCode

ROUGH = Searched("mm@host", "rough", run_secs=4e-6, search_secs=1.0, curve=((0.5, 5e-6), (0.9, 4e-6)))
FINE = Searched("mm@host", "fine", run_secs=2e-6, search_secs=4.0, curve=((1.0, 3e-6), (3.0, 2e-6)))
NEARLY = Searched("mm@host", "nearly", run_secs=2.005e-6, search_secs=2.0, curve=((2.0, 2.005e-6),))
BROKEN = Searched("mm@host", "broken", failure="none of 3 candidates passed")


def test_winners_that_noise_cannot_tell_apart_share_the_place() -> None:
    assert [each.policy for each in fastest([ROUGH, FINE, NEARLY, BROKEN])] == ["fine", "nearly"]


def test_a_policy_wins_entry_by_entry() -> None:
    other = Searched("add@host", "rough", run_secs=1e-6), Searched("add@host", "fine", run_secs=2e-6)
    assert wins([ROUGH, FINE, BROKEN, *other]) == {"rough": 1, "fine": 1, "broken": 0}


def test_shares_of_the_fastest_are_averaged_geometrically_over_what_a_policy_has_found() -> None:
    other = Searched("add@host", "rough", run_secs=8e-6), Searched("add@host", "fine", run_secs=1e-6)
    found = of_best([ROUGH, FINE, BROKEN, *other])
    assert found == pytest.approx({"rough": 0.25, "fine": 1.0})  # of 1/2 and 1/8


def test_an_entry_is_drawn_with_a_line_for_each_policy_that_has_found_anything() -> None:
    drawing = ET.fromstring(svg([ROUGH, FINE, BROKEN]))
    lines = [path for path in drawing.iter("{http://www.w3.org/2000/svg}path") if path.get("stroke-width") == "2"]
    assert len(lines) == 2
    assert {text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")} >= {"mm@host", "rough", "fine", "broken"}


def test_a_better_time_is_drawn_lower() -> None:
    drawing = svg([FINE])
    (path,) = (line for line in drawing.splitlines() if 'stroke-width="2"' in line and "<path" in line)
    start, first_drop, *_ = (float(part.split(",")[-1]) for part in path.split('"')[1].replace(" V", ",").split(" H"))
    assert first_drop > start  # y grows downwards


def test_names_in_a_drawing_are_text() -> None:
    assert "<b>" not in svg([Searched("<b>@host", "a&b", run_secs=1e-6, curve=((0.1, 1e-6),))])


def test_a_search_that_found_nothing_draws_nothing() -> None:
    assert "<path" not in svg([BROKEN])


def test_policies_are_named_by_what_tells_them_apart() -> None:
    given = '["auto", { name = "random", trials = 8 }, ["auto", "evolution"]]'
    assert list(contenders(given)) == ["auto", "random(trials=8)", "auto+evolution"]
    assert contenders("auto, random") == {"auto": "auto", "random": "random"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("auto,auto", "auto stands there twice; expected each once"),
        ("auto", "one policy is no comparison"),
        ('["auto"', "neither a name nor a TOML value"),
    ],
)
def test_what_is_no_comparison_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(DeclarationError, match=sentence):
        contenders(text)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--policies", "plain,plane"), ExitCode.USAGE, '--policies: unknown policy "plane"'),
        (("--policies", '["plain", { name = "random", trials = 0 }]'), ExitCode.USAGE, "trials of policy random is 0; expected"),
        (("--policies", "plain,random", "--budget", "0s"), ExitCode.USAGE, "'0s' is no time above 0; write 60s or 2m"),
        (("--policies", "plain,random", "--budget", "soon"), ExitCode.USAGE, "'soon' is no time above 0"),
        (("--policies", "plain,random", "nobody"), ExitCode.NO_MATCH, "nobody"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, arguments: tuple[str, ...], code: int, sentence: str) -> None:
    done = Space(tmp_path).write(FAKES).command("compare", *arguments)
    assert (done.code, sentence in done.err) == (code, True), done.err
