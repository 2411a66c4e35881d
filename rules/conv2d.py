"""Owns the two-dimensional convolution of images, with an optional epilogue in the same kernel.

Knows nothing of tiles, targets or how the convolution is scheduled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kerneldecl.rule import Extent, Size

from .shared.convolution import ConvolutionRule


@dataclass(frozen=True, kw_only=True)
class Conv2d(ConvolutionRule):
    """Y = epilogue(conv2d(X, W)): X is [n, h, w, c], W is [kh, kw, c / groups, f], Y is [n, rows, columns, f]; or channels first."""

    h: Extent
    """Rows of an image."""
    w: Extent
    """Columns of an image."""
    kh: Extent
    """Rows of the kernel."""
    kw: Extent
    """Columns of the kernel."""
    panel: Size = 0
    """Output channels of a panel, where W is [f / panel, kh, kw, c / groups, panel]; 0 where it is not in panels."""

    layout: Literal["nhwc", "nchw"] = "nhwc"
    """Order of the axes of X and Y; W is [kh, kw, c / groups, f] with nhwc, [f, c / groups, kh, kw] with nchw."""

    def extents(self) -> tuple[tuple[int, int], ...]:
        return (self.h, self.kh), (self.w, self.kw)

    def panel_width(self) -> int:
        return self.panel

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.panel and self.f % self.panel:
            yield f"panel {self.panel} does not divide f {self.f}; write one that does"
        if self.panel and self.layout == "nchw":
            yield "panel is for layout nhwc, whose output channels are neighbours in memory; leave it out"
