"""Owns the tests of the report's page: what is read for it, what it holds, what it never holds.

Knows nothing of browsers. Workspaces are built with fakes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import zlib
from dataclasses import replace

import pytest
from support.fakes import FakeRunner
from support.git import git
from support.slower import slow_down
from support.spaces import Space

from kerneldecl.compare.verdict import Verdict
from kerneldecl.errors import DeclarationError
from kerneldecl.model import Candidate, Trial
from kerneldecl.report.data import Entry, Report, Target, Tried
from kerneldecl.report.gather import Asked, gather, with_sources
from kerneldecl.report.page import MOST_BYTES, PIECE, page

TRIED = (Tried(Trial(Candidate.of("tiles", {"size": 8}), 1e-5, samples=(1e-5,) * 3), "plain"),)


def report_of(space: Space, **asked: object) -> Report:
    return gather(space.open(), space.plan().entries, [], Asked(**asked))  # type: ignore[arg-type]


def many(count: int, **more: object) -> Report:
    entry = Entry(name="", target="box", rule="sum", attrs="", is_measured=True, run_secs=1e-5, policy="plain", tried=TRIED)
    entries = tuple(replace(entry, name=f"entry{place}@box", **more) for place in range(count))  # type: ignore[arg-type]
    return Report(title="many 1.0", targets=(Target("box", "a box"),), entries=entries)


def details(html: str) -> list[str]:
    """Return the details of all entries, unpacked as the page does."""
    packed = re.findall(r'<script type="text/plain" id="p\d+">(.*?)</script>', html)
    return [each for piece in packed for each in zlib.decompress(base64.b64decode(piece), -15).decode().split("\0")]


@pytest.fixture
def committed(fakes: Space) -> Space:
    """Return a workspace whose first build is committed, and whose next one has an entry that is slower."""
    assert fakes.command("build", runner=FakeRunner()).code == 0
    git(fakes, "init", "-q")
    git(fakes, "add", "-A")
    git(fakes, "commit", "-qm", "the <first> one")
    slow_down(fakes, "small@box", 1.5)
    return fakes


def test_a_report_compares_with_the_newest_revision_of_other_times(committed: Space) -> None:
    found = report_of(committed)
    by_name = {entry.name: entry for entry in found.entries}
    assert [revision.subject for revision in found.revisions] == ["the <first> one", ""]
    assert found.against == found.revisions[0].digest
    assert {name: entry.change.verdict for name, entry in by_name.items() if entry.change} == {
        "small@box": Verdict.SLOWER,
        "large@box": Verdict.SAME,
        "tabled@box": Verdict.SAME,
    }
    before, now = by_name["small@box"].history
    assert before is not None
    assert now == pytest.approx(before * 1.5, rel=1e-3)
    html = page(found)
    assert "2 same, 1 slower" in html
    assert "slower now" in html
    assert "the <first>" not in "".join(details(html))
    git(committed, "add", "-A")
    git(committed, "commit", "-qm", "second")
    assert report_of(committed).against == found.against, "the lock of now is no other"


def test_a_report_compares_with_what_it_is_asked_to(committed: Space) -> None:
    git(committed, "tag", "first")
    (committed.root / "workloads.lock").write_text(committed.read("workloads.lock").replace("large@box", "gone@box"))
    git(committed, "add", "-A")
    git(committed, "commit", "-qm", "another")
    assert report_of(committed, against="HEAD").gone == ("gone@box",)
    with pytest.raises(DeclarationError, match="no git revision"):
        report_of(committed, against="nowhere")


def test_candidates_have_their_policies_and_ties(fakes: Space) -> None:
    fakes.command("build", runner=FakeRunner())
    plan = fakes.plan()
    for planned, entry in zip(plan.entries, gather(fakes.open(), plan.entries, [], Asked()).entries, strict=True):
        assert planned.tuned is not None
        assert {each.policy for each in entry.tried} == {"plain"}
        assert entry.tried[0].trial.candidate == planned.tuned.winner
        assert sum(each.is_tied for each in entry.tried) == (planned.tuned.tied + 1 if planned.tuned.tied else 0)
        assert entry.best_of[-1] == 1.0


def test_what_has_no_winner_says_why(fakes: Space) -> None:
    html = page(report_of(fakes))
    assert html.count("no winner: ") == 3
    assert "Nothing is measured yet" in html


def test_other_policies_times_and_searches_come_from_a_comparison(fakes: Space) -> None:
    fakes.command("build", runner=FakeRunner())
    rows = [
        {"policy": "auto", "run_secs": 1e-5, "curve": [[0.5, 2e-5], [1.0, 1e-5]]},
        {"policy": "library", "run_secs": 3e-5, "curve": [[0.1, 3e-5]]},
        {"policy": "default", "run_secs": 0.0, "curve": []},
    ]
    fakes.write({"searches.json": json.dumps({"entries": [{"entry": "small@box", "policies": rows}]})})
    found = report_of(fakes, searches=fakes.root / "searches.json")
    (small,) = [entry for entry in found.entries if entry.name == "small@box"]
    assert [(other.name, other.secs / other.our_secs) for other in small.others] == [("library", pytest.approx(3.0))]
    assert [name for name, _ in small.searches] == ["auto", "library"]
    html = page(found)
    assert "<h3>Vendor&#x27;s library</h3>" in html
    fakes.write({"searches.json": '{"entries": [{"entry": "small@box"}]}'})
    with pytest.raises(DeclarationError, match="compare --json"):
        report_of(fakes, searches=fakes.root / "searches.json")


def test_the_last_builds_events_give_searches_and_a_timeline(fakes: Space) -> None:
    fakes.command("build", runner=FakeRunner())
    lines = [
        {"event": "begun", "at": 10.0, "entry": "small@box", "computation": "c"},
        {"event": "step", "at": 11.0, "entry": "small@box", "doing": "verified", "done": 1, "total": 2, "best_secs": 3e-6},
        {"event": "step", "at": 12.0, "entry": "small@box", "doing": "verified", "done": 2, "total": 2, "best_secs": 3e-6},
        {"event": "step", "at": 13.0, "entry": "small@box", "doing": "timed", "done": 2, "total": 2, "best_secs": 1e-6},
        {
            "event": "ran",
            "at": 14.0,
            "request": "sample",
            "process": "measure cpu 1",
            "began": 11.0,
            "secs": 2.0,
            "computation": "",
            "failure": "",
        },
        {"event": "ended", "at": 20.0, "secs": 10.0, "failure": ""},
    ]
    found = gather(fakes.open(), fakes.plan().entries, lines, Asked())
    (small,) = [entry for entry in found.entries if entry.name == "small@box"]
    assert small.searches == (("last build", ((1.0, 3e-6), (3.0, 1e-6))),)
    assert found.built is not None
    assert (found.built.secs, found.built.busy[0].began_secs, found.built.busy[0].secs) == (10.0, 1.0, 2.0)
    html = page(found)
    assert {'id="searches"', 'id="build"'} <= set(re.findall(r'id="\w+"', html))


def test_every_entrys_details_are_where_the_page_looks_for_them() -> None:
    html = page(many(2 * PIECE + 3))
    assert html.count('<script type="text/plain"') == 3
    found = details(html)
    assert len(found) == 2 * PIECE + 3
    assert all(f"'entry{place}@box'" in each for place, each in enumerate(found))


def test_sources_stay_while_there_is_room() -> None:
    noise = random.Random(0)
    few = page(many(3, source="def main():\n    pass"))
    assert all("Scheduled TensorIR of the winner, 2 lines" in each for each in details(few))
    large = many(64, source="".join(chr(noise.randrange(33, 127)) for _ in range(60_000)))
    html = page(large)
    assert len(html.encode()) <= MOST_BYTES
    has_source = ["Scheduled TensorIR" in each for each in details(html)]
    assert any(has_source)
    assert not all(has_source)
    assert has_source == sorted(has_source, reverse=True), "the first entries keep theirs"


def test_a_source_comes_from_the_store(fakes: Space) -> None:
    fakes.command("build", runner=FakeRunner())
    plan, workspace = fakes.plan(), fakes.open()
    found = with_sources(gather(workspace, plan.entries, [], Asked()), plan.entries, workspace)
    assert all(entry.source for entry in found.entries)


def test_text_of_others_is_text() -> None:
    evil = "<img src=x onerror=alert(1)>\"'\x1b[2J"
    entry = Entry(name=f"{evil}@box", target="box", rule=evil, attrs=evil, reason=evil)
    html = page(Report(title=evil, targets=(Target("box", evil),), entries=(entry,)))
    for text in (html, *details(html)):
        assert "<img" not in text
        assert "\x1b" not in text


def test_the_page_asks_for_nothing_and_runs_its_own_script_alone() -> None:
    html = page(many(3))
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'" in html
    assert not re.findall(r"https?://", html)
    assert not re.findall(r'\bon\w+="', html)
