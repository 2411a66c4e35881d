"""Owns the three-dimensional convolution of volumes or videos, with an optional epilogue in the same kernel.

Knows nothing of tiles, targets or how the convolution is scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kerneldecl.rule import Extent

from .shared.convolution import ConvolutionRule


@dataclass(frozen=True, kw_only=True)
class Conv3d(ConvolutionRule):
    """Y = epilogue(conv3d(X, W)): X is [n, d, h, w, c], W is [kd, kh, kw, c / groups, f], Y is like X; or channels first."""

    d: Extent
    """Planes of a volume, or frames of a video."""
    h: Extent
    """Rows of a plane."""
    w: Extent
    """Columns of a plane."""
    kd: Extent
    """Planes of the kernel."""
    kh: Extent
    """Rows of the kernel."""
    kw: Extent
    """Columns of the kernel."""

    layout: Literal["ndhwc", "ncdhw"] = "ndhwc"
    """Order of the axes of X and Y; W is [kd, kh, kw, c / groups, f] with ndhwc, [f, c / groups, kd, kh, kw] with ncdhw."""

    def extents(self) -> tuple[tuple[int, int], ...]:
        return (self.d, self.kd), (self.h, self.kh), (self.w, self.kw)
