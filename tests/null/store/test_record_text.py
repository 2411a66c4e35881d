"""Owns the tests of records' text: read quickly or parsed as a whole, it says the same, and damage is never read quickly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerneldecl.errors import ArtifactError
from kerneldecl.store.keys import digest, manifest
from kerneldecl.store.record_text import body, quickly_read, record_text
from kerneldecl.store.results import Lowered

MANIFEST = manifest("lower", {"attrs": {"text": 'a "b": c\n'}})
SPACE = {"blocks": [{"name": 'a ": b\n'}]}
RESULT = {"computation": "c", "flops": 1.5, "space": SPACE, "tolerance": 0}
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), lambda v: st.lists(v, max_size=3))


@given(st.dictionaries(st.text(min_size=1), VALUES | st.dictionaries(st.text(), VALUES, max_size=3), max_size=5))
def test_the_quick_reading_is_the_whole_one(result: dict[str, Any]) -> None:
    text = record_text("any", MANIFEST, result)
    fields, quick = json.loads(text), quickly_read(text, "any")
    assert quick is not None
    assert (fields["result"], digest(body(result).encode())) == (result, fields["digest"])
    assert (quick.kind, quick.manifest, quick.result) == ("any", MANIFEST, result)


def test_the_largest_field_is_parsed_for_those_who_ask() -> None:
    quick = quickly_read(record_text("lower", MANIFEST, RESULT), "lower")
    assert quick is not None
    assert "space" not in quick.result.parsed  # type: ignore[attr-defined]
    assert dict(quick.result) == RESULT
    assert Lowered(quick.result).space_json == SPACE


def test_a_space_that_is_no_json_is_one_sentence_to_those_who_ask() -> None:
    """Whoever wrote it computed the digest, too."""
    text = record_text("lower", MANIFEST, RESULT)
    lines = text.replace(json.dumps(SPACE, separators=(",", ":")), '{"blocks":[}')
    compact = lines.partition('"result": {\n')[2].partition("\n },")[0].replace("\n", "")
    quick = quickly_read(lines.replace(digest(body(RESULT).encode()), digest(f"{{{compact}}}".encode())), "lower")
    assert quick is not None
    with pytest.raises(ArtifactError, match="iteration space is damaged"):
        _ = Lowered(quick.result).space_json


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_a_changed_byte_of_the_result_is_not_read_quickly(place: int) -> None:
    text = record_text("lower", MANIFEST, {**RESULT, "filled": "x" * 400})
    at = text.index('"filled"') + 12 + place % 380
    assert quickly_read(f"{text[:at]}y{text[at + 1 :]}", "lower") is None
