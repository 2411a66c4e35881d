"""Owns what the CPU's contraction templates share: finding the contraction, merging what follows it, kinds of loops.

Knows nothing of policies, of tile sizes or of any one operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm.s_tir import Schedule
from tvm.tirx import IterVar


def is_reduction(block: Any) -> bool:
    return any(axis.iter_type == IterVar.CommReduce for axis in block.iter_vars)


def only_reduction(sch: Schedule) -> Any | None:
    """Return the function's reduction block, or None where it has none or several."""
    found = [block for block in sch.get_child_blocks(sch.get_sblock("root")) if is_reduction(sch.get(block))]
    return found[0] if len(found) == 1 else None


def positions(region: Any, axes: Sequence[Any]) -> list[int | None]:
    """Return for each dimension of a buffer region which of the axes alone indexes it, or None."""
    return [next((i for i, axis in enumerate(axes) if dim.min.same_as(axis)), None) for dim in region.region]


def epilogue_of(sch: Schedule, block: Any) -> list[Any] | None:
    """Return the blocks that follow `block` one by one, each elementwise in the one before; None if what follows is anything else."""
    chain: list[Any] = []
    last = block
    while following := sch.get_consumers(last):
        if len(following) != 1 or not _is_elementwise(sch.get(last).writes[0].source, sch.get(following[0])):
            return None
        last = following[0]
        chain.append(last)
    return chain


def _is_elementwise(source: Any, block: Any) -> bool:
    """Say whether a block reads `source` only at the place that it writes, and each place once."""
    if is_reduction(block) or len(block.writes) != 1:
        return False
    axes = [axis.var for axis in block.iter_vars]
    written = positions(block.writes[0], axes)
    places = [positions(read, axes) for read in block.reads if read.source.same_as(source)]
    return sorted(axis for axis in written if axis is not None) == list(range(len(axes))) and all(place == written for place in places)


def merge(sch: Schedule, chain: Sequence[Any]) -> Any:
    """Inline every block of an epilogue into the last one, and return that one."""
    for block in chain[:-1]:
        sch.compute_inline(block)
    return chain[-1]


def vectorize_lanes(sch: Schedule, loop: Any, lanes: int) -> None:
    """Cut a loop into unrolled vectors of `lanes` elements, or of as many as divide it: LLVM would round one wide vector up to a power of two."""
    width = math.gcd(int(sch.get(loop).extent), lanes)
    outer, inner = sch.split(loop, [None, width])
    sch.unroll(outer)
    if width > 1:
        sch.vectorize(inner)


def parallelize(sch: Schedule, loop: Any) -> None:
    """Spread a loop over the cores, unless it runs once: starting threads costs microseconds."""
    if int(sch.get(loop).extent) > 1:
        sch.parallel(loop)
