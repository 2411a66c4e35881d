"""Owns the list of workloads: how `workloads.txt` is read.

Knows nothing of what is frozen of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("workloads.txt")


@dataclass(frozen=True)
class Workload:
    """One line of the list, for one choice of each of its attributes."""

    text: str
    """Which names it in all frozen files: `matmul m=16 n=4096 k=4096 layout=nt`."""
    archs: tuple[str, ...]

    @property
    def rule(self) -> str:
        return self.text.split()[0]

    @property
    def attrs(self) -> dict[str, Any]:
        pairs = (word.partition("=") for word in self.text.split()[1:])
        return {name: _value(text) for name, _, text in pairs}


def read_workloads() -> list[Workload]:
    """Return all workloads, those that several archs share once."""
    archs: dict[str, list[str]] = {}
    for text, arch in _lines():
        archs.setdefault(text, []).append(arch)
    return [Workload(text, tuple(of)) for text, of in archs.items()]


def _lines() -> Iterator[tuple[str, str]]:
    archs: list[str] = []
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            archs = line.strip("[]").split()
        elif line and not line.startswith("#"):
            texts = map(" ".join, itertools.product(*map(_choices, line.split())))
            yield from itertools.product(texts, archs)


def _choices(word: str) -> list[str]:
    name, equals, values = word.partition("=")
    return [f"{name}{equals}{value}" for value in values.split("|")]


def _value(text: str) -> Any:
    if text.startswith("("):
        return tuple(_value(item) for item in text.strip("()").split(",") if item)
    if text in {"true", "false"}:
        return text == "true"
    digits = text.lstrip("-").replace(".", "", 1)
    return (float(text) if "." in text else int(text)) if digits.isdigit() else text
