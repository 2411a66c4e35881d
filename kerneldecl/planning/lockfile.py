"""Owns workloads.lock: what the last build produced, as text that is reviewed beside workloads.toml.

Knows nothing of how it was produced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tomli

from kerneldecl.declare.imports import Import
from kerneldecl.model import Arch, Workload
from kerneldecl.store.inside import is_digest
from kerneldecl.store.results import TuneResult

Locked = tuple[Workload, Arch, TuneResult | str]
"""An entry with its record, or, where it has failed, with the key under which it has none."""
_UNMEASURED = ("unmeasured", "measured", "unverified")
"""Keys of a lock's entries that a device may find otherwise."""
_TIMED = re.compile(r'^name = "(.*)"$(?:\n(?!\[|time_us).*)*\ntime_us = (\d+(?:\.\d+)?(?:e[+-]?\d+)?)$', re.MULTILINE)
HEAD = "# Written by `kerneldecl build`: what each declared arch's entries were tuned to. Commit it; do not edit it.\n"


def lock_text(artifact: tuple[str, str], toolchain: Mapping[str, str], entries: Iterable[Locked], imports: Iterable[Import] = ()) -> str:
    """Return the lock: a block for each import and each entry. Entries of a detected arch hold for one machine and stay out.

    `artifact` is the declared name and version.
    """
    name, version = artifact
    locked = sorted((workload.entry, found) for workload, arch, found in entries if not arch.is_detected)
    tools = "".join(f'{tool} = "{version}"\n' for tool, version in sorted(toolchain.items()))
    head = f'{HEAD}schema = 1\n\n[artifact]\nname = "{name}"\nversion = "{version}"\n\n[toolchain]\n{tools}'
    head += "".join(f'\n[import.{each.name}]\nurl = "{each.url}"\ndigest = "sha256:{each.digest}"\n' for each in imports)
    return head + "".join(f"\n{_block(entry, found)}" for entry, found in locked)


def _block(entry: str, record: TuneResult | str) -> str:
    if isinstance(record, str):
        # Without the reason: it may name what differs from one machine to the next.
        return f'[[entry]]\nname = "{entry}"\nkey = "{record}"\nmissing = true\n'
    return "".join(
        [
            "[[entry]]\n",
            f'name = "{entry}"\n',
            f'key = "{record.key}"\n',
            f'winner = "{record.winner}"\n',
            f"time_us = {record.run_secs * 1e6:.4g}\n" if record.is_measured else "unmeasured = true\n",
            f'measured = "{record.coverage}"\n' if record.coverage else "",
            "unverified = true\n" if record.is_measured and not record.is_verified else "",
            f'object = "{record.blobs["object"]}"\n',
        ]
    )


def keys_by_entry(text: str) -> dict[str, str]:
    """Return the key of each entry that a lock holds, by name and target; none where the text is no lock."""
    return {str(entry["name"]): str(entry["key"]) for entry in _entries(text) if "name" in entry}


def pins(text: str) -> dict[str, Import]:
    """Return the imports of a lock by name; none where the text is no lock."""
    try:
        tables = tomli.loads(text).get("import", {})
        found = {
            str(name): Import(str(name), str(each["url"]), str(each["digest"]).removeprefix("sha256:")) for name, each in tables.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
    return {name: each for name, each in found.items() if is_digest(each.digest)}


def pinned(declared: Sequence[Import], text: str) -> tuple[Import, ...]:
    """Return the declared imports, those without a digest with the one that a lock has for the same URL."""
    known = pins(text) if declared else {}
    found = (known.get(each.name, each) for each in declared)
    return tuple(each if each.digest or pin.url != each.url else pin for each, pin in zip(declared, found, strict=True))


def unmeasured_keys(text: str) -> frozenset[str]:
    """Return the keys of the entries that a lock holds in want of measurements; none where the text is no lock."""
    return _keys_with(text, _UNMEASURED)


def unsettled_keys(text: str) -> frozenset[str]:
    """Return the keys of the entries that a lock holds as missing, or in want of measurements; none where the text is no lock."""
    return _keys_with(text, ("missing", *_UNMEASURED))


def locked_entries(text: str) -> list[dict[str, Any]] | None:
    """Return the entries of a lock, each with name and key; None where the text is no lock."""
    entries = _entries(text)
    is_lock = text.startswith(HEAD) and all(isinstance(entry.get("name"), str) for entry in entries)
    return entries if is_lock else None


def times_of(text: str) -> dict[str, float]:
    """Return the seconds of each measured entry of a lock by name.

    It reads the lines that `lock_text` writes, and no TOML: a history has dozens of locks.
    """
    found = ((name, float(time_us) * 1e-6) for name, time_us in _TIMED.findall(text))
    return {name: secs for name, secs in found if 0 < secs < math.inf}


def _keys_with(text: str, marks: Sequence[str]) -> frozenset[str]:
    return frozenset(str(entry["key"]) for entry in _entries(text) if any(entry.get(mark) for mark in marks))


def _entries(text: str) -> list[dict[str, Any]]:
    try:
        entries = tomli.loads(text).get("entry", [])
        return entries if all(isinstance(entry, dict) and "key" in entry for entry in entries) else []
    except (ValueError, TypeError, RecursionError):  # no TOML, or another's
        return []
