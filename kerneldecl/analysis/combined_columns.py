"""Owns how many threads a block has that adds the chunks of columns, a thread each: what its template makes and its policy times.

Knows nothing of TVM or of how chunks come about.
"""

from __future__ import annotations

import math

from kerneldecl.analysis.gpu_limits import WARP_LANES

_MOST = 128


def combining_threads(columns: int) -> int:
    """Return a divisor of the columns, up to 128; or, where that is less than a warp, as many: the last block then tests bounds."""
    divisor = math.gcd(columns, _MOST)
    return divisor if divisor >= WARP_LANES else _MOST
