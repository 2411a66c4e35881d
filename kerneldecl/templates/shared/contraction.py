"""Owns what the CPU's contraction templates share: finding the contraction, merging what follows it, kinds of loops.

Knows nothing of policies, of tile sizes or of any one operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tvm.s_tir import Schedule
from tvm.tirx import IterVar

from kerneldecl.compiler.blocks import is_reduction
from kerneldecl.model import Arch, dtype_bytes


class Operand(NamedTuple):
    """Where an operand stands among the block's reads, and which of its dimensions are indexed by m or n, and by k."""

    position: int
    rank: int
    spatial_dim: int
    reduce_dim: int


class Product(NamedTuple):
    """Positions of the block's axes, batch axes first in the order of the output, and its operands."""

    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    a: Operand
    b: Operand


class Panels(NamedTuple):
    """How an operand is cut into panels: dimension `dim` in steps of `tile`, `outer` dimensions before the panels, `inner` within them."""

    dim: int
    tile: int
    outer: tuple[int, ...]
    inner: tuple[int, ...]


def only_reduction(sch: Schedule) -> Any | None:
    """Return the function's reduction block, or None where it has none or several."""
    found = [block for block in sch.get_child_blocks(sch.get_sblock("root")) if is_reduction(sch.get(block))]
    return found[0] if len(found) == 1 else None


def positions(region: Any, axes: Sequence[Any]) -> list[int | None]:
    """Return for each dimension of a buffer region which of the axes alone indexes it, or None."""
    return [next((i for i, axis in enumerate(axes) if dim.min.same_as(axis)), None) for dim in region.region]


def plain_positions(region: Any, axes: Sequence[Any]) -> list[int] | None:
    """Return `positions`, or None where a dimension is indexed by anything but one axis."""
    found = [position for position in positions(region, axes) if position is not None]
    return found if len(found) == len(region.region) else None


def vector_lanes(arch: Arch, block: Any) -> int:
    """Return how many of a block's results a vector register holds; those narrower than 4 bytes are computed as wide as that."""
    return max(1, arch.the_cpu.vector_bytes // max(4, dtype_bytes(str(block.writes[0].source.ty.dtype))))


def epilogue_of(sch: Schedule, block: Any) -> list[Any] | None:
    """Return the blocks that run after `block`, None unless all but the last only feed it and are elementwise in what the others make."""
    children = list(sch.get_child_blocks(sch.get_sblock("root")))
    place = next(i for i, child in enumerate(children) if sch.get(child).same_as(sch.get(block)))
    epilogue = children[place + 1 :]
    made = [sch.get(block).writes[0].source]
    for following in epilogue:
        stage = sch.get(following)
        if not _is_elementwise(stage, made):
            return None
        made.append(stage.writes[0].source)
    return epilogue if all(sch.get_consumers(inner) for inner in [block, *epilogue][:-1]) else None


def _is_elementwise(block: Any, made: Sequence[Any]) -> bool:
    """Say whether a block writes each place once and reads what was made before only at that place."""
    if is_reduction(block) or len(block.writes) != 1:
        return False
    axes = [axis.var for axis in block.iter_vars]
    written = plain_positions(block.writes[0], axes)
    places = [positions(read, axes) for read in block.reads if any(read.source.same_as(buffer) for buffer in made)]
    return written is not None and sorted(written) == list(range(len(axes))) and all(place == written for place in places)


def merge(sch: Schedule, chain: Sequence[Any]) -> Any:
    """Inline every block of an epilogue into the last one, and return that one."""
    for block in chain[:-1]:
        sch.compute_inline(block)
    return chain[-1]


def vectorize_lanes(sch: Schedule, loop: Any, lanes: int) -> None:
    """Cut a loop into unrolled vectors of `lanes` elements, or of as many as divide it.

    LLVM would round one wide vector up to a power of two.
    """
    width = math.gcd(int(sch.get(loop).extent), lanes)
    outer, inner = sch.split(loop, [None, width])
    sch.unroll(outer)
    if width > 1:
        sch.vectorize(inner)


def parallelize(sch: Schedule, loop: Any) -> None:
    """Spread a loop over the cores, unless it runs once: starting threads costs microseconds."""
    if int(sch.get(loop).extent) > 1:
        sch.parallel(loop)


def pack(sch: Schedule, block: Any, position: int, layout: Panels, *, is_parallel: bool) -> None:
    """Lay the copy that feeds an operand out as [outer dimensions, panel, inner dimensions, element of the panel]."""
    source = sch.get(block).reads[position].source
    copy = next(producer for producer in sch.get_producers(block) if sch.get(producer).writes[0].source.same_as(source))

    def panels(*index: Any) -> list[Any]:
        outer, inner = ([index[dim] for dim in dims] for dims in (layout.outer, layout.inner))
        return [*outer, index[layout.dim] // layout.tile, *inner, index[layout.dim] % layout.tile]

    sch.transform_layout(block, ("read", position), panels)
    loops = sch.get_loops(copy)
    panel, element = sch.split(loops[layout.dim], [None, layout.tile])
    outer, inner = ([loops[dim] for dim in dims] for dims in (layout.outer, layout.inner))
    sch.reorder(*outer, panel, *inner, element)
    task = sch.fuse(*outer, panel)
    if is_parallel:
        parallelize(sch, task)
    vectorize_lanes(sch, element, layout.tile)


def is_tiled(extent: int, tile: int, block: int) -> bool:
    """Say whether blocks are whole tiles and divide the extent, once it is rounded up to tiles."""
    return block % tile == 0 and -(-extent // tile) * tile % block == 0


def product_of(block: Any) -> Product | None:
    """Read the axes of a block that multiplies two operands, each indexed by plain axes; None for any other block."""
    axes = [axis.var for axis in block.iter_vars]
    reduced = [i for i, axis in enumerate(block.iter_vars) if axis.iter_type == IterVar.CommReduce]
    accesses = [plain_positions(region, axes) for region in (*block.writes, *block.reads)]
    if len(block.writes) != 1 or len(block.reads) != 2 or len(reduced) != 1:
        return None
    out, first, second = accesses
    if out is None or first is None or second is None or not out:
        return None
    k, n = reduced[0], out[-1]
    if (n in first) == (n in second) or k not in first or k not in second:
        return None
    a, b = (first, second) if n in second else (second, first)
    rows = [axis for axis in out[:-1] if axis not in b]
    if len(rows) != 1 or rows[0] not in a:
        return None
    m = rows[0]
    places = (0, 1) if n in second else (1, 0)
    return Product(
        tuple(axis for axis in out[:-1] if axis != m),
        m,
        n,
        k,
        Operand(places[0], len(a), a.index(m), a.index(k)),
        Operand(places[1], len(b), b.index(n), b.index(k)),
    )
