"""Owns the tests of how workloads.toml is read without parsing what is known of it: as if all of it were parsed, whatever was edited."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerneldecl.null_build.tables import known_texts, parse, read_tables, table_digest

HEADS = [
    "edition = 1\n",
    "edition = 2\n",
    "",
    'text = """\n[[workload]]\n"""\n',
    "workload = []\n",
    "workload = 5\n",
    "[workload]\na = 1\n",
]
PARTS = [
    '[[workload]]\nname = "a"\n',
    '[[workload]]\nname = "b" # one\n',
    '[[workload]]\nname = "b" # two\n',
    " [[ workload ]]\nn = [\n  [1, 2],\n[3, 4]]\n\n",
    "[[workload]]\nm = 1\n[[workload.cases]]\nn = 2\n",
    "[[workload]]\nm = 2\n[target.box]\narch = 1\n",
    "[[workload]]\nm = 3\n# [[workload]]\n",
    "[[workload]]\nm = 4\nm = 5\n",
    "[[workload]]\nm = [\n",
    '[[workload]]\nm = "no end\n',
    "[[workload]]\nm = '''\n[[workload]]\nn = 1\n'''\n",
    '[["workload"]]\nm = 6\n',
    "[[workload]]",
    "[target.box]\narch = 2\n",
]
FILES = st.tuples(st.sampled_from(HEADS), st.lists(st.sampled_from(PARTS), max_size=4)).map(lambda file: file[0] + "".join(file[1]))


def tables_of(document: dict[str, Any] | None) -> list[Any]:
    found = document.get("workload") if document else None
    return found if isinstance(found, list) else []


@given(FILES, FILES)
def test_a_file_is_read_as_if_nothing_was_known_of_it(before: str, after: str) -> None:
    earlier, whole = parse(before), parse(after)
    read = read_tables(after, known_texts(before, tables_of(earlier)) if earlier else {})
    if read is None:
        assert whole is None or not all(isinstance(table, dict) for table in tables_of(whole)) or not tables_of(whole) or '[["' in after
        return
    assert whole is not None
    assert [digest for digest, _ in read.listed] == [table_digest(table) for table in tables_of(whole)]
    assert [table for _, table in read.listed if table is not None] == tables_of(dict(read.document))
    assert {**read.document, "workload": None} == {**whole, "workload": None}


@pytest.mark.parametrize("part", PARTS[:7])
def test_a_text_that_is_known_is_not_parsed(part: str) -> None:
    text = f"edition = 1\n{part}"
    whole = parse(text)
    assert whole is not None
    known = known_texts(text, whole["workload"])
    read = read_tables(text, known)
    assert read is not None
    is_alone = "target" not in part
    assert [table is None for _, table in read.listed] == [is_alone]
