"""Owns chunks of columns, as a template makes and a policy times them: how many rows each has, and which threads add them up.

Knows nothing of TVM or of how many chunks there should be.
"""

from __future__ import annotations

import math

from kerneldecl.analysis.gpu_limits import WARP_LANES

_MOST = 128
_MOST_BLOCKS = 1024
"""Columns up to which each has a block of its own in the end: a GPU starts so many blocks in 1.2 us."""


def combining_threads(columns: int) -> int:
    """Return a divisor of the columns, up to 128; or, where that is less than a warp, as many: the last block then tests bounds."""
    divisor = math.gcd(columns, _MOST)
    return divisor if divisor >= WARP_LANES else _MOST


def has_warps(columns: int) -> bool:
    """Say whether a warp adds the chunks of each column: of few columns that threads do not divide, whose loads bounds would keep apart."""
    return columns <= _MOST_BLOCKS and columns % combining_threads(columns) > 0


def chunk_rows(rows: int, chunks: int, turn: int) -> int:
    """Return the rows of each chunk of a column but the last: all of one length, or else so many whole turns that the last has fewer."""
    return rows // chunks if rows % chunks == 0 else -(-rows // (chunks * turn)) * turn
