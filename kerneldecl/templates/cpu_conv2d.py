"""Owns the schedule of direct convolutions on a CPU: weights in panels, register tiles along a row of the output, padding on the fly.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names.

Parameters:
  tile_w, tile_f    output columns and output channels of a register tile, whose accumulators stay in registers; channels are vectorized
  block_h, block_f  output rows and output channels of a parallel task
  pack_f            copy the weights into panels of tile_f output channels; false where they come in panels, [f // panel, ..., f % panel]
  order             inner loop of a task: "wf" its panels of channels, for each register tile of pixels; "fw" its pixels, for each panel
  pad_at            "root": pad the whole input first; "task": each task pads the part it reads
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tvm import IRModule
from tvm.s_tir import Schedule
from tvm.sym import Analyzer
from tvm.tirx import IterVar

from kerneldecl.analysis.cpu_params import CpuConvParams
from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.gemm import Panels, TaskLoops, finish_task, merge_epilogue, pack, parallelize, vector_lanes, vectorize_lanes
from kerneldecl.templates.shared.contraction import epilogue_of, only_reduction, plain_positions


class _Weights(NamedTuple):
    """A convolution's weights: position among the block's reads, rank, dimension of the output channels, and channels of a panel.

    The panel is 0 where the weights do not come in panels.
    """

    position: int
    rank: int
    dim: int
    panel: int


class _Convolution(NamedTuple):
    """Positions of a convolution block's axes, and its weights."""

    images: tuple[int, ...]
    h: int
    w: int
    f: int
    reduced: tuple[int, ...]
    weights: _Weights


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled convolution with padding and epilogue fused, or None where the function is none or tiles do not divide it."""
    tiles = CpuConvParams(**{name: params[name] for name in CpuConvParams._fields})  # type: ignore[arg-type]
    sch = Schedule(mod)
    block = only_reduction(sch)
    conv = None if block is None else _convolution(sch.get(block))
    if conv is None:
        return None
    epilogue, padding = epilogue_of(sch, block), sch.get_producers(block)
    extents = [int(axis.dom.extent) for axis in sch.get(block).iter_vars]
    panel = conv.weights.panel or 1
    divided = (
        (extents[conv.w], tiles.tile_w),
        (extents[conv.h], tiles.block_h),
        (extents[conv.f], tiles.block_f),
        (tiles.block_f, tiles.tile_f),
        (max(panel, tiles.tile_f), min(panel, tiles.tile_f)),
    )
    if tiles.pack_f and conv.weights.panel:
        return None
    if epilogue is None or any(extent % tile for extent, tile in divided) or any(sch.get_producers(producer) for producer in padding):
        return None
    lanes = vector_lanes(arch, sch.get(block))
    is_parallel = extents[conv.h] > tiles.block_h or extents[conv.f] > tiles.block_f or any(extents[axis] > 1 for axis in conv.images)

    # 1. At most one block before the convolution, the padding; one block after it.
    padding = [producer for producer in padding if not _inlined_copy(sch, producer)]
    tail = merge_epilogue(sch, block, epilogue)

    # 2. Pack the weights.
    if tiles.pack_f:
        weights = conv.weights
        sch.cache_read(block, weights.position, "global")
        rest = tuple(dim for dim in range(weights.rank) if dim != weights.dim)
        pack(sch, block, weights.position, Panels(weights.dim, tiles.tile_f, (), rest), is_parallel=is_parallel)

    # 3. Tile: tasks / register tiles / reduction / unrolled output columns / vectors of channels.
    loops = sch.get_loops(block)
    h_task, h_row = sch.split(loops[conv.h], [None, tiles.block_h])
    w_tile, w_col = sch.split(loops[conv.w], [None, tiles.tile_w])
    f_task, f_tile, f_lane = sch.split(loops[conv.f], [None, tiles.block_f // tiles.tile_f, tiles.tile_f])
    images, reduced = [loops[axis] for axis in conv.images], [loops[axis] for axis in conv.reduced]
    inner = (h_row, w_tile, f_tile) if tiles.order == "wf" else (f_tile, h_row, w_tile)
    sch.reorder(*images, h_task, f_task, *inner, *reduced, w_col, f_lane)
    task = sch.fuse(*images, h_task, f_task)

    # 4. Move padding and epilogue into the loops that need them. Loop kinds come first: the initialisation inherits them.
    for producer in padding:
        if tiles.pad_at == "task":
            sch.compute_at(producer, task, preserve_unit_loops=True)
        elif is_parallel:
            parallelize(sch, sch.fuse(*sch.get_loops(producer)[:2]))
        vectorize_lanes(sch, sch.get_loops(producer)[-1], lanes)
    sch.reverse_compute_at(tail, inner[-1], preserve_unit_loops=True)
    finish_task(sch, block, tail, TaskLoops(task, w_col, f_lane, reduced[0]), lanes)
    return sch


def _inlined_copy(sch: Schedule, producer: Any) -> bool:
    """Inline a padding block that pads nothing; say whether it was one."""
    block = sch.get(producer)
    read, write = block.reads[0].source.ty, block.writes[0].source.ty
    is_copy = [int(extent) for extent in read.shape] == [int(extent) for extent in write.shape]
    if is_copy:
        sch.compute_inline(producer)
    return is_copy


def _convolution(block: Any) -> _Convolution | None:
    """Read the axes of a convolution block, whose output is [..., h, w, f]; None for any other block."""
    if len(block.reads) != 2 or len(block.writes) != 1:
        return None
    axes = [axis.var for axis in block.iter_vars]
    out = plain_positions(block.writes[0], axes)
    if out is None or len(out) < 3:
        return None
    *images, h, w, f = out
    reduced = tuple(i for i, axis in enumerate(block.iter_vars) if axis.iter_type == IterVar.CommReduce)
    found = [weights for position in range(2) if (weights := _weights(block, position, axes, out)) is not None]
    if len(found) != 1 or len(reduced) + len(out) != len(axes):
        return None
    return _Convolution(images=tuple(images), h=h, w=w, f=f, reduced=reduced, weights=found[0])


def _weights(block: Any, position: int, axes: Sequence[Any], out: Sequence[int]) -> _Weights | None:
    """Return what weights an operand is, [reduced axes, f] in any order or [f // panel, reduced axes, f % panel]; None for none."""
    region, f = block.reads[position], out[-1]
    plain = plain_positions(region, axes)
    if plain is not None:
        return _Weights(position, len(plain), plain.index(f), 0) if f in plain and not set(out[:-1]) & set(plain) else None
    panel = int(region.source.ty.shape[-1])
    first, *inner, last = (dim.min for dim in region.region)
    analyzer = Analyzer()
    analyzer.bind(axes[f], block.iter_vars[f].dom)
    is_panel = analyzer.can_prove_equal(first, axes[f] // panel) and analyzer.can_prove_equal(last, axes[f] % panel)
    is_reduced = all(any(dim.same_as(axis) for i, axis in enumerate(axes) if i not in out) for dim in inner)
    return _Weights(position, 2 + len(inner), 0, panel) if is_panel and is_reduced else None
