"""Owns the names under which people look for operators that another rule computes.

Knows nothing of what the rules are: a file lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import tomli

_FILE = Path(__file__).with_suffix(".toml")


@functools.cache
def operator_names() -> Mapping[str, tuple[str, str]]:
    """Return for each name the rule that computes it, and with which attributes, as a phrase."""
    return {name: (entry["rule"], entry["with"]) for name, entry in tomli.loads(_FILE.read_text(encoding="utf-8")).items()}


def names_of(rule: str) -> tuple[str, ...]:
    """Return the other names under which a rule is looked for."""
    return tuple(name for name, (known, _) in operator_names().items() if known == rule)
