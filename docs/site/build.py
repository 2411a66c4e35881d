"""Owns the site: `python docs/site/build.py [FOLDER]` writes it, by default into build/docs; any warning of Sphinx is an error.

Knows nothing of what pages say. The sources that Sphinx reads are assembled: pages of docs/, documents of the repository's root,
the reference, which is made of the code, and charts, which are made of figures under benchmarks/.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from charts import charts  # noqa: E402
from links import links, moved  # noqa: E402
from reference import reference  # noqa: E402

FROM_ROOT: Mapping[str, str] = {
    "DESIGN.md": "concepts/design.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/README.md": "benchmarks.md",
    "README.md": "readme.md",
}
"""Documents outside docs/ and their pages."""
INDEX = PurePosixPath("index.md")


def pages() -> dict[PurePosixPath, PurePosixPath]:
    """Return the place on the site of each file that has one, by its place in the repository."""
    own = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*") if path.suffix in {".md", ".svg", ".png"}}
    found = {PurePosixPath("docs") / each: PurePosixPath(each) for each in own if each.parts[0] != "site"}
    made = {PurePosixPath("docs") / name: PurePosixPath(name) for name in [*reference(ROOT), *charts(ROOT)]}
    return {**found, **made, **{PurePosixPath(source): PurePosixPath(page) for source, page in FROM_ROOT.items()}}


def assemble(folder: Path) -> None:
    """Write all that Sphinx reads into a folder."""
    places = pages()
    texts = {f"docs/{name}": text for name, text in {**reference(ROOT), **charts(ROOT)}.items()}
    for source, page in places.items():
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        if page.suffix == ".png":
            shutil.copy(ROOT / source, path)
            continue
        text = texts.get(str(source)) or (ROOT / source).read_text(encoding="utf-8")
        if page.suffix == ".md":
            text = moved(text, source, page, places, ROOT)
        path.write_text(text + (_toctrees(text, places.values()) if page == INDEX else ""), encoding="utf-8")
    _add_children(folder)
    shutil.copy(ROOT / "docs/site/conf.py", folder)


def _toctrees(index: str, placed: Iterable[PurePosixPath]) -> str:
    """Return a hidden toctree for each section of the index, of the pages that its links name; and one of pages that it does not name."""
    sections: dict[str, list[str]] = {}
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        named = dict.fromkeys(link.partition("#")[0] for _, link in links(body))
        sections[title] = [name.removesuffix(".md") for name in named if name.endswith(".md")]
    known = {"index", *(name for names in sections.values() for name in names)}
    folders = {page.parent for page in placed if page.name == "README.md"}
    left = (page for page in placed if page.suffix == ".md" and (page.parent not in folders or page.name == "README.md"))
    sections["More"] = sorted({str(page.with_suffix("")) for page in left} - known)
    return "\n".join(_toctree(title, names) for title, names in sections.items() if names)


def _toctree(title: str, names: Sequence[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *names, "```", ""])


def _add_children(folder: Path) -> None:
    """Give each folder's page README.md a toctree of the folder's other pages, such as the catalogue's."""
    for path in folder.rglob("README.md"):
        others = sorted(each.stem for each in path.parent.glob("*.md") if each != path)
        if others:
            path.write_text(
                path.read_text(encoding="utf-8") + "\n".join(["", "```{toctree}", ":hidden:", "", *others, "```", ""]), encoding="utf-8"
            )


def main(arguments: list[str]) -> int:
    from sphinx.cmd.build import build_main

    out = Path(arguments[0]) if arguments else ROOT / "build/docs"
    with tempfile.TemporaryDirectory() as sources:
        assemble(Path(sources))
        return build_main(["-W", "--keep-going", "-q", "-E", "-d", f"{sources}/.doctrees", sources, str(out)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
