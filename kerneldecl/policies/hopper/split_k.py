"""Owns among how many CTAs of a cluster to try to split a reduction on wgmma.

Knows nothing of tiles or of time.
"""

from __future__ import annotations

from kerneldecl.analysis.hopper_limits import MAX_SPLIT_K, MAX_WORKSPACE_SPLIT_K
from kerneldecl.model import Gpu
from kerneldecl.policies.gpu_reduce import largest_divisor
from kerneldecl.policies.hopper.time_model import resident_clusters

POWERS_OF_2 = (2, 4, 8)
MIN_K_TILES = 2
"""K-tiles of each part at least."""
MIN_WORKSPACE_K_TILES = 4
"""The same where partial accumulators go through global memory."""
MAX_WAVES = 2
"""Waves that the CTAs of all parts make at most."""


def split_k_choices(gpu: Gpu, tiles: int, k_tiles: int) -> list[int]:
    """Return the numbers of parts to try, in ascending order: powers of 2, and the most with which all tiles run at once.

    All parts but the last have equally many k-tiles, and none has nothing.
    """
    filling = max((parts for parts in range(2, MAX_SPLIT_K + 1) if tiles <= resident_clusters(gpu, parts)), default=2)
    return [parts for parts in sorted({filling, *POWERS_OF_2}) if tiles * parts <= MAX_WAVES * gpu.sm_count and _is_long(k_tiles, parts)]


def workspace_choices(gpu: Gpu, tiles: int, k_tiles: int, *, is_even: bool = False) -> list[int]:
    """Return the numbers of parts to try where partial accumulators go through global memory: what fills the SMs once, and half of that.

    With `is_even` all parts have equally many k-tiles; else the last one may have fewer.
    """
    found = set()
    for filling in (gpu.sm_count // tiles, gpu.sm_count // tiles // 2):
        most = min(filling, MAX_WORKSPACE_SPLIT_K, k_tiles // MIN_WORKSPACE_K_TILES)
        if most >= 2:
            found.add(largest_divisor(k_tiles, most) if is_even else -(-k_tiles // -(-k_tiles // most)))
    return sorted(found - {1})


def _is_long(k_tiles: int, parts: int) -> bool:
    return k_tiles // parts >= MIN_K_TILES and (parts - 1) * -(-k_tiles // parts) < k_tiles
