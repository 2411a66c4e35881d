"""Owns files of JSON that are believed as they were written or not at all: a digest of the rest stands in the first line.

Knows nothing of what they hold. They are left by a build for the next command, and losing one costs time alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kerneldecl.store.files import write_whole
from kerneldecl.store.keys import digest
from kerneldecl.store.regular import read_file


def write_checked(path: Path, schema: int, value: Any) -> None:
    """Write a value of a schema."""
    text = json.dumps(value, separators=(",", ":"))
    write_whole(path, f"{_digest(schema, text)}\n{text}", durable=False)


def read_checked(path: Path, schema: int) -> Any:
    """Return the value; None where there is no such file, where it is of another schema, or is not as it was written."""
    try:
        first, _, text = read_file(path).decode().partition("\n")
        return json.loads(text) if first == _digest(schema, text) else None
    except (OSError, ValueError, RecursionError):
        return None


def _digest(schema: int, text: str) -> str:
    return digest(f"{schema} {text}".encode())
