"""Owns what CPU templates of GEMMs and convolutions share: the axes of a GEMM, tiles of tasks and registers, packed panels, kinds of loops.

Knows nothing of how tile sizes are chosen or of any one operator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm import IRModule
from tvm.s_tir import Schedule
from tvm.tirx import IterVar

from kerneldecl.compiler.blocks import is_reduction
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.shared import blocks
from kerneldecl.templates.shared.contraction import epilogue_of, merge, only_reduction, plain_positions


class Operand(NamedTuple):
    """An operand's position among the block's reads, its rank, and its dimensions that m or n and that k index."""

    position: int
    rank: int
    spatial_dim: int
    reduce_dim: int


class GemmAxes(NamedTuple):
    """Positions of a GEMM block's axes, batch axes in the order of the output, and its operands."""

    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    a: Operand
    b: Operand


class TaskLoops(NamedTuple):
    """Loops of a tiled contraction that take its loop kinds."""

    task: Any
    row: Any
    """The loop over the rows (or columns of pixels) of a register tile."""
    column: Any
    """The loop over a row of a register tile, contiguous elements."""
    reduction: Any
    """The outermost loop over the reduction."""


class GemmTiles(NamedTuple):
    """The parameters that both GEMM templates have."""

    tile_m: int
    tile_n: int
    block_m: int
    block_n: int
    order: str

    @classmethod
    def of(cls, params: Mapping[str, Value]) -> GemmTiles:
        return cls(**{name: params[name] for name in cls._fields})  # type: ignore[arg-type]

    def divide(self, m: int, n: int) -> bool:
        """Say whether blocks are whole tiles and divide m and n, once these are rounded up to tiles."""
        return _is_tiled(m, self.tile_m, self.block_m) and _is_tiled(n, self.tile_n, self.block_n)


@dataclass(frozen=True)
class Gemm:
    """A schedule whose one reduction is a GEMM, followed by an elementwise epilogue or by other blocks."""

    sch: Schedule
    block: Any
    axes: GemmAxes
    extents: tuple[int, ...]
    """Extents of all axes of the block, in its order."""
    epilogue: list[Any]
    computed: Mapping[int, Any]
    """Blocks that compute operands element by element from arguments, such as dequantised weights, by the operand's position."""
    rest: tuple[Any, ...] = ()
    """Blocks that read several of its results for one element each, as gated GEMMs have; then there is no epilogue."""

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.extents[self.axes.m], self.extents[self.axes.n], self.extents[self.axes.k]


class TileLoops(NamedTuple):
    """Loops of a tiled GEMM."""

    task: Any
    """The loop over parallel tasks."""
    tile: Any
    """The inner loop over register tiles of a task."""
    row: Any
    column: Any


class Panels(NamedTuple):
    """A packed layout: dimension `dim` split by `tile`, `outer` dimensions before the panels, `inner` dimensions within them."""

    dim: int
    tile: int
    outer: tuple[int, ...]
    inner: tuple[int, ...]


def read_gemm(mod: IRModule) -> Gemm | None:
    """Return the GEMM that a module computes, with a new schedule, or None where it computes something else."""
    sch = Schedule(mod)
    block = only_reduction(sch)
    axes = None if block is None else gemm_axes(sch.get(block))
    if axes is None:
        return None
    producers = sch.get_producers(block)
    if any(is_reduction(sch.get(producer)) or sch.get_producers(producer) for producer in producers):
        return None
    results = [(producer, sch.get(producer).writes[0].source) for producer in producers]
    reads = enumerate(sch.get(block).reads)
    computed = {position: producer for position, read in reads for producer, result in results if read.source.same_as(result)}
    epilogue = epilogue_of(sch, block)
    extents = tuple(int(axis.dom.extent) for axis in sch.get(block).iter_vars)
    if epilogue is not None:
        return Gemm(sch=sch, block=block, axes=axes, extents=extents, epilogue=epilogue, computed=computed)
    if producers:
        return None
    rest = tuple(other for other in sch.get_child_blocks(sch.get_sblock("root")) if not sch.get(other).same_as(sch.get(block)))
    return Gemm(sch=sch, block=block, axes=axes, extents=extents, epilogue=[], computed={}, rest=rest)


