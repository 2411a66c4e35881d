"""Owns the tests of the report in a browser: what it shows, how it is reached by keys, whether everybody can read it.

Knows nothing of how it is drawn. The entries are the repository's own, with the records of an H200.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import chromium, show
from support.repository import REPOSITORY
from support.spaces import Space, clean_environment

SHOWN = ("gemv_i4@h200", "softmax@h200", "transpose@h200", "reduce_sum@h200", "layer_norm[shape=128x4096]@h200")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of some of the repository's H200 entries, built here from its records."""
    root = tmp_path_factory.mktemp("report")
    for name in ("workloads.toml", "workloads.lock"):
        shutil.copy(REPOSITORY / name, root)
    shutil.copytree(REPOSITORY / "cache" / "record", root / "cache" / "record")
    command(root, "build", *SHOWN)
    path = root / "report.html"
    told = json.loads(command(root, "report", *SHOWN, "-o", str(path), "--json"))
    assert told == {"schema": 1, "report": str(path), "bytes": path.stat().st_size, "entries": len(SHOWN)}
    return path


def command(root: Path, *arguments: str) -> str:
    given = [sys.executable, "-m", "kerneldecl", "-C", str(root), *arguments]
    done = subprocess.run(given, env=clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def violations(page: Any) -> list[str]:
    """Return what axe objects to, with the places."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [f"{each['id']}: {[node['target'] for node in each['nodes']][:3]}" for each in found]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("dark", 390)])
def test_everybody_can_read_it_and_nothing_is_asked_for(browser: Any, report: Path, scheme: str, width: int) -> None:
    shown = show(browser, report, scheme=scheme, width=width)
    shown.page.click("#entries button:has-text('gemv_i4')")
    shown.page.wait_for_selector(".detail .candidates")
    assert violations(shown.page) == []
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width, "only drawings and tables scroll sideways"
    assert shown.said == []
    assert [url for url in shown.asked if not url.startswith("data:")] == [report.as_uri()]


@pytest.mark.slow
def test_keys_reach_every_dot_and_open_its_entry(browser: Any, report: Path) -> None:
    page = show(browser, report).page
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('svg.dots') !== null"):
            break
    first = page.evaluate("document.activeElement.getAttribute('href')")
    assert page.inner_text("#tip") == page.get_attribute(f"svg.dots a[href='{first}']", "aria-label")
    page.keyboard.press("ArrowRight")
    second = page.evaluate("document.activeElement.getAttribute('href')")
    assert first != second
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('svg.dots') === null"), "all dots together are one stop of Tab"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.getAttribute('href')") == second
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{second} + .detail")
    assert page.evaluate("document.activeElement.closest('tr').id") == second.removeprefix("#")


@pytest.mark.slow
def test_pointing_near_a_dot_says_whose_it_is(browser: Any, report: Path) -> None:
    page = show(browser, report).page
    box = page.locator("svg.dots a").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] + 3, box["y"] + box["height"] + 3)
    assert page.inner_text("#tip") == page.locator("svg.dots a").first.get_attribute("aria-label")
    page.mouse.move(5, 5)
    assert page.is_hidden("#tip")


@pytest.mark.slow
def test_entries_are_sorted_filtered_and_opened(browser: Any, report: Path) -> None:
    page = show(browser, report).page
    page.click("#entries thead th:nth-child(2) button")
    secs = page.eval_on_selector_all("#entries tr[id] td:nth-child(2)", "cells => cells.map((cell) => Number(cell.dataset.v))")
    assert secs == sorted(secs)
    page.click("#entries thead th:nth-child(2) button")
    assert page.get_attribute("#entries thead th:nth-child(2)", "aria-sort") == "descending"
    page.fill("#filter", "gemv_i4")
    assert page.eval_on_selector_all("#entries tr[id]", "rows => rows.filter((row) => !row.hidden).length") == 1
    assert page.inner_text("#count") == f"1 of {len(secs)}"
    page.click("#all")
    page.wait_for_selector(".detail")
    told = page.inner_text(".detail")
    assert not [words for words in ("1.07 GFLOP, at least 138 MB of memory traffic", "warps_k") if words not in told]
    assert page.locator(".detail .candidates tbody tr").count() == 20
    page.click("#entries tr[id]:not([hidden]) button")
    assert page.locator(".detail").count() == 0


@pytest.mark.slow
def test_paper_has_no_tools_and_dark_ink(browser: Any, report: Path) -> None:
    page = show(browser, report, scheme="dark").page
    page.emulate_media(media="print", color_scheme="dark")
    assert page.is_hidden("#filter")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"


def test_a_real_build_has_a_timeline_searches_and_sources(browser: Any, real: Space) -> None:
    real.run("report")
    shown = show(browser, real.root / "dist" / "report.html")
    assert shown.page.locator("#build svg path.busy").count() >= 2
    assert shown.page.locator("#searches svg").count() == 1
    shown.page.click("#e0 button")
    shown.page.click("#e0 + .detail summary")
    assert "def main" in shown.page.inner_text("#e0 + .detail pre")
    assert violations(shown.page) == []
    assert shown.said == []
