"""Owns relative links of Markdown: finding them outside code, and pointing them to where a page of the site is.

Knows nothing of Sphinx.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

_CODE = re.compile(r"^( *)(```+|~~~+).*?^ *\2[ \t]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z]+:|#|//")


def links(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and destination of each relative link and image outside code."""
    for match in _LINK.finditer(_without_code(text)):
        if not _ELSEWHERE.match(match[3]):
            yield text.count("\n", 0, match.start()) + 1, match[3]


def _without_code(text: str) -> str:
    """Return a text of the same length and lines whose code is blank."""
    return _CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *$", _blank_fences(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = next(at for at in range(len(found) + 1) if (f"{anchor}-{at}" if at else anchor) not in found)
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def _blank_fences(text: str) -> str:
    return re.sub(r"^( *)(```+|~~~+).*?^ *\2[ \t]*$", lambda match: "\n" * match[0].count("\n"), text, flags=re.MULTILINE | re.DOTALL)


def moved(text: str, source: PurePosixPath, page: PurePosixPath, pages: Mapping[PurePosixPath, PurePosixPath], root: Path) -> str:
    """Return a page's text with links that hold on the site.

    The text lies at `source` in the repository and is the site's `page`; `pages` has the place on the site of every file that has one.
    A link to a file without one becomes the file's name: readers of the site have no checkout. Raise ValueError for a link that leads
    nowhere.
    """
    parts, end = [], 0
    for match in _LINK.finditer(_without_code(text)):
        if _ELSEWHERE.match(match[3]):
            continue
        label = text[match.start(2) : match.end(2)]
        path, mark, anchor = match[3].partition("#")
        target = PurePosixPath(os.path.normpath(source.parent / path))
        parts.append(text[end : match.start()])
        end = match.end()
        if target in pages:
            parts.append(f"{match[1]}[{label}]({os.path.relpath(pages[target], page.parent)}{mark}{anchor})")
        elif (root / target).exists():
            parts.append(label if target.name in label else f"{label} (`{target}`)")
        else:
            raise ValueError(f"{source}: the link to {match[3]} leads nowhere")
    return "".join([*parts, text[end:]])
