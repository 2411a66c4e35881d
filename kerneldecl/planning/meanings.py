"""Owns what a build leaves of the meaning of plug-ins' files, so that the next command need not cut them into tokens again.

Knows nothing of plans. Entries are found by the digest of a file's bytes: an edited file has none. Losing the file costs time alone.
"""

from __future__ import annotations

from pathlib import Path

from kerneldecl.plugins.digest import Reading, Told
from kerneldecl.store.checked import read_checked, write_checked

FILE = "meanings.json"
SCHEMA = 1


def read_meanings(path: Path) -> Reading:
    """Return a reading that knows what an earlier build has found; one that knows nothing where there is no such file or it is damaged."""
    found = read_checked(path, SCHEMA) or {}
    return Reading(known={key: Told(digest, tuple(map(tuple, imports)), without) for key, (digest, imports, without) in found.items()})


def write_meanings(path: Path, reading: Reading) -> None:
    """Keep what was read, where anything is new."""
    if reading.has_learned:
        write_checked(path, SCHEMA, {key: told for key, told in reading.known.items() if key in reading.used})
