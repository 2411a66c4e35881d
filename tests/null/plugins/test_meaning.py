"""Owns the tests of what a source means: what may change without changing it, what may not, and what it imports.

Knows nothing of digests of whole plug-ins.
"""

from __future__ import annotations

import ast
import io
import random
import tokenize
from collections.abc import Callable
from pathlib import Path

import pytest
from support.repository import REPOSITORY

from kerneldecl.plugins.meaning import meaning

SOURCE = '''\
"""Of the module."""

import math  # the field's


def area(radius, unit="m"):
    """Return the area."""
    if radius > 0:
        return (math.pi *
                radius ** 2), f"{unit}2 # no comment"
    return 0.0
'''
FILES = sorted(path for folder in ("kerneldecl", "rules") for path in (REPOSITORY / folder).rglob("*.py"))
SAME: dict[str, Callable[[str], str]] = {
    "comment": lambda text: text.replace("field's", "library's") + "# the end\n",
    "docstring": lambda text: text.replace("Return the area.", "Other\n    words."),
    "docstring removed": lambda text: text.replace('    """Return the area."""\n', ""),
    "blank lines": lambda text: text.replace("\n", "\n\n").replace("*\n\n", "*\n"),
    "indentation": lambda text: text.replace("    ", "\t"),
    "line ends": lambda text: text.replace("\n", "\r\n"),
    "spaces": lambda text: text.replace("> 0", ">0").replace("(radius, ", "( radius , "),
    "joined lines": lambda text: text.replace("radius > 0", "radius \\\n  > 0"),
    "byte order mark": lambda text: "\ufeff" + text,
}
OTHER: dict[str, Callable[[str], str]] = {
    "number": lambda text: text.replace("** 2", "** 3"),
    "string": lambda text: text.replace("no comment", "a comment"),
    "block": lambda text: text.replace("    return 0.0", "        return 0.0"),
    "operator": lambda text: text.replace("> 0", ">= 0"),
    "default": lambda text: text.replace('"m"', '"mm"'),
    "statement": lambda text: text.replace("    return 0.0\n", ""),
}


@pytest.mark.parametrize("edit", SAME.values(), ids=SAME)
def test_comments_docstrings_and_layout_mean_nothing(edit: Callable[[str], str]) -> None:
    edited = edit(SOURCE)
    assert edited != SOURCE
    compile(edited.encode(), "edited", "exec")
    assert meaning(edited.encode()) == meaning(SOURCE.encode())


@pytest.mark.parametrize("edit", OTHER.values(), ids=OTHER)
def test_everything_else_means_something(edit: Callable[[str], str]) -> None:
    edited = edit(SOURCE)
    compile(edited, "edited", "exec")
    assert meaning(edited.encode()).digest != meaning(SOURCE.encode()).digest


@pytest.mark.parametrize("path", FILES[:: max(1, len(FILES) // 40)], ids=lambda path: path.stem)
def test_a_token_of_any_file_that_changes_is_seen_and_its_comments_are_not(path: Path) -> None:
    source = path.read_bytes()
    before = meaning(source)
    tokens = list(tokenize.tokenize(io.BytesIO(source).readline))
    lines = source.decode().splitlines(keepends=True)
    for token in reversed([token for token in tokens if token.type == tokenize.COMMENT]):
        line = lines[token.start[0] - 1]
        lines[token.start[0] - 1] = line[: token.start[1]] + "# another" + line[token.end[1] :]
    assert meaning("".join(lines).encode()) == before
    named = [token for token in tokens if token.type in {tokenize.NAME, tokenize.NUMBER}]
    for token in random.Random(0).sample(named, min(5, len(named))):
        line, column = token.start
        edited = [*source.decode().splitlines(keepends=True)]
        edited[line - 1] = f"{edited[line - 1][:column]}x{edited[line - 1][column:]}"
        assert meaning("".join(edited).encode()).digest != before.digest


def test_docstrings_that_somebody_reads_mean_something() -> None:
    first, second = (f'"""{word}"""\nVERSION = __doc__\n'.encode() for word in ("one", "two"))
    assert meaning(first).digest != meaning(second).digest


@pytest.mark.parametrize(
    "source", [b'x = f"{d["#"]}"\n', b'x = f"{ "" + "#" }"\n', b"# coding: latin-1\nx = 1 # \xe4\n", b"# -*- coding: cp1252 -*-\nx = 1\n"]
)
def test_where_tokens_are_uncertain_every_byte_counts(source: bytes) -> None:
    assert meaning(source).digest != meaning(source.replace(b"#", b"# ", 1)).digest


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda folder: str(folder.relative_to(REPOSITORY)))
def test_imports_are_those_that_pythons_parser_finds(folder: Path) -> None:
    files = sorted(folder.glob("*.py"))
    assert files
    assert {file: set(meaning(file.read_bytes()).imports) for file in files} == {file: parsed_imports(file) for file in files}


def parsed_imports(path: Path) -> set[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, 0) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
            found |= {(name, node.level) for name in (node.module, *names) if name}
    return found


def test_imports_in_unusual_places_are_found() -> None:
    source = b"if x: import a; from . import (b as c,\n  d,)\ntry: from ..e.f import *\nexcept E: import g.h as i, j\n"
    assert set(meaning(source).imports) == {("a", 0), ("b", 1), ("d", 1), ("e.f", 2), ("e.f.*", 2), ("g.h", 0), ("j", 0)}


def test_a_source_of_a_python_that_is_not_here_has_the_meaning_it_has_there() -> None:
    # The digest stands in committed keys, whatever release of Python made them.
    assert meaning(b"x: int = 1  # one\n").digest == meaning(b'"""X."""\nx:int=1\n').digest
    assert meaning(b"def f[T](x: T) -> T:\n    return x\n").digest != meaning(b"def f[S](x: S) -> S:\n    return x\n").digest
