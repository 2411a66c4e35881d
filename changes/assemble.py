"""Owns the fragments of the changelog: `python changes/assemble.py` moves them into CHANGELOG.md, below the newest release.

Knows nothing of releases but their headings.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")
WIDTH = 140
NAME = re.compile(r"(?P<name>[A-Za-z0-9_-]+)\.(?P<kind>[a-z]+)\.md")


def fragments(folder: Path) -> dict[str, list[Path]]:
    """Return the fragments of a folder by kind, sorted by name; raise ValueError for a file that is none."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.md")):
        if path.name == "README.md":
            continue
        named = NAME.fullmatch(path.name)
        if named is None or named["kind"] not in KINDS:
            raise ValueError(f"{path}: expected NAME.KIND.md, with KIND one of {', '.join(KINDS)}")
        if not path.read_text(encoding="utf-8").strip():
            raise ValueError(f"{path} is empty")
        found.setdefault(named["kind"], []).append(path)
    return found


def item(text: str) -> str:
    """Return a fragment's text as a list item in lines of at most 140 columns."""
    return textwrap.fill(
        " ".join(text.split()), WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def assembled(changelog: str, items: Mapping[str, Sequence[str]]) -> str:
    """Return the changelog with items at the end of the sections of their kinds in its first release; raise ValueError without one."""
    releases = list(re.finditer(r"^## ", changelog, re.MULTILINE))
    if not releases:
        raise ValueError("CHANGELOG.md has no release")
    begin = releases[0].start()
    end = releases[1].start() if len(releases) > 1 else len(changelog)
    head, *sections = re.split(r"^(?=### )", changelog[begin:end].rstrip("\n"), flags=re.MULTILINE)
    by_kind = {section.split("\n", 1)[0].removeprefix("### ").lower(): section.rstrip("\n") for section in sections}
    for kind in KINDS:
        if items.get(kind):
            by_kind[kind] = "\n".join([by_kind.get(kind, f"### {kind.capitalize()}\n"), *items[kind]])
    order = [*(kind for kind in KINDS if kind in by_kind), *(kind for kind in by_kind if kind not in KINDS)]
    release = "\n\n".join([head.rstrip("\n"), *(by_kind[kind] for kind in order)]) + "\n"
    return changelog[:begin] + release + ("\n" if end < len(changelog) else "") + changelog[end:]


def main(root: Path, arguments: Sequence[str] = ()) -> int:
    argparse.ArgumentParser(description="Move the fragments of changes/ into CHANGELOG.md, below its newest release.").parse_args(arguments)
    changelog = root / "CHANGELOG.md"
    try:
        found = fragments(root / "changes")
        items = {kind: [item(path.read_text(encoding="utf-8")) for path in paths] for kind, paths in found.items()}
        text = assembled(changelog.read_text(encoding="utf-8"), items)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    changelog.write_text(text, encoding="utf-8")
    paths = [path for several in found.values() for path in several]
    for path in paths:
        path.unlink()
    print(f"{len(paths)} moved into CHANGELOG.md" if paths else "nothing to move")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1], sys.argv[1:]))
