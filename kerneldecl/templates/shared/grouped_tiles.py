"""Owns what kernels of a grouped GEMM have in common: the segments of rows, and which tiles there are.

Knows nothing of instructions or of the kernel's statements.

Rows come in segments: one for each group, and rows of no group, whose results are zero: one behind the last group, or with places for each
group one behind each. A tile has rows of one segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from kerneldecl.compiler.matmul_grouped import GroupedSpec


@dataclass(frozen=True)
class GroupedTiles:
    """A kernel as its tile scheduler sees it."""

    spec: GroupedSpec

    @property
    def tile(self) -> tuple[int, int, int]:
        """Return the rows and columns of a cluster's tile, and the rows of tiles before the next column of them."""
        raise NotImplementedError

    @property
    def threads(self) -> int:
        """Return the threads of a CTA."""
        raise NotImplementedError

    @property
    def clusters(self) -> int:
        """Return how many clusters are launched: as many as run at once."""
        raise NotImplementedError

    @property
    def segments(self) -> int:
        return 2 * self.spec.groups if self.spec.is_masked else self.spec.groups + 1

    @property
    def columns(self) -> int:
        """Return how many clusters' tiles are side by side."""
        return -(-self.spec.n // self.tile[1])

    def rows_of(self, sizes: Any, segment: Any) -> tuple[Any, Any]:
        """Return a segment's first row and the one behind its last, which are in bounds whatever sizes hold."""
        groups, rows = self.spec.groups, self.spec.rows

        def size(at: Any) -> Any:
            return tirx.max(tirx.min(sizes[at], rows), 0)

        if self.spec.is_masked:
            group = segment % groups
            used = group * rows + size(group)
            return tirx.if_then_else(segment < groups, group * rows, used), tirx.if_then_else(segment < groups, used, group * rows + rows)
        first = tirx.if_then_else(segment > 0, size(tirx.max(segment - 1, 0)), 0)
        return first, tirx.if_then_else(segment < groups, tirx.max(first, size(tirx.min(segment, groups - 1))), rows)
