"""Owns workloads.lock: what the last build produced, as text that is reviewed beside workloads.toml.

Knows nothing of how it was produced.
"""

from __future__ import annotations

from collections.abc import Iterable

import tomli

from kerneldecl.model import Arch, Workload
from kerneldecl.store.results import TuneResult

HEAD = "# Written by `kerneldecl build`: what each declared arch's entries were tuned to. Commit it; do not edit it.\n"


def lock_text(name: str, version: str, toolchain: dict[str, str], entries: Iterable[tuple[Workload, Arch, TuneResult]]) -> str:
    """Return the lock: a block for each entry, sorted by name. Entries of a detected arch hold for one machine and stay out."""
    locked = sorted((workload.entry, record) for workload, arch, record in entries if not arch.is_detected)
    tools = "".join(f'{tool} = "{version}"\n' for tool, version in sorted(toolchain.items()))
    head = f'{HEAD}schema = 1\n\n[artifact]\nname = "{name}"\nversion = "{version}"\n\n[toolchain]\n{tools}'
    return head + "".join(f"\n{_block(entry, record)}" for entry, record in locked)


def _block(entry: str, record: TuneResult) -> str:
    return "".join(
        [
            "[[entry]]\n",
            f'name = "{entry}"\n',
            f'key = "{record.key}"\n',
            f'winner = "{record.winner}"\n',
            f"time_us = {record.run_secs * 1e6:.4g}\n" if record.is_measured else "unmeasured = true\n",
            f'object = "{record.blobs["object"]}"\n',
        ]
    )


def unmeasured_keys(text: str) -> frozenset[str]:
    """Return the keys of the entries that a lock holds unmeasured; none where the text is no lock."""
    try:
        entries = tomli.loads(text).get("entry", [])
    except tomli.TOMLDecodeError:
        return frozenset()
    return frozenset(entry["key"] for entry in entries if entry.get("unmeasured"))
