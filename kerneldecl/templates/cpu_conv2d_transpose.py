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

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import IRModule, tirx
from tvm.ir import Call, TensorLoad, Var
from tvm.s_tir import Schedule
from tvm.sym import Analyzer
from tvm.tirx import Add, BufferStore, Cast, Mul
from tvm_ffi import structural

from kerneldecl.analysis.cpu_params import CpuPhasedConvParams
from kerneldecl.compiler.blocks import is_reduction
from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.gemm import vector_lanes
from kerneldecl.templates.cpu.phased_conv_kernel import PhasedConv, Side, build
from kerneldecl.templates.cpu.splice import Element
from kerneldecl.templates.shared.contraction import merge, only_reduction

NAXES = 9
"""Axes of the convolution of all phases: image, row, column, phase down and along, output channel; tap's row and column, input channel."""


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
    following = _following(sch, block)
    if not following or any(is_reduction(sch.get(each)) for each in following) or not _inlined_before(sch, block):
        return None
    last = sch.get(merge(sch, following))
    phases = sch.get(block)
    extents = [int(axis.dom.extent) for axis in phases.iter_vars]
    images, _, _, stride, _, f, *_ = extents
    operands = _operands(phases, stride)
    args = tuple(sch.mod["main"].params)
    if operands is None or not isinstance(last.body, BufferStore) or not last.body.buffer.same_as(args[-1]):
        return None
    pixels, weights = operands
    pixel, weight = _element(sch, block, pixels), _element(sch, block, weights)
    found = _results(last, phases.writes[0].source, stride)
    if pixel is None or weight is None or found is None:
        return None
    result, place, offsets, results = found
    taps = _taps(weight, weights)
    unpadded = weight.value.args[1] if isinstance(weight.value, Call) else weight.value
    return PhasedConv(
        args=args,
        images=images,
        rows=_side(results[0], taps[0], offsets[0], stride),
        columns=_side(results[1], taps[1], offsets[1], stride),
        stride=stride,
        channels=extents[-1],
        f=f,
        accum=str(phases.writes[0].source.ty.dtype),
        padded=(int(pixels.ty.shape[1]), int(pixels.ty.shape[2])),
        pixel=pixel,
        weight=Element(weight.axes, unpadded),
        sums=phases.writes[0].source,
        result=result,
        place=place,
    )


def _side(results: int, taps: int, offset: int, stride: int) -> Side:
    """Return how results of a side see taps: a later tap meets an earlier pixel."""
    return Side(results, taps, offset, step=1, first=-(-taps // stride) - 1, apart=-1)


def _following(sch: Schedule, block: Any) -> list[Any]:
    children = list(sch.get_child_blocks(sch.get_sblock("root")))
    position = next(at for at, child in enumerate(children) if sch.get(child).same_as(sch.get(block)))
    return children[position + 1 :]


def _inlined_before(sch: Schedule, block: Any) -> bool:
    """Inline what the operands' producers read; say whether arguments alone are left to be read by them."""
    for producer in sch.get_producers(block):
        for earlier in sch.get_producers(producer):
            if sch.get_producers(earlier):
                return False
            sch.compute_inline(earlier)
    return True


def _operands(block: Any, stride: int) -> tuple[Any, Any] | None:
    """Return the buffers of pixels and of weights of a block that convolves all phases, or None for another block."""
    image, row, column, down, along, f, r, s, c = axes = [axis.var for axis in block.iter_vars]
    body = block.body
    if len(block.reads) != 2 or not isinstance(body, BufferStore) or not isinstance(body.value, Add) or not isinstance(body.value.b, Mul):
        return None
    most = [int(axis.dom.extent) for axis in block.iter_vars[6:8]]
    pixel, weight = (each.value if isinstance(each, Cast) else each for each in (body.value.b.a, body.value.b.b))
    if not isinstance(pixel, TensorLoad) or not isinstance(weight, TensorLoad):
        return None
    wanted = (
        (pixel.indices, (image, row + r, column + s, c)),
        (weight.indices, (down + (most[0] - 1 - r) * stride, along + (most[1] - 1 - s) * stride, c, f)),
        (body.indices, axes[:6]),
    )
    analyzer = _bound(block)
    return (pixel.source, weight.source) if all(_equal(analyzer, *pair) for pair in wanted) else None


def _bound(block: Any) -> Analyzer:
    """Return an analyzer that knows the range of each axis of a block: TVM writes 0 for an axis of extent 1."""
    analyzer = Analyzer()
    for axis in block.iter_vars:
        analyzer.bind(axis.var, axis.dom)
    return analyzer


def _equal(analyzer: Analyzer, found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return len(found) == len(wanted) and all(analyzer.can_prove_equal(*pair) for pair in zip(found, wanted, strict=True))


def _element(sch: Schedule, block: Any, buffer: Any) -> Element | None:
    """Return how an element of an operand is computed from arguments."""
    for producer in sch.get_producers(block):
        made = sch.get(producer)
        if made.writes[0].source.same_as(buffer):
            axes = tuple(axis.var for axis in made.iter_vars)
            is_whole = isinstance(made.body, BufferStore) and _equal(_bound(made), made.body.indices, axes)
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


def _results(last: Any, phases: Any, stride: int) -> tuple[Element, tuple[Any, ...], list[int], list[int]] | None:
    """Return an element of Y by image, row, column and channel, its place, what is added to row and column, and how many there are.

    None where the last block reads the phases otherwise than a transposed convolution does.
    """
    loads: list[Any] = []
    structural.structural_walk(last.body, [(TensorLoad, lambda load: loads.append(load) if load.source.same_as(phases) else None)])
    axes, analyzer = [axis.var for axis in last.iter_vars], _bound(last)
    if len(axes) != 4 or not loads or not _equal(analyzer, last.body.indices, axes):
        return None
    for order in ((0, 1, 2, 3), (0, 2, 3, 1)):
        image, y, x, f = (axes[at] for at in order)
        for top, left in ((top, left) for top in range(stride) for left in range(stride)):
            down, along = y + top, x + left
            wanted = (image, down // stride, along // stride, down % stride, along % stride, f)
            if all(_equal(analyzer, load.indices, wanted) for load in loads):
                extents = [int(last.iter_vars[at].dom.extent) for at in order[1:3]]
                return Element((image, y, x, f), last.body.value), tuple(last.body.indices), [top, left], extents
    return None
