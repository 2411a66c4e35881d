"""Owns the functions that all benchmarks share: interleaved sampling, quantiles, the machine's description, tables and JSON.

Knows nothing of what is measured.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kerneldecl import __version__
from kerneldecl.hardware.host import detect

SCHEMA = 1
Row = Mapping[str, Any]
Sample = TypeVar("Sample")


def interleaved(samplers: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    """Return each sampler's samples. Every round calls every sampler once, so that a change of load meets all."""
    samples: dict[str, list[Sample]] = {name: [] for name in samplers}
    for _ in range(rounds):
        for name, run in samplers.items():
            samples[name].append(run())
    return samples


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 10 %, 50 % and 90 % quantiles."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(0.1 * last)], statistics.median(ordered), ordered[round(0.9 * last)]


def machine() -> dict[str, Any]:
    """Return the machine's description, with date and load."""
    arch = detect()
    return {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": arch.model,
        "cores": arch.the_cpu.cores,
        "vector_bytes": arch.the_cpu.vector_bytes,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kerneldecl": __version__,
        "load": round(os.getloadavg()[0], 2),
    }


def show_machine(described: Mapping[str, Any]) -> None:
    """Print the machine's description as one line."""
    parts = (f"{described['cpu']}, {described['cores']} cores", described["system"], f"Python {described['python']}")
    print(*parts, f"load {described['load']}", described["date"], sep="; ", flush=True)


def show(title: str, rows: Sequence[Row]) -> None:
    """Print a table. Its columns are the keys of the rows, in order of appearance; missing values stay blank."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    is_text = [any(isinstance(row.get(name), str) for row in rows) for name in names]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    print(f"\n{title}\n")
    for line in cells:
        padded = (cell.ljust(width) if left else cell.rjust(width) for cell, width, left in zip(line, widths, is_text, strict=True))
        print("  ".join(padded).rstrip(), flush=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 100 else f"{value:.0f}" if isinstance(value, float) else str(value)


def write_json(path: Path | None, described: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Write the results with the machine's description, if a path is given."""
    if path is not None:
        path.write_text(json.dumps({"schema": SCHEMA, "machine": described, **results}, indent=1) + "\n", encoding="utf-8")
