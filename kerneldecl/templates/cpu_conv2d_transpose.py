"""Owns transposed convolutions on CPUs: results by their phases, each a convolution of stride 1, in register tiles.

Knows nothing of how its parameters are chosen, and recognises a transposed convolution by its structure, never by its names.

Parameters:
  tile_w   results of a register tile that lie a stride apart in a row: 1 to 16
  vectors  vectors of output channels of a register tile, and of a panel: 1 to 6
  block_h  rows of one phase of a task
  panels   panels of output channels of a task
  pack     copy the weights into panels first; they are always copied where output channels are no neighbours or have another dtype

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import IRModule, tirx
from tvm.ir import Call, Var
from tvm.s_tir import Schedule
from tvm.sym import Analyzer
from tvm.tirx import BufferStore
from tvm_ffi import structural

from kerneldecl.analysis.cpu_params import CpuPhasedConvParams
from kerneldecl.compiler.blocks import is_reduction
from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.gemm import vector_lanes
from kerneldecl.templates.cpu.phased_conv_kernel import PhasedConv, Side, build
from kerneldecl.templates.cpu.splice import Element
from kerneldecl.templates.shared.contraction import merge, only_reduction
from kerneldecl.templates.shared.transposed_conv import NAXES, are_equal, bound_axes, following_blocks, phase_operands, phase_results


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the transposed convolution as one custom kernel, or None where the function is none."""
    chosen = CpuPhasedConvParams(**{name: params[name] for name in CpuPhasedConvParams._fields})  # type: ignore[arg-type]
    sch = Schedule(mod)
    block = only_reduction(sch)
    if block is None or len(sch.get(block).iter_vars) != NAXES or not chosen.fits():
        return None
    lanes = vector_lanes(arch, sch.get(block))
    conv = read(sch, block)
    return None if conv is None else build(conv, chosen, lanes)


def read(sch: Schedule, block: Any) -> PhasedConv | None:
    """Return the transposed convolution whose phases a block computes, None where the function is something else; change the schedule.

    What comes before is inlined into what the block reads, and what follows into the function's last block.
    """
    following = following_blocks(sch, block)
    if not following or any(is_reduction(sch.get(each)) for each in following) or not _inlined_before(sch, block):
        return None
    last = sch.get(merge(sch, following))
    phases = sch.get(block)
    extents = [int(axis.dom.extent) for axis in phases.iter_vars]
    images, _, _, stride, _, f, *_ = extents
    operands = phase_operands(phases, stride)
    args = tuple(sch.mod["main"].params)
    if operands is None or not isinstance(last.body, BufferStore) or not last.body.buffer.same_as(args[-1]):
        return None
    pixels, weights = operands
    pixel, weight = _element(sch, block, pixels), _element(sch, block, weights)
    found = phase_results(last, phases.writes[0].source, stride)
    if pixel is None or weight is None or found is None:
        return None
    taps = _taps(weight, weights)
    unpadded = weight.value.args[1] if isinstance(weight.value, Call) else weight.value
    return PhasedConv(
        args=args,
        images=images,
        rows=_side(found.extents[0], taps[0], found.offsets[0], stride),
        columns=_side(found.extents[1], taps[1], found.offsets[1], stride),
        stride=stride,
        channels=extents[-1],
        f=f,
        accum=str(phases.writes[0].source.ty.dtype),
        padded=(int(pixels.ty.shape[1]), int(pixels.ty.shape[2])),
        pixel=pixel,
        weight=Element(weight.axes, unpadded),
        sums=phases.writes[0].source,
        result=Element(found.axes, found.value),
        place=found.place,
    )


def _side(results: int, taps: int, offset: int, stride: int) -> Side:
    """Return how results of a side see taps: a later tap meets an earlier pixel."""
    return Side(results, taps, offset, step=1, first=-(-taps // stride) - 1, apart=-1)


def _inlined_before(sch: Schedule, block: Any) -> bool:
    """Inline what the operands' producers read; say whether arguments alone are left to be read by them."""
    for producer in sch.get_producers(block):
        for earlier in sch.get_producers(producer):
            if sch.get_producers(earlier):
                return False
            sch.compute_inline(earlier)
    return True


def _element(sch: Schedule, block: Any, buffer: Any) -> Element | None:
    """Return how an element of an operand is computed from arguments."""
    for producer in sch.get_producers(block):
        made = sch.get(producer)
        if made.writes[0].source.same_as(buffer):
            axes = tuple(axis.var for axis in made.iter_vars)
            is_whole = isinstance(made.body, BufferStore) and are_equal(bound_axes(made), made.body.indices, axes)
            return Element(axes, made.body.value) if is_whole else None
    axes = tuple(tirx.Var(f"i{at}", "int64") for at in range(len(buffer.ty.shape)))
    return Element(axes, buffer[axes])


def _taps(weight: Element, buffer: Any) -> tuple[int, int]:
    """Return rows and columns of the filters, without zeros that fill them up to multiples of the stride."""
    sides = [int(extent) for extent in buffer.ty.shape[:2]]
    if not isinstance(weight.value, Call):
        return sides[0], sides[1]
    condition = weight.value.args[0]

    def is_tap(side: int, at: int) -> bool:
        places = {axis: at if number == side else 0 for number, axis in enumerate(weight.axes)}
        known = structural.structural_map(condition, [(Var, lambda var: tirx.const(places[var], "int64") if var in places else var)])
        return bool(Analyzer().can_prove(known))

    rows, columns = (sum(is_tap(side, at) for at in range(extent)) for side, extent in enumerate(sides))
    return rows, columns
