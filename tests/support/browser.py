"""Owns a browser for tests: Debian's Chromium without a window, driven by Playwright.

Knows nothing of the pages that it shows.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@dataclass
class Shown:
    """A page that is shown, and what the browser has said of it."""

    page: Any
    said: list[str] = field(default_factory=list)
    """Errors, and what was written to the console."""
    asked: list[str] = field(default_factory=list)
    """What it has asked for, itself included."""


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the browser; skip the test where there is none."""
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install 'kerneldecl[dev]')")
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    with sync.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def show(browser: Any, path: Path, *, scheme: str = "light", width: int = 1280) -> Shown:
    """Open a file of this machine in a page of its own."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    shown = Shown(page)
    page.on("console", lambda message: shown.said.append(message.text))
    page.on("pageerror", lambda error: shown.said.append(str(error)))
    page.on("request", lambda request: shown.asked.append(request.url))
    page.goto(path.as_uri())
    return shown
