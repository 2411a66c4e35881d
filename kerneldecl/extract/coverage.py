"""Owns which share of a model's work standard rules do: of its functions, their operations and the bytes of their arguments.

Knows nothing of models or of how functions were counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SAVED = "tensor_ir"
"""The rule of functions that no standard rule computes."""


@dataclass(frozen=True)
class Work:
    """A function's rule, how often the model calls it, and what one call does."""

    rule: str
    calls: int
    flops: int
    bytes: int
    """Bytes of all arguments."""


@dataclass(frozen=True)
class Coverage:
    """How much of a model standard rules compute; shares are between 0 and 1."""

    functions: int
    standard: int
    """Functions of standard rules."""
    flops: float
    bytes: float

    def __str__(self) -> str:
        shares = f"{_percent(self.flops)} of the operations and {_percent(self.bytes)} of the bytes"
        return f"standard rules: {self.standard} of {self.functions} functions, {shares}"


def coverage(work: Iterable[Work]) -> Coverage:
    """Return what standard rules compute of this work; of no work they compute all."""
    functions = list(work)
    standard = [each for each in functions if each.rule != SAVED]
    return Coverage(
        functions=len(functions),
        standard=len(standard),
        flops=_share([each.calls * each.flops for each in standard], [each.calls * each.flops for each in functions]),
        bytes=_share([each.calls * each.bytes for each in standard], [each.calls * each.bytes for each in functions]),
    )


def _share(part: list[int], whole: list[int]) -> float:
    return sum(part) / sum(whole) if sum(whole) else 1.0


def _percent(share: float) -> str:
    """Return a share in percent; 100 % is all, not nearly all."""
    return f"{100 * share:.1f} %" if share in {0.0, 1.0} else f"{min(99.9, 100 * share):.1f} %"
