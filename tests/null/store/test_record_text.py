"""Owns the tests of records' text: read quickly or parsed as a whole, it says the same, and damage is never read quickly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerneldecl.errors import ArtifactError
from kerneldecl.store import keys
from kerneldecl.store.keys import digest, manifest
from kerneldecl.store.local import LocalStore, Miss, Record
from kerneldecl.store.record_text import body, quickly_read, record_bytes
from kerneldecl.store.results import Lowered

MANIFEST = manifest("lower", {"attrs": {"layout": "nt", "shape": (64, 8)}})
KEY = keys.key(MANIFEST)
SPACE = {"blocks": [{"name": 'a ": b\n'}]}
SIGNATURE = {"inputs": [{"dtype": "float32", "name": "X", "shape": [64, 8]}], "outputs": []}
RESULT = {"computation": "c", "flops": 1.5, "signature": SIGNATURE, "space": SPACE, "tolerance": 0}
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), lambda v: st.lists(v, max_size=3))


@given(st.dictionaries(st.text(min_size=1), VALUES | st.dictionaries(st.text(), VALUES, max_size=3), max_size=5))
def test_the_quick_reading_is_the_whole_one(result: dict[str, Any]) -> None:
    text = record_bytes("any", MANIFEST, result)
    fields, quick = json.loads(text), quickly_read(text, "any", KEY)
    assert quick is not None
    assert (fields["result"], digest(body(result).encode())) == (result, fields["digest"])
    assert (quick.manifest, quick.result) == (MANIFEST, result)


def test_the_largest_fields_are_parsed_for_those_who_ask() -> None:
    quick = quickly_read(record_bytes("lower", MANIFEST, RESULT), "lower", KEY)
    assert quick is not None
    assert not {"space", "signature"} & quick.result.parsed.keys()  # type: ignore[attr-defined]
    assert dict(quick.result) == RESULT
    assert Lowered(quick.result).space_json == SPACE
    assert Lowered(quick.result).described() == Lowered(RESULT).described(), "an artifact's key depends on no form of a record"


def test_a_space_that_is_no_json_is_one_sentence_to_those_who_ask() -> None:
    """Whoever wrote it computed the digest, too."""
    text = record_bytes("lower", MANIFEST, RESULT).decode()
    lines = text.replace(json.dumps(SPACE, separators=(",", ":")), '{"blocks":[}')
    compact = lines.partition('"result": {\n')[2].partition("\n },")[0].replace("\n", "")
    quick = quickly_read(lines.replace(digest(body(RESULT).encode()), digest(f"{{{compact}}}".encode())).encode(), "lower", KEY)
    assert quick is not None
    with pytest.raises(ArtifactError, match="iteration space is damaged"):
        _ = Lowered(quick.result).space_json


@given(st.dictionaries(st.text(min_size=1), st.text() | st.integers(), max_size=4))
def test_a_manifest_of_any_text_is_read_as_it_was_written_or_not_quickly(attrs: dict[str, Any]) -> None:
    written = manifest("lower", {"attrs": attrs})
    quick = quickly_read(record_bytes("lower", written, RESULT), "lower", keys.key(written))
    assert quick is None or quick.manifest == written


def test_a_text_with_escapes_is_read_as_it_was_written(tmp_path: Path) -> None:
    store, written = LocalStore(tmp_path), manifest("any", {"text": 'a "b": \\c\n', "ä": 1})
    key = store.write("any", written, RESULT, is_local=True)
    assert store.read("any", key, is_local=True) == Record(key, written, RESULT)


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_a_changed_byte_of_the_result_is_not_read_quickly(place: int) -> None:
    content = record_bytes("lower", MANIFEST, {**RESULT, "filled": "x" * 400})
    at = content.index(b'"filled"') + 12 + place % 380
    assert quickly_read(b"%by%b" % (content[:at], content[at + 1 :]), "lower", KEY) is None


@pytest.mark.parametrize("place", range(90, 205, 5))
def test_a_changed_byte_of_the_manifest_is_no_record_of_its_key(place: int, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    key = store.write("any", MANIFEST, RESULT, is_local=True)
    path = store.record_path("any", key, is_local=True)
    content = path.read_bytes()
    assert place < content.index(b'"result"')
    path.write_bytes(b"%by%b" % (content[:place], content[place + 1 :]))
    assert isinstance(store.read("any", key, is_local=True), Miss)
