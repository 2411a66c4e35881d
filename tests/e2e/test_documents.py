"""Every code block of the tutorial and the guides is run, or says why not; every link of every document leads somewhere."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from support.documents import Folder, blocks, page_notes
from support.repository import REPOSITORY

sys.path.append(str(REPOSITORY / "docs/site"))
PAGES = sorted([*(REPOSITORY / "docs/guides").glob("*.md"), *(REPOSITORY / "docs/tutorial").glob("*.md")])


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the README's workspace, built with two candidates an entry."""
    folder = Folder(tmp_path_factory.mktemp("readme"))
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    declared = next(block for block in blocks(text) if block.noted == "workloads.toml")
    (folder.root / "workloads.toml").write_text(declared.code.replace("top_k = 8", "top_k = 2"), encoding="utf-8")
    (build,) = blocks("```sh\npython -m kerneldecl build\n```")
    folder.run(build)
    return folder.root


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_blocks_of_a_page_are_run(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = page.read_text(encoding="utf-8")
    notes = page_notes(text)
    if "import torch" in text or "torch.compile" in text:
        pytest.importorskip("torch", reason="needs torch")
    folder = Folder(tmp_path / "page")
    if "workspace" in notes:
        shutil.copytree(request.getfixturevalue("readme"), folder.root)
    folder.root.mkdir(exist_ok=True)
    for block in blocks(text):
        if "run by" in notes and block.verb in {"example", "commands"}:
            continue
        folder.run(block)
    if "run by" in notes:
        assert page.name in (REPOSITORY / notes["run by"]).read_text(encoding="utf-8"), "that test does not name the page"
