"""Owns the numbers that a rule gives beside its computation, checked: operations, bytes and the tolerance.

Knows nothing of TVM.
"""

from __future__ import annotations

import math

from kerneldecl.limits import MOST_TOLERANCE
from kerneldecl.rule import Rule


def rule_numbers(rule: Rule) -> dict[str, float]:
    """Return `flops`, `least_bytes` and `tolerance` of a rule; raise ValueError where no record can hold one, or any kernel would pass."""
    found = {name: _number(rule, name) for name in ("flops", "least_bytes", "tolerance")}
    if found["tolerance"] > MOST_TOLERANCE:
        expected = f"expected a number from 0 to {MOST_TOLERANCE:g}: any kernel would pass"
        raise ValueError(f"tolerance() is {found['tolerance']:g}; {expected}")
    return found


def _number(rule: Rule, method: str) -> float:
    """Return what a rule's method gives; raise ValueError where no record can hold it."""
    value = getattr(rule, method)()
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"{type(rule).__name__}.{method}() returns {value!r:.80}; expected a Python number of at least 0")
    return value
