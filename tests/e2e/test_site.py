"""The site is built without a warning, has every page, and its search needs no network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import REPOSITORY

sys.path.append(str(REPOSITORY / "docs/site"))

from reference import MODULES, public_names

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="needs pip install 'kerneldecl[docs]'"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "docs/site/build.py", str(out)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_every_document_has_a_page(site: Path) -> None:
    documents = {path.relative_to(REPOSITORY / "docs").with_suffix("") for path in (REPOSITORY / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix("") for path in site.rglob("*.html")}
    assert documents <= built
    assert {Path(f"reference/{name}") for name in ("rules", "commands", "workloads", "python", "policies", "templates", "archs")} <= built


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    fetched = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
    assert [path.name for path in site.rglob("*.html") if fetched.search(path.read_text(encoding="utf-8"))] == []
    assert (site / "search.html").is_file()
    assert "gelu_tanh" in (site / "searchindex.js").read_text(encoding="utf-8")


def test_public_names_stand_on_the_page_of_the_python_interface(site: Path) -> None:
    page = (site / "reference/python.html").read_text(encoding="utf-8")
    names = [f"{module}.{each.name}" for module in MODULES if module != "kerneldecl.api" for each in public_names(REPOSITORY, module)]
    assert [name for name in names if f'id="{name}"' not in page] == []
