"""Owns the tests of the store: every defect is a miss with a reason, and nothing half-written is ever read.

Knows nothing of what records mean.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.spaces import clean_environment

from kerneldecl.store.keys import digest, key, manifest
from kerneldecl.store.local import NEVER, LocalStore, Miss, Record, store_stats

MANIFEST = manifest("link", {"a": 1})
RESULT = {"winner": [1, 2], "text": 'line "one"\nline two', "secs": 1.5e-4, "nested": {"x": None}}
Damage = Callable[[Path], object]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "cache")


def write(store: LocalStore, result: object = RESULT, *, is_local: bool = False) -> Path:
    written = store.write("link", MANIFEST, result, is_local=is_local)  # type: ignore[arg-type]
    return store.record_path("link", written, is_local=is_local)


def read(store: LocalStore) -> Record | Miss:
    return store.read("link", key(MANIFEST), is_local=False)


def edited(name: str, value: object) -> Damage:
    def damage(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    return damage


def without(name: str) -> Damage:
    def damage(path: Path) -> None:
        fields = json.loads(path.read_text())
        del fields[name]
        path.write_text(json.dumps(fields))

    return damage


def retold(old: str, new: str) -> Damage:
    """Edit a record by hand, and keep the form in which records are written."""

    def damage(path: Path) -> None:
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return damage


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def unreadable(path: Path) -> None:
    """Root reads what it likes, but no one reads a link to itself."""
    path.unlink()
    path.symlink_to(path.name)


DEFECTS: dict[str, tuple[Damage, str]] = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-20]), "not JSON"),
    "empty": (lambda path: path.write_bytes(b""), "not JSON"),
    "not UTF-8": (lambda path: path.write_bytes(b"\xff" * 20), "not JSON"),
    "not JSON": (lambda path: path.write_text("result = 1"), "not JSON"),
    "nested too deeply": (lambda path: path.write_text("[" * 100_000), "not JSON"),
    "not an object": (lambda path: path.write_text("[1, 2]"), "lacks fields"),
    "result changed": (edited("result", {**RESULT, "secs": 1e-9}), "changed after it was written"),
    "digest changed": (edited("digest", digest(b"")), "changed after it was written"),
    "result no object": (edited("result", [1]), "changed after it was written"),
    "manifest changed": (edited("manifest", ["a = 2"]), "another manifest"),
    "manifest no list": (edited("manifest", None), "another manifest"),
    "manifest of numbers": (edited("manifest", [1, 2]), "another manifest"),
    "other schema": (edited("schema", 99), "schema 99"),
    "other kind": (edited("kind", "lower"), "lower record"),
    "other kind in the written form": (retold('"kind": "link"', '"kind": "lower"'), "lower record"),
    "other manifest in the written form": (retold('"manifest": [', '"manifest": ["b = 1",'), "another manifest"),
    "no result": (without("result"), "lacks fields"),
    "no manifest": (without("manifest"), "lacks fields"),
    "a folder": (as_folder, "is no regular file"),
    "unreadable": (unreadable, "is no regular file"),
}


def test_a_record_comes_back_as_it_was_written(store: LocalStore) -> None:
    assert read(store) is NEVER
    write(store)
    assert read(store) == Record(key(MANIFEST), MANIFEST, RESULT)


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_of_a_record_is_a_miss_with_a_reason(store: LocalStore, defect: str) -> None:
    damage, reason = DEFECTS[defect]
    path = write(store)
    damage(path)
    found = read(store)
    assert isinstance(found, Miss)
    assert reason in found.reason
    assert found.reason.startswith(f"{store.root.name}/record/link/{path.name} ")
    assert len(store_stats(store)["damaged"]) == 1


@pytest.mark.parametrize("defect", [name for name in DEFECTS if name != "a folder"])
def test_a_defective_record_is_replaced_by_the_next_write(store: LocalStore, defect: str) -> None:
    DEFECTS[defect][0](write(store))
    write(store, {"again": 1})
    found = read(store)
    assert isinstance(found, Record)
    assert found.result == {"again": 1}


@given(cut=st.floats(0, 1, exclude_max=True))
def test_no_truncation_is_taken_for_a_record(tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    store = LocalStore(tmp_path_factory.mktemp("store"))
    path = write(store)
    content = path.read_bytes().rstrip()
    path.write_bytes(content[: int(cut * len(content))])
    assert isinstance(read(store), Miss)


def test_the_first_result_stays(store: LocalStore) -> None:
    before = write(store).read_bytes()
    assert write(store, {"other": 1}).read_bytes() == before


def test_records_of_a_detected_machine_lie_apart(store: LocalStore) -> None:
    assert write(store, is_local=True) == store.root / "local" / "link" / f"{key(MANIFEST)}.json"
    assert read(store) is NEVER
    assert write(store) == store.root / "record" / "link" / f"{key(MANIFEST)}.json"


def test_all_sound_records_of_a_kind_come_in_the_order_of_their_keys(store: LocalStore) -> None:
    texts = [manifest("link", {"a": number}) for number in range(5)]
    for text in texts:
        store.write("link", text, RESULT, is_local=False)
    store.write("link", manifest("link", {"local": 1}), RESULT, is_local=True)
    store.write("other", manifest("other", {"a": 1}), RESULT, is_local=False)
    store.record_path("link", key(texts[0]), is_local=False).write_text("{}")
    store.record_path("link", "notes", is_local=False).write_text("{}")
    assert [found.key for found in store.all("link", is_local=False)] == sorted(map(key, texts[1:]))
    assert [found.key for found in store.all("link", is_local=True)] == [key(manifest("link", {"local": 1}))]
    assert list(store.all("never", is_local=False)) == []


def test_a_record_that_is_forgotten_is_gone_from_its_part_of_the_store(store: LocalStore) -> None:
    here, apart = write(store), write(store, is_local=True)
    store.forget("link", key(MANIFEST), is_local=False)
    store.forget("link", key(MANIFEST), is_local=False)
    assert (here.exists(), apart.exists()) == (False, True)
    assert write(store, {"again": 1}) == here
    found = read(store)
    assert isinstance(found, Record)
    assert found.result == {"again": 1}


@pytest.mark.parametrize("name", ["", "../../secret", "A" * 64, "0" * 63, "0" * 65, "/etc/passwd"])
def test_what_is_no_digest_names_nothing(store: LocalStore, name: str) -> None:
    secret = store.root.parent / "secret"
    secret.write_bytes(b"secret")
    write(store)
    (store.root / "secret.json").write_bytes(b"secret")
    assert store.read("link", name, is_local=False) is NEVER
    assert not store.blobs_there()(name)
    assert isinstance(store.read_blob(name), Miss)
    assert secret.exists()


def test_a_blob_that_is_there_is_not_written_again(store: LocalStore) -> None:
    path = store.blob_path(store.write_blob(b"content"))
    before = path.stat().st_ino
    store.write_blob(b"content")
    assert path.stat().st_ino == before
    assert store_stats(store)["damaged"] == []


def test_a_reader_never_sees_half_a_record(store: LocalStore) -> None:
    """Two writers replace a record that a third keeps breaking, while a reader looks on."""
    path, done = write(store), threading.Event()
    seen: list[Record | Miss] = []

    def keep_writing(number: int) -> None:
        while not done.is_set():
            store.write("link", MANIFEST, {"writer": number, "padding": "x" * 50_000}, is_local=False)

    threads = [threading.Thread(target=keep_writing, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        path.unlink(missing_ok=True)
        seen += [read(store) for _ in range(5)]
    done.set()
    for thread in threads:
        thread.join()
    records = [found for found in seen if isinstance(found, Record)]
    assert {record.result["writer"] for record in records} <= {1, 2}
    assert all(found is NEVER for found in seen if isinstance(found, Miss))
    write(store)  # the last removal may have come after the writers' last write
    assert isinstance(read(store), Record)
    assert sorted(path.parent.iterdir()) == [path], "no temporary file is left"


KILLED = """
import os, pathlib, signal, sys
from kerneldecl.store.local import LocalStore

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(os, sys.argv[2], die)
store = LocalStore(pathlib.Path(sys.argv[1]))
store.write("link", sys.argv[3], {"a": 1}, is_local=False) if sys.argv[4] == "record" else store.write_blob(b"content")
"""


@pytest.mark.parametrize("moment", ["fchmod", "replace"])
@pytest.mark.parametrize("what", ["record", "blob"])
def test_a_write_that_is_killed_leaves_nothing_to_read(store: LocalStore, moment: str, what: str) -> None:
    command = [sys.executable, "-c", KILLED, str(store.root), moment, MANIFEST, what]
    assert subprocess.run(command, check=False, env=clean_environment()).returncode == -signal.SIGKILL
    assert read(store) is NEVER
    assert isinstance(store.read_blob(digest(b"content")), Miss)
    stats = store_stats(store)
    assert (sum(kind["count"] for kind in stats["kinds"]), stats["damaged"]) == (0, [])
    write(store)
    store.write_blob(b"content")
    assert isinstance(read(store), Record)
    assert store.read_blob(digest(b"content")) == b"content"


def test_a_blob_with_other_content_is_removed(store: LocalStore) -> None:
    blob = store.write_blob(b"content")
    store.blob_path(blob).write_bytes(b"Content")
    found = store.read_blob(blob)
    assert isinstance(found, Miss)
    assert "other content" in found.reason
    assert not store.blobs_there()(blob)
    assert store.write_blob(b"content") == blob
    assert store.read_blob(blob) == b"content"


@pytest.mark.parametrize("damage", [as_folder, unreadable])
def test_an_unreadable_blob_is_a_miss(store: LocalStore, damage: Damage) -> None:
    blob = store.write_blob(b"content")
    damage(store.blob_path(blob))
    found = store.read_blob(blob)
    assert isinstance(found, Miss)
    assert "is no regular file" in found.reason
    if damage is unreadable:
        assert not store.blobs_there()(blob), "it is removed, and made again"
        assert not store.blob_path(blob).is_symlink()


def test_files_of_the_store_can_be_read_by_others(store: LocalStore) -> None:
    """A cache that several people share, or that CI restores, is read by other users."""
    paths = [write(store), store.blob_path(store.write_blob(b"content"))]
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o644, 0o644]


def test_stats_count_records_and_blobs(store: LocalStore) -> None:
    write(store)
    write(store, is_local=True)
    blob = store.write_blob(b"content")
    counts = {kind["kind"]: kind["count"] for kind in store_stats(store)["kinds"]}
    assert counts == {"record/link": 1, "local/link": 1, "blob": 1}
    assert next(kind["bytes"] for kind in store_stats(store)["kinds"] if kind["kind"] == "blob") == 7
    store.blob_path(blob).write_bytes(b"x")
    assert len(store_stats(store)["damaged"]) == 1
    assert store.blobs_there()(blob), "counting repairs nothing"
