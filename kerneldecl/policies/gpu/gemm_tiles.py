"""Owns what the GEMM policies for GPUs share: tiles that suit an extent, traffic under rasterization, the best-first search.

Knows nothing of TVM, of templates or of which unit computes.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.analysis.params import Params
from kerneldecl.model import Gpu, Proposal, dtype_bytes

MAX_RASTER_GROUP = 16
"""Rows of tiles in a rasterization group at most."""
RIVAL_EVERY = 4
"""One in this many candidates comes from a policy other than the one that predicts the least time."""


class Estimate(NamedTuple):
    """A tiling with its predicted time, and its tile: tilings of one tile are near-duplicates of one another."""

    tiling: Params
    secs: float
    tile: tuple[int, ...]


class Group(NamedTuple):
    """Tilings that differ in little, and a lower bound of their times: they are timed only once nothing is faster (branch and bound)."""

    secs: float
    """The lower bound."""
    timed: Callable[[], Iterable[Group | Estimate]]


def best_first(found: Iterable[Group | Estimate], same_tile: int) -> Iterator[Proposal]:
    """Yield proposals, the fastest first; at most `same_tile` with one tile, since the model may be wrong about it.

    No group is timed before one of its tilings may come next.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    for estimate in _in_order(found):
        seen[estimate.tile] += 1
        if seen[estimate.tile] <= same_tile:
            yield Proposal(estimate.tiling.candidate(), estimate.secs)


def _in_order(found: Iterable[Group | Estimate]) -> Iterator[Estimate]:
    """Yield estimates, the fastest first, equal ones by their parameters."""
    for _, equal in itertools.groupby(_fastest_first(found), key=operator.attrgetter("secs")):
        ties = list(equal)
        yield from sorted(ties, key=lambda estimate: estimate.tiling.candidate().params) if len(ties) > 1 else ties


def _fastest_first(found: Iterable[Group | Estimate]) -> Iterator[Estimate]:
    """Yield estimates of finite times, the fastest first."""
    numbers = itertools.count()  # so that nothing but times is compared
    waiting = [(each.secs, next(numbers), each) for each in found]
    heapq.heapify(waiting)
    while waiting and math.isfinite(waiting[0][0]):
        fastest = heapq.heappop(waiting)[-1]
        if isinstance(fastest, Estimate):
            yield fastest
        else:
            for each in fastest.timed():
                heapq.heappush(waiting, (each.secs, next(numbers), each))


def interleaved(first: Iterable[Proposal], rivals: Iterable[Proposal], *, every: int = RIVAL_EVERY) -> Iterator[Proposal]:
    """Yield the first policy's proposals with a rival in each place that `every` divides, and what is left of either."""
    own, others = iter(first), iter(rivals)
    for proposal in own:
        yield proposal
        yield from itertools.islice(own, every - 2)
        yield from itertools.islice(others, 1)
    yield from others


def least_secs(found: Sequence[Proposal]) -> float:
    """Return what the first of some proposals is predicted to take; infinity where there is none."""
    return found[0].predicted_secs if found else math.inf


def block_extents(extent: int, sizes: Iterable[int]) -> list[int]:
    """Return the sizes up to the first that covers the extent."""
    kept = []
    for size in sizes:
        kept.append(size)
        if size >= extent:
            break
    return kept


def split_k_choices(blocks: int, k_tiles: int, min_k_tiles: int, gpu: Gpu, resident: int = 1) -> list[int]:
    """Return values of split-K: 1, and those with which the thread blocks fill the SMs once, twice, or with all that are resident.

    `blocks` are the thread blocks without split-K, `min_k_tiles` the fewest that each of them must have: a reduction that is too short
    to fill the SMs so is split into as many parts as have them.
    """
    filling = [gpu.sm_count // blocks, 2 * gpu.sm_count // blocks] if 2 * blocks <= gpu.sm_count else []
    filling.append(resident * gpu.sm_count // blocks)
    most = k_tiles // min_k_tiles
    # No part is left without a k-tile.
    shortest = -(-k_tiles // -(-k_tiles // most)) if most else 1
    return list(dict.fromkeys([1, *(split_k if split_k <= most else shortest for split_k in filling if split_k)]))


@functools.cache
def raster_group_of(rows: int, columns: int, resident: int, block_m: int, block_n: int) -> int:
    """Return the rasterization group with the least traffic: a divisor of the rows of tiles, computed before the next column."""
    divisors = [size for size in range(1, min(rows, MAX_RASTER_GROUP) + 1) if rows % size == 0]
    return min(divisors, key=lambda group: (wave_items(group, columns, resident, block_m, block_n), group))


def wave_items(group: int, columns: int, resident: int, block_m: int, block_n: int) -> int:
    """Return the rows of A plus the columns of B that the resident tiles need together, with rasterization groups of `group` rows."""
    wide = min(columns, -(-resident // group))
    panels = -(-resident // (group * wide))
    return panels * group * block_m + wide * block_n


def out_bytes(gemm: Contraction) -> int:
    """Return the bytes of one result: as wide as an operand's element, or an accumulator where operands are integers."""
    item_bytes = dtype_bytes(gemm.a.dtype)
    return item_bytes if item_bytes > 1 else dtype_bytes(gemm.accum_dtype)


def dram_bytes(gemm: Contraction, gpu: Gpu, tile: tuple[int, int, int], resident: int) -> float:
    """Return the bytes to and from DRAM: operands once if they fit L2, else once for each wave of tiles that shares them.

    `tile` is block_m, block_n and the rasterization group.
    """
    batch, m, n, k = gemm.extents
    block_m, block_n, group = tile
    once, out = _operands_bytes(gemm), _results_bytes(gemm)
    if once <= gpu.l2_bytes // 2:
        return once + out
    rows, columns = -(-m // block_m), -(-n // block_n)
    wave = wave_items(group, columns, resident, block_m, block_n) * k * dtype_bytes(gemm.a.dtype)
    return max(once, wave * batch * rows * columns / resident) + out


def least_dram_bytes(gemm: Contraction) -> int:
    """Return a lower bound of `dram_bytes` for all tiles."""
    return _operands_bytes(gemm) + _results_bytes(gemm)


def _operands_bytes(gemm: Contraction) -> int:
    """Return the bytes of both operands, without pixels that a strided convolution skips."""
    batch, m, _, k = gemm.extents
    return min(gemm.a.size_bytes, batch * m * k * dtype_bytes(gemm.a.dtype)) + gemm.b.size_bytes


def _results_bytes(gemm: Contraction) -> int:
    batch, m, n, _ = gemm.extents
    return batch * m * n * out_bytes(gemm)


def epilogue_smem_bytes(gemm: Contraction, rows: int, columns: int) -> int:
    """Return the shared memory of an epilogue through it: the tile's accumulators, each row padded against bank conflicts."""
    return rows * (-(-columns // 32) * 32 + 8) * dtype_bytes(gemm.accum_dtype)