def finish_rest(sch: Schedule, rest: Sequence[Any], lanes: int) -> None:
    """Run what follows a GEMM row by row, in parallel and in vectors: it reads results of several tiles."""
    for block in rest:
        sch.parallel(sch.get_loops(block)[0])
        blocks.vectorize_under(sch, block, lanes)


def gemm_axes(block: Any) -> GemmAxes | None:
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
    reads = (0, 1) if n in second else (1, 0)
    return GemmAxes(
        batch=tuple(axis for axis in out[:-1] if axis != m),
        m=m,
        n=n,
        k=k,
        a=Operand(reads[0], len(a), a.index(m), a.index(k)),
        b=Operand(reads[1], len(b), b.index(n), b.index(k)),
    )


def finish_task(sch: Schedule, block: Any, tail: Any, loops: TaskLoops, lanes: int) -> None:
    """Run tasks in parallel, unroll rows and vectorize columns of register tiles, and set accumulators before the reduction."""
    parallelize(sch, loops.task)
    sch.unroll(loops.row)
    vectorize_lanes(sch, loops.column, lanes)
    vectorize_lanes(sch, sch.get_loops(tail)[-1], lanes)
    sch.decompose_reduction(block, loops.reduction)


def merge_epilogue(sch: Schedule, block: Any, epilogue: Sequence[Any]) -> Any:
    """Return the one block that stores a reduction's results: its epilogue, merged, or a copy where there is none."""
    return merge(sch, epilogue) if epilogue else sch.cache_write(block, 0, "global")


def tile_loops(gemm: Gemm, tiles: GemmTiles, loops: Sequence[Any], k_loops: Sequence[Any] = ()) -> TileLoops:
    """Split and reorder the loops of a GEMM's axes: tasks / outer k / register tiles / inner k / rows / columns.

    `k_loops` are the outer and the inner loop over k, or the inner one alone; without them, the reduction's loop stays where it is.
    """
    sch, axes = gemm.sch, gemm.axes
    m_task, m_tile, row = sch.split(loops[axes.m], [None, tiles.block_m // tiles.tile_m, tiles.tile_m])
    n_task, n_tile, column = sch.split(loops[axes.n], [None, tiles.block_n // tiles.tile_n, tiles.tile_n])
    is_by_row = tiles.order == "mn"
    tasks = [*(loops[axis] for axis in axes.batch), *((m_task, n_task) if is_by_row else (n_task, m_task))]
    tile = (m_tile, n_tile) if is_by_row else (n_tile, m_tile)
    sch.reorder(*tasks, *k_loops[:-1], *tile, *k_loops[-1:], row, column)
    return TileLoops(task=sch.fuse(*tasks), tile=tile[-1], row=row, column=column)


def vector_lanes(arch: Arch, block: Any) -> int:
    """Return how many of a block's results a vector register holds; results narrower than 4 bytes are computed in 4 bytes."""
    return max(1, arch.the_cpu.vector_bytes // max(4, dtype_bytes(str(block.writes[0].source.ty.dtype))))


def vectorize_lanes(sch: Schedule, loop: Any, lanes: int) -> None:
    """Split a loop into unrolled vectors of `lanes` elements, or of as many as divide it.

    LLVM would round one wide vector up to a power of two.
    """
    width = math.gcd(int(sch.get(loop).extent), lanes)
    outer, inner = sch.split(loop, [None, width])
    sch.unroll(outer)
    if width > 1:
        sch.vectorize(inner)


def parallelize(sch: Schedule, loop: Any) -> None:
    """Run a loop's iterations on all cores, unless it has only one: starting threads takes microseconds."""
    if int(sch.get(loop).extent) > 1:
        sch.parallel(loop)


def pack(sch: Schedule, block: Any, position: int, layout: Panels, *, is_parallel: bool) -> None:
    """Lay the copy of an operand out as [outer dimensions, panel, inner dimensions, element of the panel]."""
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


def _is_tiled(extent: int, tile: int, block: int) -> bool:
    return block % tile == 0 and -(-extent // tile) * tile % block == 0
