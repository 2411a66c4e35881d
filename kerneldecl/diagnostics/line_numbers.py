"""Owns line numbers: the line of each table and each key in a valid TOML text.

Knows nothing of what tables and keys mean. Without mistakes only `array_lines` runs; the rest locates mistakes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

Path = tuple[str | int, ...]
"""Keys from the top of the document, arrays of tables by position: `("workload", 3, "m")`."""

_TOKEN = re.compile(
    r'''
    (?P<string>  """(?:\\.|[^\\])*?"{3,5} | \'\'\'.*?'{3,5} | "(?:\\.|[^"\\])*" | '[^']*' )
  | (?P<comment> \#[^\n]* )
  | (?P<newline> \n )
  | (?P<open>    [\[{] )
  | (?P<close>   [\]}] )
  | (?P<equals>  = )
  | (?P<dot>     \. )
  | (?P<bare>    [A-Za-z0-9_-]+ )
  | (?P<other>   . )
    ''',
    re.VERBOSE | re.DOTALL,
)


def array_lines(text: str, name: str, count: int) -> tuple[int, ...]:
    """Return the lines of the `count` tables of the array `[[name]]`, in order."""
    header = re.compile(rf"^[ \t]*\[\[[ \t]*{re.escape(name)}[ \t]*\]\]")
    if '"""' not in text and "'''" not in text:
        lines = tuple(number for number, line in enumerate(text.split("\n"), 1) if "[[" in line and header.match(line))
        if len(lines) == count:
            return lines
    # A line inside a string may look like a header, a header may be quoted, and the array may be inline.
    known = key_lines(text)
    return tuple(line_of(known, (name, position)) for position in range(count))


def line_of(lines: dict[Path, int], path: Path) -> int:
    """Return the line of the innermost known prefix of a path; 0 where not even its first key is known."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 0)


def key_lines(text: str) -> dict[Path, int]:
    """Return the line of every table and every key, but not of keys inside inline tables."""
    lines: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    for line, brackets, keys in _statements(text):
        if brackets == 0:
            _note(lines, table, keys, line)
            continue
        table = _resolved(keys[:-1], counts)
        last = (*table, keys[-1])
        lines.setdefault(last, line)
        if brackets == 2:
            counts[last] = counts.get(last, -1) + 1
        table = (*last, counts[last]) if last in counts else last
        _note(lines, (), table, line)
    return lines


def _note(lines: dict[Path, int], table: Path, keys: Path, line: int) -> None:
    for end in range(1, len(keys) + 1):
        lines.setdefault((*table, *keys[:end]), line)


def _resolved(keys: Path, counts: dict[Path, int]) -> Path:
    """Insert the position of the last table of each array of tables that a header's prefix names."""
    path: Path = ()
    for key in keys:
        path = (*path, key)
        if path in counts:
            path = (*path, counts[path])
    return path


def _statements(text: str) -> Iterator[tuple[int, int, Path]]:
    """Yield line, number of brackets (0 for a key) and the dotted keys of each header and each key with its value."""
    line = 1
    for statement in _lines(text):
        keys: list[str | int] = []
        brackets = 0
        for kind, word in statement:
            if kind == "equals":
                break
            if kind == "open":
                brackets += 1
            elif kind in {"bare", "string"}:
                keys.append(_unquoted(word))
        if keys:
            yield line, brackets, tuple(keys)
        line += sum(word.count("\n") for _, word in statement)


def _lines(text: str) -> Iterator[list[tuple[str, str]]]:
    """Yield the tokens of each logical line: brackets and long strings continue a line."""
    depth = 0
    tokens: list[tuple[str, str]] = []
    for token in _TOKEN.finditer(text):
        kind, word = token.lastgroup or "", token.group()
        tokens.append((kind, word))
        depth += (kind == "open") - (kind == "close")
        if kind == "newline" and depth == 0:
            yield tokens
            tokens = []
    yield tokens


def _unquoted(word: str) -> str:
    # TOML's escapes in keys are those of Python except \e, which no sane key holds.
    return str(ast.literal_eval(word)) if word[0] in "\"'" else word
