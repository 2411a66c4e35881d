"""Owns workloads.lock: what the last build produced, as text that is reviewed beside workloads.toml.

Knows nothing of how it was produced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tomli

from kerneldecl.model import Arch, Candidate, Workload, frozen
from kerneldecl.planning.plan import is_measured
from kerneldecl.store.local import Record

HEAD = "# Written by `kerneldecl build`: what each declared arch's entries were tuned to. Commit it; do not edit it.\n"


def lock_text(name: str, version: str, toolchain: dict[str, str], entries: Iterable[tuple[Workload, Arch, Record]]) -> str:
    """Return the lock: a block for each entry, sorted by name. Entries of a detected arch hold for one machine and stay out."""
    locked = sorted((workload.entry, record) for workload, arch, record in entries if not arch.is_detected)
    tools = "".join(f'{tool} = "{version}"\n' for tool, version in sorted(toolchain.items()))
    head = f'{HEAD}schema = 1\n\n[artifact]\nname = "{name}"\nversion = "{version}"\n\n[toolchain]\n{tools}'
    return head + "".join(f"\n{_block(entry, record)}" for entry, record in locked)


def _block(entry: str, record: Record) -> str:
    result = record.result
    return "".join(
        [
            "[[entry]]\n",
            f'name = "{entry}"\n',
            f'key = "{record.key}"\n',
            f'winner = "{_candidate(result["winner"])}"\n',
            f"time_us = {result['run_secs'] * 1e6:.4g}\n" if is_measured(record) else "unmeasured = true\n",
            f'object = "{result["code"]}"\n',
        ]
    )


def unmeasured_keys(text: str) -> frozenset[str]:
    """Return the keys of the entries that a lock holds unmeasured; none where the text is no lock."""
    try:
        entries = tomli.loads(text).get("entry", [])
    except tomli.TOMLDecodeError:
        return frozenset()
    return frozenset(entry["key"] for entry in entries if entry.get("unmeasured"))


def _candidate(json: Any) -> str:
    return shown(Candidate.from_json(json))


def shown(candidate: Candidate) -> str:
    """Return a candidate in one line: `cpu_matmul(m=14 n=32)`."""
    params = " ".join(f"{name}={_value(value)}" for name, value in candidate.params)
    return f"{candidate.template}({params})"


def _value(value: Any) -> str:
    value = frozen(value)
    return "x".join(_value(item) for item in value) or "none" if isinstance(value, tuple) else str(value).lower()
