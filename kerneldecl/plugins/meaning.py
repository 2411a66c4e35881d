"""Owns what a Python source means: its tokens without comments, docstrings and layout, and the modules that it imports.

Knows nothing of files. Sources are cut into tokens by one pattern and not by Python's own parser, whose trees and tokens differ between
releases: a digest is committed by one machine and compared by another.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kerneldecl.store.keys import digest

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
    | (?P<string>(?i:[rbuft]{0,2})(?:\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'))
    | (?P<newline>\n[ \t\f]*)
    | (?P<space>[ \t\f]+|\\\n)
    | (?P<other>\w+|.)""",
    re.VERBOSE | re.DOTALL,
)
_CODING = re.compile(rb"\A(?:[^\n]*\n)?[ \t\f]*#[^\n]*coding[:=](?![ \t]*utf-?8)")
_FORMATTED = re.compile(r"[rb]?[ft][rb]?['\"]", re.IGNORECASE)


class Meaning(NamedTuple):
    """What matters of a source."""

    digest: str
    imports: tuple[tuple[str, int], ...]
    """Modules, and what is imported from them as if it were modules, each with its leading dots."""


class _Line(NamedTuple):
    """A logical line: its statements, which may go over several lines of text."""

    indent: int
    tokens: list[str]
    has_strings_alone: bool


@functools.lru_cache(maxsize=1024)
def meaning(source: bytes) -> Meaning:
    """Return what a source means. Where tokens cannot be told apart for certain, every byte of it counts."""
    try:
        text = source.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return Meaning(digest(source), ())
    lines = _lines(text)
    imports = tuple(found for line in lines if "import" in line.tokens for found in _imports(line.tokens))
    if _CODING.match(source) or _is_ambiguous(text):
        return Meaning(digest(source), imports)
    # Where somebody reads docstrings, they are data.
    kept = lines if "__doc__" in text else [line for line in lines if not line.has_strings_alone]
    return Meaning(digest("".join(_indented(kept)).encode()), imports)


@functools.lru_cache(maxsize=1024)
def meaning_without(source: bytes, methods: frozenset[str]) -> str:
    """Return the digest of what a source means without methods of these names, unless anything else in it names them."""
    whole = meaning(source).digest
    try:
        lines = _lines(source.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n"))
    except UnicodeDecodeError:
        return whole
    kept: list[str] = []
    skipped_indent: int | None = None
    for line in lines:
        if skipped_indent is not None and line.indent > skipped_indent:
            continue
        is_method = line.indent > 0 and line.tokens[0] == "def" and line.tokens[1] in methods
        skipped_indent = line.indent if is_method else None
        if not is_method:
            kept += [] if line.has_strings_alone else [f"{line.indent} {' '.join(line.tokens)}"]
    is_named = any(method in line.split() for line in kept for method in methods)
    return whole if is_named or len(kept) == len(lines) else digest("\n".join(kept).encode())


def meant_lines(source: bytes) -> list[tuple[int, list[str]]]:
    """Return the logical lines of a source, each with the depth of its block, from 1, and its tokens; none of what is no UTF-8."""
    try:
        text = source.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return []
    kept = [line for line in _lines(text) if not line.has_strings_alone]
    return [(int(indented.partition(" ")[0]), line.tokens) for line, indented in zip(kept, _indented(kept), strict=True)]


def _is_ambiguous(text: str) -> bool:
    """Say whether a formatted string may hold quotes of its own kind, as Python 3.12 allows: it seems to end inside of a brace.

    A doubled brace stands for itself.
    """
    strings = (token for line in _lines(text) for token in line.tokens if token[-1] in "'\"" and _FORMATTED.match(token))
    braces = (string.replace("{{", "").replace("}}", "") for string in strings)
    return any(each.count("{") != each.count("}") for each in braces)


@functools.lru_cache(maxsize=16)
def _lines(text: str) -> tuple[_Line, ...]:
    """Return the logical lines that hold anything. A rule's text is asked for several times: as a whole, and without methods."""
    return tuple(_cut(text))


def _cut(text: str) -> Iterator[_Line]:
    indent, depth, tokens, are_strings = 0, 0, list[str](), True
    for match in _TOKEN.finditer(f"\n{text}\n"):
        kind, token = match.lastgroup, match[0]
        if kind == "newline":
            if depth:
                continue
            if tokens:
                yield _Line(indent, tokens, are_strings)
            indent, tokens, are_strings = len(token[1:].expandtabs()), [], True
        elif kind in {"string", "other"}:
            depth += (token in {"(", "[", "{"}) - (token in {")", "]", "}"})
            tokens.append(token)
            are_strings = are_strings and kind == "string" and not _FORMATTED.match(token)
    if tokens:
        yield _Line(indent, tokens, are_strings)


def _indented(lines: Sequence[_Line]) -> Iterator[str]:
    """Yield the lines with the depth of their block instead of its spaces."""
    blocks = [0]
    for line in lines:
        while line.indent < blocks[-1]:
            blocks.pop()
        if line.indent > blocks[-1]:
            blocks.append(line.indent)
        yield f"{len(blocks)} {' '.join(line.tokens)}\n"


def _imports(tokens: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield what the import statements of a logical line name."""
    for place in (at for at in range(len(tokens)) if tokens[at] == "import"):
        start = max((at + 1 for at in range(place) if tokens[at] in {";", ":"}), default=0)
        end = tokens.index(";", place) if ";" in tokens[place:] else len(tokens)
        names = [_name(part) for part in _parts(tokens[place + 1 : end]) if part]
        if tokens[start] != "from":
            yield from ((name, 0) for name in names)
            continue
        path = "".join(tokens[start + 1 : place])
        module = path.lstrip(".")
        level = len(path) - len(module)
        yield from ((name, level) for name in (module, *(f"{module}.{name}" if module else name for name in names)) if name)


def _parts(tokens: Sequence[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in tokens:
        if word == ",":
            yield part
            part = []
        elif word not in {"(", ")"}:
            part.append(word)
    yield part


def _name(tokens: Sequence[str]) -> str:
    return "".join(tokens[: tokens.index("as")] if "as" in tokens else tokens)
