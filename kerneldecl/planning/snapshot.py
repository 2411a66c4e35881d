"""Owns the snapshot of a workspace's sources: a copy that a build reads in their place, so that an edit meanwhile belongs to the next one.

Knows nothing of what the files mean, but for the imports of Python. Copied are workloads.toml, the plug-in folders, the files that strings
of workloads.toml name, and what all these import from the workspace.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli

from kerneldecl.plugins.find import PACKAGE, SINGULAR
from kerneldecl.plugins.meaning import meaning
from kerneldecl.store.regular import read_file
from kerneldecl.store.scratch import scratch_folder

FILE = "workloads.toml"


@contextlib.contextmanager
def snapshot(root: Path) -> Iterator[Path]:
    """Copy the sources of a workspace, and yield the folder of the copies; the workspace itself where it has no workloads.toml."""
    if not (root / FILE).is_file():
        yield root
        return
    with scratch_folder() as folder:
        to = folder.resolve()
        waiting = [FILE, *(name for kind in SINGULAR for name in _below(root, kind))]
        seen: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            content = _copied(root / name, to / name)
            waiting += _named(root, content) if name == FILE else _imported(root, name, content)
        yield to


def _below(root: Path, folder: str) -> Iterator[str]:
    """Yield the paths, from the root, of all files in a folder."""
    for place, folders, names in os.walk(root / folder, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (os.path.relpath(os.path.join(place, name), root) for name in names)  # noqa: PTH118  thousands of files


def _copied(file: Path, to: Path) -> bytes:
    """Copy a file and return its content; nothing where it cannot be read, which is told where it is wanted."""
    try:
        content = read_file(file)
    except OSError:
        return b""
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(content)
    return content


def _named(root: Path, content: bytes) -> list[str]:
    """Return the files of the workspace that strings of workloads.toml name: some are attributes or keys that stand for files."""
    try:
        document = tomli.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):  # no text, no TOML, a number too long to read: what reads it for its meaning says so
        return []
    return [name for name in set(_strings(document)) if _is_file_of(root, name)]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _is_file_of(root: Path, name: str) -> bool:
    with contextlib.suppress(ValueError, OSError):  # a null byte, a name that is too long
        inside = not os.path.isabs(name) and not os.path.normpath(name).startswith("..")  # noqa: PTH117
        return inside and (root / name).is_file()
    return False


def _imported(root: Path, name: str, content: bytes) -> list[str]:
    """Return the files of the workspace that a Python file imports, seen from its own folder, those above it, and the workspace."""
    if not name.endswith(".py"):
        return []
    parents = [parent.as_posix() for parent in Path(name).parents]
    found: list[str] = []
    for module, level in meaning(content).imports:
        parts = module.split(".")
        if parts[0] == PACKAGE.name and not level:
            continue
        for base in parents[level - 1 : level] if level else parents:
            found += _module_files(root, base, parts)
    return found


def _module_files(root: Path, base: str, parts: Sequence[str]) -> Iterator[str]:
    for end in range(1, len(parts) + 1):
        stem = os.path.normpath("/".join((base, *parts[:end])))
        yield from (path for path in (f"{stem}/__init__.py", f"{stem}.py") if (root / path).is_file())
