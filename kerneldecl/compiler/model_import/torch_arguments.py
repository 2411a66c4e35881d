"""Owns the arguments of a node that torch leaves out, since they are an operator's defaults.

Knows nothing of what any operator computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def with_defaults(given: Sequence[Any], count: int, *defaults: Any) -> tuple[Any, ...]:
    """Return the first `count` arguments, which have no default, and all others."""
    return (*given, *defaults[max(len(given) - count, 0) :])
