"""Owns the tests of a source's parts: each edit is told of the definition that it is in, and of no other.

Knows nothing of what parts are for.
"""

from __future__ import annotations

import pytest

from kerneldecl.plugins.definitions import definitions

SOURCE = '''\
"""A module."""
import math
from pathlib import Path

LIMIT: int = 4
if LIMIT > 3:
    LIMIT = 3


@dataclass(frozen=True)
class Scale(Rule):
    """A class."""

    n: int = 1

    def lower(self):
        def inner():
            return 1

        return inner()

    @property
    def size(self): return self.n

    async def wait(self):
        pass


def free(x):
    if x:
        return 1
    return 2
'''
EDITS = {
    "imports": ("import math", "import cmath"),
    "constant LIMIT": ("LIMIT: int = 4", "LIMIT: int = 5"),
    "top-level code": ("    LIMIT = 3", "    LIMIT = 2"),
    "class Scale": ("n: int = 1", "n: int = 2"),
    "function Scale.lower": ("            return 1", "            return 2"),
    "function Scale.size": ("@property", "@cached_property"),
    "function Scale.wait": ("pass", "return"),
    "function free": ("    return 2", "    return 3"),
}


def test_a_source_has_its_definitions() -> None:
    assert definitions(SOURCE.encode()).keys() == EDITS.keys()


@pytest.mark.parametrize("part", EDITS)
def test_an_edit_is_in_one_part(part: str) -> None:
    old, new = EDITS[part]
    assert SOURCE.count(old) == 1
    before, after = definitions(SOURCE.encode()), definitions(SOURCE.replace(old, new).encode())
    assert {name for name in before if before[name] != after[name]} == {part}


def test_a_class_is_told_of_its_decorator() -> None:
    after = definitions(SOURCE.replace("frozen=True", "frozen=False").encode())
    assert {name for name, held in definitions(SOURCE.encode()).items() if after[name] != held} == {"class Scale"}


def test_comments_docstrings_and_layout_are_in_no_part() -> None:
    text = SOURCE.replace("A class.", "Another.").replace("\n    if x:\n        return 1", "\n    if x:  # always\n\n          return 1")
    assert text != SOURCE
    assert definitions(text.encode()) == definitions(SOURCE.encode())


@pytest.mark.parametrize("source", [b"", b"\xff\xfe", b"class", b"def", b"@x", b"@x\n@y\n", b"async", b"class C:\n  def", b"x =", b"(("])
def test_what_is_no_python_has_parts_or_none(source: bytes) -> None:
    assert all(isinstance(held, str) for held in definitions(source).values())
