"""Owns the verdict on a kernel: what a worker's answer to `verify` means within a tolerance.

Knows nothing of arrays or devices; importing it imports no NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def judged(answer: Mapping[str, Any], tolerance: float) -> str:
    """Return what is wrong with a kernel that gave this answer, as a sentence; empty if nothing."""
    if "failure" in answer:
        return str(answer["failure"])
    if not answer["error"] <= tolerance:
        return why_wrong(answer["error"], tolerance) + str(answer.get("where", ""))
    if answer.get("differs"):
        return "its results differ from call to call on the same inputs; a rule whose is_repeatable() says False admits that"
    return ""


def why_wrong(error: float, tolerance: float) -> str:
    return f"wrong: relative error {error:.3g} over {tolerance:g}"
