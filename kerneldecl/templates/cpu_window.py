"""Owns the schedule on CPUs of reductions over windows: pooling, and convolutions whose images have their channels first.

Knows nothing of how its parameters are chosen, and recognises a window by its structure, never by its names.

Parameters:
  rows, columns  results of a register tile: columns along the output's contiguous axis, which is vectorized, rows along the axis before it
  pad_at         "inline": read the input with a condition; "task": each task pads the part it reads
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm.s_tir import Schedule
from tvm.tirx import IterVar

from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.gemm import TaskLoops, finish_task, merge_epilogue, vector_lanes, vectorize_lanes
from kerneldecl.templates.shared import blocks
from kerneldecl.templates.shared.contraction import epilogue_of, only_reduction, plain_positions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled reduction with padding and epilogue fused; None where the function is none or tiles do not divide it."""
    return blocks.attempt(mod, lambda sch: _schedule(sch, params, arch))


def _schedule(sch: Schedule, params: Mapping[str, Value], arch: Arch) -> bool:
    block = only_reduction(sch)
    out = None if block is None else _output(sch.get(block))
    epilogue = None if out is None else epilogue_of(sch, block)
    if block is None or out is None or epilogue is None or len(out) < 3:
        return False
    rows, columns = blocks.count(params, "rows"), blocks.count(params, "columns")
    axes = sch.get(block).iter_vars
    if int(axes[out[-2]].dom.extent) % rows or int(axes[out[-1]].dom.extent) % columns:
        return False
    padding = sch.get_producers(block)
    if any(sch.get_producers(producer) for producer in padding):
        return False

    # 1. One block after the reduction; none before it that is computed where it is read.
    tail = merge_epilogue(sch, block, epilogue)
    if params["pad_at"] == "inline":
        for producer in padding:
            sch.compute_inline(producer)
        padding = []

    # 2. Tile: tasks / register tiles / reduction / unrolled rows / vectors.
    loops = sch.get_loops(block)
    row_tile, row = sch.split(loops[out[-2]], [None, rows])
    column_tile, column = sch.split(loops[out[-1]], [None, columns])
    tasks = [loops[axis] for axis in out[:-2]]
    reduced = [loops[at] for at, axis in enumerate(axes) if axis.iter_type == IterVar.CommReduce]
    sch.reorder(*tasks, row_tile, column_tile, *reduced, row, column)
    task = sch.fuse(*tasks) if len(tasks) > 1 else tasks[0]

    # 3. Move padding and epilogue into the loops that need them. Loop kinds come first: the initialisation inherits them.
    lanes = vector_lanes(arch, sch.get(block))
    for producer in padding:
        sch.compute_at(producer, task, preserve_unit_loops=True)
        if not _pads_rows(sch.get(producer)):
            vectorize_lanes(sch, sch.get_loops(producer)[-1], lanes)
    sch.reverse_compute_at(tail, column_tile, preserve_unit_loops=True)
    finish_task(sch, block, tail, TaskLoops(task, row, column, reduced[0]), lanes)
    return True


def _output(block: Any) -> list[int] | None:
    """Return the axis of each dimension of a reduction's output, None unless each has its own."""
    if len(block.writes) != 1:
        return None
    spatial = sum(axis.iter_type == IterVar.DataPar for axis in block.iter_vars)
    out = plain_positions(block.writes[0], [axis.var for axis in block.iter_vars])
    return out if out is not None and len(set(out)) == len(out) == spatial else None


def _pads_rows(block: Any) -> bool:
    """Say whether a block pads along contiguous memory: TVM computes a vector whose elements have conditions one by one."""
    read, write = (region.source.ty.shape[-1] for region in (block.reads[0], block.writes[0]))
    return int(read) != int(write)
