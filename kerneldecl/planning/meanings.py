"""Owns what a build leaves of the meaning of plug-ins' files, so that the next command need not cut them into tokens again.

Knows nothing of plans. Entries are found by the digest of a file's bytes: an edited file has none. Losing the file costs time alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kerneldecl.plugins.digest import Reading, Told
from kerneldecl.store.files import write_whole

FILE = "meanings.json"
SCHEMA = 1


def read_meanings(path: Path) -> Reading:
    """Return a reading that knows what an earlier build has found; one that knows nothing where there is no such file or it is damaged."""
    try:
        fields = json.loads(path.read_bytes())
        known = {content: _told(found) for content, found in fields["files"].items()} if fields["schema"] == SCHEMA else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        known = {}
    return Reading(known=known)


def _told(found: Any) -> Told:
    digest, imports, without = found
    told = Told(digest, tuple((module, level) for module, level in imports), dict(without))
    texts = [told.digest, *(module for module, _ in told.imports), *told.without, *told.without.values()]
    if not all(type(text) is str for text in texts) or not all(type(level) is int for _, level in told.imports):
        raise TypeError(found)
    return told


def write_meanings(path: Path, reading: Reading) -> None:
    """Keep what was read, where anything is new."""
    if reading.has_learned:
        files = {content: told for content, told in reading.known.items() if content in reading.used}
        write_whole(path, json.dumps({"schema": SCHEMA, "files": files}, separators=(",", ":")), durable=False)
