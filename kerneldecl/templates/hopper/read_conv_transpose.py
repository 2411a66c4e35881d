"""Owns the reading of a transposed convolution for wgmma: a convolution of stride 1 for each phase, and how a phase differs from another.

Knows nothing of tiles, instructions or targets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import Schedule

from kerneldecl.compiler.blocks import is_reduction
from kerneldecl.templates.hopper.conv_gemm import Phases
from kerneldecl.templates.hopper.operands import Operand
from kerneldecl.templates.hopper.read_conv import Convolution, SlidingWindow, epilogue_functions
from kerneldecl.templates.hopper.read_gemm import dense_strides
from kerneldecl.templates.hopper.read_padding import read_padding
from kerneldecl.templates.shared.contraction import merge, only_reduction
from kerneldecl.templates.shared.transposed_conv import NAXES, PhaseResults, following_blocks, phase_operands, phase_results


@dataclass(frozen=True)
class TransposedConv:
    """A transposed convolution whose results are the same number of every phase."""

    convolution: Convolution
    """That of one phase: its windows begin at the first tap of the phase with the least offset, and its weights are all taps."""
    step: int
    offsets: tuple[int, int]
    """What is added to a result's row and column before they are divided by the step."""
    taps: tuple[int, int]
    """Rows and columns of W."""

    @property
    def phases(self) -> Phases:
        return Phases(self.step, self._image, self._weights)

    def _image(self, operand: Operand) -> Operand:
        """Return boxes of the pixels that a phase meets: phases beyond a multiple of the step meet the next pixel."""
        step, (top, left) = self.step, self.offsets

        def coords(batch: Any, row: Any, k_tile: Any, number: Any) -> tuple[Any, ...]:
            channel, x, y, image = plain.coords(batch, row, k_tile, number)
            return channel, x + (batch % step + left) // step, y + (batch // step + top) // step, image

        assert operand.tma is not None
        plain = operand.tma
        return replace(operand, tma=replace(plain, coords=coords))

    def _weights(self, operand: Operand) -> Operand:
        """Return every step-th tap, the last one first; TMA gives zeros for taps beyond the last one of W."""
        step, (top, left) = self.step, self.offsets
        most_rows, most_columns = self.convolution.rows.taps, self.convolution.columns.taps

        def coords(batch: Any, row: Any, k_tile: Any, number: Any) -> tuple[Any, ...]:
            column, channel, s, r = plain.coords(batch, row, k_tile, number)
            along, down = (batch % step + left) % step, (batch // step + top) % step
            return column, channel, along + (most_columns - 1 - s) * step, down + (most_rows - 1 - r) * step

        assert operand.tma is not None
        plain = operand.tma
        rows, columns = self.taps
        return replace(operand, tma=replace(plain, map=replace(plain.map, dims=(*plain.map.dims[:2], columns, rows)), coords=coords))


def read_transposed(mod: tvm.IRModule) -> TransposedConv | None:
    """Return the transposed convolution that a function is; None where it is none, has another layout, or phases of several sizes."""
    sch = Schedule(mod)
    block = only_reduction(sch)
    if block is None or len(sch.get(block).iter_vars) != NAXES:
        return None
    following = following_blocks(sch, block)
    producers = list(sch.get_producers(block))
    if not following or any(is_reduction(sch.get(each)) for each in (*following, *producers)):
        return None
    if any(sch.get_producers(producer) for producer in producers):
        return None
    last = sch.get(merge(sch, following))
    reduction = sch.get(block)
    step = int(reduction.iter_vars[3].dom.extent)
    operands = phase_operands(reduction, step)
    results = phase_results(last, reduction.writes[0].source, step)
    if operands is None or results is None or [*results.axes] != [axis.var for axis in last.iter_vars]:
        return None
    sources = [_source(buffer, [sch.get(producer) for producer in producers]) for buffer in operands]
    return _transposed(sch.mod["main"], reduction, last, sources, results)


def _source(buffer: Any, producers: list[Any]) -> tuple[Any, list[int]] | None:
    """Return the argument that an operand is, and the zeros before each dimension; None where it is something else."""
    made = next((each for each in producers if each.writes[0].source.same_as(buffer)), None)
    return (buffer, [0] * len(buffer.shape)) if made is None else read_padding(made)


def _transposed(
    func: Any, reduction: Any, last: Any, sources: list[tuple[Any, list[int]] | None], results: PhaseResults
) -> TransposedConv | None:
    fresh = {param: tirx.decl_buffer([int(extent) for extent in param.shape], param.dtype, param.name) for param in func.params}
    (pixels, before), (filters, weights_before) = (each or (None, [0]) for each in sources)
    out = last.body.buffer
    step = int(reduction.iter_vars[3].dom.extent)
    if any(each is None or each not in fresh for each in (pixels, filters, out)) or any((before[0], before[3], *weights_before)):
        return None
    if any(extent % step for extent in results.extents):
        return None
    image, weights = fresh[pixels], fresh[filters]
    taps = [int(axis.dom.extent) for axis in reduction.iter_vars[6:8]]
    rows, columns = (
        SlidingWindow(int(image.shape[side]), results.extents[side - 1] // step, taps[side - 1], 1, 1, before[side]) for side in (1, 2)
    )
    row_pitch, column_pitch, channel_pitch, _ = dense_strides(weights.shape)
    sums = reduction.writes[0].source
    convolution = Convolution(
        func_params=tuple(fresh[param] for param in func.params),
        views=(),
        image=image,
        weights=weights,
        weight_strides=(1, channel_pitch, column_pitch, row_pitch),
        out=fresh[out],
        images=int(image.shape[0]),
        channels=int(image.shape[3]),
        filters=int(fresh[out].shape[3]),
        rows=rows,
        columns=columns,
        accum_dtype=str(sums.dtype),
        groups=1,
        **epilogue_functions(last.body, sums, fresh),
    )
    return TransposedConv(convolution, step, results.offsets, (int(weights.shape[0]), int(weights.shape[1])))
