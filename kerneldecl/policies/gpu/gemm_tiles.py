"""Owns what the policies for products on GPUs share: tiles that suit an extent, traffic under rasterisation, the ranking.

Knows nothing of TVM, of templates or of which unit computes.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.model import Candidate, Gpu, Proposal, dtype_bytes

MAX_GRID_Z = 65535
"""The launch's limit, which a batch must keep to (CUDA C++ Programming Guide, technical specifications)."""
RASTER_ROWS = 16
RIVAL_EVERY = 4
"""Of so many candidates one is not of the policy that predicts the least time."""


class Tiling(Protocol):
    """A template's parameters, which become a candidate only where they are proposed: hundreds are not."""

    def candidate(self) -> Candidate: ...


class Estimate(NamedTuple):
    """A tiling, its predicted time, and what makes it alike to others."""

    tiling: Tiling
    secs: float
    tile: tuple[int, ...]


class Form(NamedTuple):
    """Tilings that differ in little, to be timed, and a time that none of them is below."""

    secs: float
    timed: Callable[[], Iterable[Form | Estimate]]


def ranked(found: Iterable[Form | Estimate], alike: int) -> Iterator[Proposal]:
    """Yield proposals, the quickest first; of one tile at most `alike`, since the model may be wrong about it.

    No form is timed before what it makes may come next.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    for estimate in _in_order(found):
        seen[estimate.tile] += 1
        if seen[estimate.tile] <= alike:
            yield Proposal(estimate.tiling.candidate(), estimate.secs)


def _in_order(found: Iterable[Form | Estimate]) -> Iterator[Estimate]:
    """Yield estimates, the quickest first, equal ones by their parameters."""
    for _, equal in itertools.groupby(_quickest(found), key=operator.attrgetter("secs")):
        ties = list(equal)
        yield from sorted(ties, key=lambda estimate: estimate.tiling.candidate().params) if len(ties) > 1 else ties


def _quickest(found: Iterable[Form | Estimate]) -> Iterator[Estimate]:
    """Yield estimates of finite times, the quickest first."""
    numbers = itertools.count()  # so that nothing but times is compared
    waiting = [(each.secs, next(numbers), each) for each in found]
    heapq.heapify(waiting)
    while waiting and math.isfinite(waiting[0][0]):
        quickest = heapq.heappop(waiting)[-1]
        if isinstance(quickest, Estimate):
            yield quickest
        else:
            for each in quickest.timed():
                heapq.heappush(waiting, (each.secs, next(numbers), each))


def mixed(first: Iterable[Proposal], rivals: Iterable[Proposal]) -> Iterator[Proposal]:
    """Yield the rivals among the first, and what is left of either."""
    mine, theirs = iter(first), iter(rivals)
    for proposal in mine:
        yield proposal
        yield from itertools.islice(mine, RIVAL_EVERY - 2)
        yield from itertools.islice(theirs, 1)
    yield from theirs


def block_extents(extent: int, sizes: Iterable[int]) -> list[int]:
    """Return the sizes up to the first that covers the extent."""
    kept = []
    for size in sizes:
        kept.append(size)
        if size >= extent:
            break
    return kept


def parts_of(blocks: int, steps: int, least_steps: int, gpu: Gpu, resident: int = 1) -> list[int]:
    """Return into how many parts the reduction may be cut: so many that blocks of all parts fill the SMs once, or twice, or hold all
    that are resident."""
    filling = [gpu.sm_count // blocks, 2 * gpu.sm_count // blocks] if 2 * blocks <= gpu.sm_count else []
    filling.append(resident * gpu.sm_count // blocks)
    return list(dict.fromkeys([1, *(split_k for split_k in filling if split_k and steps // split_k >= least_steps)]))


def adding_secs(gemm: Contraction, split_k: int, gpu: Gpu) -> float:
    """Return the time of the kernel that adds the parts of a reduction."""
    batch, m, n, _ = gemm.extents
    return gpu.launch_secs + batch * m * n * dtype_bytes(gemm.accum_dtype) * split_k / gpu.l2_bytes_per_s


@functools.cache
def raster_of(rows: int, columns: int, resident: int, block_m: int, block_n: int) -> int:
    """Return how many rows of tiles to walk before the next column: a divisor of the rows with which the tiles at work need least."""
    divisors = [size for size in range(1, min(rows, RASTER_ROWS) + 1) if rows % size == 0]
    return min(divisors, key=lambda group: (wave_items(group, columns, resident, block_m, block_n), group))


def wave_items(group: int, columns: int, resident: int, block_m: int, block_n: int) -> int:
    """Return the rows and columns of operands that the tiles at work need, walked in groups of so many rows of tiles."""
    wide = min(columns, -(-resident // group))
    panels = -(-resident // (group * wide))
    return panels * group * block_m + wide * block_n


def out_bytes(gemm: Contraction) -> int:
    """Return the bytes of one result: as wide as a factor; sums of integers, as they are."""
    item_bytes = dtype_bytes(gemm.a.dtype)
    return item_bytes if item_bytes > 1 else dtype_bytes(gemm.accum_dtype)


def dram_bytes(gemm: Contraction, gpu: Gpu, tile: tuple[int, int, int], resident: int) -> float:
    """Return what comes from and goes to DRAM: operands once if they fit L2, else once for each wave of tiles that shares them."""
    batch, m, n, k = gemm.extents
    block_m, block_n, group = tile
    once, out = _operands_bytes(gemm), _results_bytes(gemm)
    if once <= gpu.l2_bytes // 2:
        return once + out
    rows, columns = -(-m // block_m), -(-n // block_n)
    wave = wave_items(group, columns, resident, block_m, block_n) * k * dtype_bytes(gemm.a.dtype)
    return max(once, wave * batch * rows * columns / resident) + out


def least_dram_bytes(gemm: Contraction) -> int:
    """Return what `dram_bytes` is not below for any tile."""
    return _operands_bytes(gemm) + _results_bytes(gemm)


def _operands_bytes(gemm: Contraction) -> int:
    """Return the bytes of both operands, but for what a convolution with steps between its windows leaves out of its image."""
    batch, m, _, k = gemm.extents
    return min(gemm.a.size_bytes, batch * m * k * dtype_bytes(gemm.a.dtype)) + gemm.b.size_bytes


def _results_bytes(gemm: Contraction) -> int:
    batch, m, n, _ = gemm.extents
    return batch * m * n * out_bytes(gemm)
