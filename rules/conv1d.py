"""Owns the one-dimensional convolution of sequences, with an optional epilogue in the same kernel.

Knows nothing of tiles, targets or how the convolution is scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kerneldecl.rule import Extent

from .shared.convolution import ConvolutionRule


@dataclass(frozen=True, kw_only=True)
class Conv1d(ConvolutionRule):
    """Y = epilogue(conv1d(X, W)): X is [n, w, c], W is [kw, c / groups, f], Y is [n, columns, f]; or [n, c, w], [f, c / groups, kw]."""

    w: Extent
    """Elements of a sequence."""
    kw: Extent
    """Elements of the kernel."""

    layout: Literal["nwc", "ncw"] = "nwc"
    """Order of the axes of X and Y; W is [kw, c / groups, f] with nwc, [f, c / groups, kw] with ncw."""

    def extents(self) -> tuple[tuple[int, int], ...]:
        return ((self.w, self.kw),)
