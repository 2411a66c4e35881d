"""Every relative link of every document leads to a file that is there, and to a heading of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.repository import REPOSITORY

sys.path.append(str(REPOSITORY / "docs/site"))

from links import anchors, links

PAGES = ("workloads", "rules", "policies", "templates", "archs", "commands", "exit-codes", "python")
GENERATED = {f"docs/reference/{name}.md" for name in PAGES}
"""Made when the site is built, which checks links to their headings."""
CHARTS = {f"docs/figures/{name}.svg" for name in ("gpu-kernels", "gpu-models", "wgmma", "attention", "cpu-kernels", "cpu-models")}
NO_SOURCES = {"build", "cache", "dist", "node_modules"}
FOLDERS = (path for path in REPOSITORY.iterdir() if path.is_dir() and path.name not in NO_SOURCES and not path.name.startswith("."))
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(path for folder in FOLDERS for path in folder.rglob("*.md"))])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_lead_somewhere(document: Path) -> None:
    wrong = []
    # Fragments of the changelog are going to stand in the root.
    is_fragment = document.parent.name == "changes" and document.name != "README.md"
    place = REPOSITORY if is_fragment else document.parent
    for line, link in links(document.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = Path(os.path.normpath(place / path))
        if str(target.relative_to(REPOSITORY)) in GENERATED | CHARTS:
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8"))):
            wrong.append(f"{document.relative_to(REPOSITORY)}:{line}: {link}")
    assert not wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_within_a_page_lead_to_a_heading(document: Path) -> None:
    import re

    text = document.read_text(encoding="utf-8")
    own = anchors(text)
    assert [found for found in re.findall(r"\]\(#([^)]*)\)", text) if found not in own] == []
