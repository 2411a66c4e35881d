"""An overlay reads what it was given before what lies below, and leaves the store below as it is."""

from __future__ import annotations

from pathlib import Path

from kerneldecl.store.keys import key, manifest
from kerneldecl.store.local import NEVER, LocalStore, Record
from kerneldecl.store.overlay import Overlay

BELOW, ABOVE = manifest("any", {"rule": "below"}), manifest("any", {"rule": "above"})


def listed(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


def test_what_is_written_is_read_here_alone(tmp_path: Path) -> None:
    below = LocalStore(tmp_path)
    below.write("any", BELOW, {"n": 1}, is_local=False)
    before, overlay = listed(tmp_path), Overlay(below)
    new = overlay.write("any", ABOVE, {"n": 2}, is_local=False)
    assert overlay.read("any", new, is_local=False) == Record(key(ABOVE), ABOVE, {"n": 2})
    assert overlay.read("any", key(BELOW), is_local=False) == Record(key(BELOW), BELOW, {"n": 1})
    assert [record.manifest for record in overlay.all("any", is_local=False)] == sorted([ABOVE, BELOW], key=key)
    assert overlay.read("any", new, is_local=True) == NEVER
    assert below.read("any", new, is_local=False) == NEVER
    assert listed(tmp_path) == before


def test_what_is_forgotten_here_is_what_lies_below(tmp_path: Path) -> None:
    overlay = Overlay(LocalStore(tmp_path))
    again = overlay.write("any", ABOVE, {"n": 1}, is_local=False)
    overlay.write("any", ABOVE, {"n": 2}, is_local=False)  # a sound record stays
    assert overlay.read("any", again, is_local=False) == Record(again, ABOVE, {"n": 1})
    overlay.forget("any", again, is_local=False)
    assert overlay.read("any", again, is_local=False) == NEVER
