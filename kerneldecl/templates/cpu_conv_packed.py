"""Owns convolutions with channels first on CPUs: images are copied channels last, weights in panels; results are stored channels first.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names: images [n, c, h, w] or
sequences [n, c, w] in one group, weights [f, c, taps].

Parameters, as of `cpu_conv2d_transpose`: tile_w, vectors, block_h, panels; `pack` is true.

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import IRModule, tirx
from tvm.ir import TensorLoad, Var
from tvm.s_tir import Schedule
from tvm.sym import Analyzer
from tvm.tirx import Add, BufferStore, Cast, Mul
from tvm_ffi import structural

from kerneldecl.analysis.cpu_params import CpuPhasedConvParams
from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.gemm import vector_lanes
from kerneldecl.templates.cpu.phased_conv_kernel import PhasedConv, Side, build
from kerneldecl.templates.cpu.splice import Element
from kerneldecl.templates.shared.contraction import fuse_epilogue, only_reduction


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the convolution as one custom kernel, or None where the function is none with channels first."""
    chosen = CpuPhasedConvParams(**{name: params[name] for name in CpuPhasedConvParams._fields})  # type: ignore[arg-type]
    sch = Schedule(mod)
    block = only_reduction(sch)
    if block is None or not chosen.fits():
        return None
    lanes = vector_lanes(arch, sch.get(block))
    conv = read(sch)
    return None if conv is None else build(conv, chosen, lanes)


def read(sch: Schedule) -> PhasedConv | None:
    """Return the convolution that a schedule's function is, None where it is something else; change the schedule."""
    fused = fuse_epilogue(sch)
    if fused is None or any(sch.get_producers(producer) for producer in sch.get_producers(fused.block)):
        return None
    block = sch.get(fused.block)
    last = block if fused.last is None else sch.get(fused.last)
    operands = _operands(block)
    args, axes = tuple(sch.mod["main"].params), tuple(axis.var for axis in last.iter_vars)
    if operands is None or not isinstance(last.body, BufferStore) or not last.body.buffer.same_as(args[-1]):
        return None
    pixels, weights, sides = operands
    pixel = _pixel(sch, fused.block, pixels)
    sums = block.writes[0].source
    value = last.body.value if fused.last is not None else sums[tuple(axes[: len(sides) + 2])]
    if pixel is None:
        return None
    extents = [int(axis.dom.extent) for axis in block.iter_vars]
    image, f, *places = axes[: len(sides) + 2]
    row = Var("row", "int64") if len(sides) == 1 else places[0]
    rows = Side(results=1, taps=1, offset=0, step=1, first=0, apart=1) if len(sides) == 1 else sides[0]
    *height, width = (int(extent) for extent in pixels.ty.shape[2:])
    return PhasedConv(
        args=args,
        images=extents[0],
        rows=rows,
        columns=sides[-1],
        stride=1,
        channels=extents[len(sides) + 2],
        f=extents[1],
        accum=str(sums.ty.dtype),
        padded=(height[0] if height else 1, width),
        pixel=pixel,
        weight=_weight(weights),
        sums=sums,
        result=Element((image, row, places[-1], f), value),
        place=(image, f, *places),
    )


def _operands(block: Any) -> tuple[Any, Any, list[Side]] | None:
    """Return the buffers of pixels and of weights of a block that convolves with channels first, and its sides; None for another."""
    axes = [axis.var for axis in block.iter_vars]
    count = (len(axes) - 3) // 2
    body = block.body
    if count not in (1, 2) or len(axes) != 2 * count + 3 or not isinstance(body, BufferStore) or not isinstance(body.value, Add):
        return None
    product = body.value.b
    loads = [each.value if isinstance(each, Cast) else each for each in (product.a, product.b)] if isinstance(product, Mul) else []
    if len(loads) != 2 or not all(isinstance(each, TensorLoad) and len(each.indices) == count + 2 for each in loads):
        return None
    pixel, weight = loads
    image, f, *places = axes[: count + 2]
    c, *taps = axes[count + 2 :]
    analyzer = Analyzer()
    for axis in block.iter_vars:
        analyzer.bind(axis.var, axis.dom)
    sides, wanted = [], [image, c]
    for at, (place, tap) in enumerate(zip(places, taps, strict=True)):
        step, apart = (_coefficient(pixel.indices[2 + at], axes, var) for var in (place, tap))
        wanted.append(place * step + tap * apart)
        results, extent = (int(block.iter_vars[number].dom.extent) for number in (2 + at, count + 3 + at))
        sides.append(Side(results, extent, offset=0, step=step, first=0, apart=apart))
    found = ((pixel.indices, wanted), (weight.indices, (f, c, *taps)), (body.indices, axes[: count + 2]))
    return (pixel.source, weight.source, sides) if all(_equal(analyzer, *pair) for pair in found) else None


def _coefficient(index: Any, axes: Sequence[Any], var: Any) -> int:
    """Return how far an index moves with one of the axes; 0 where it is not linear in them."""

    def at(value: int) -> Any:
        return structural.structural_map(index, [(Var, lambda each: tirx.const(value if each.same_as(var) else 0, "int64"))])

    moved = Analyzer().simplify(at(1) - at(0))
    return int(moved) if isinstance(moved, tirx.IntImm) and any(var.same_as(axis) for axis in axes) else 0


def _equal(analyzer: Analyzer, found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return len(found) == len(wanted) and all(analyzer.can_prove_equal(*pair) for pair in zip(found, wanted, strict=True))


def _pixel(sch: Schedule, block: Any, buffer: Any) -> Element | None:
    """Return how a pixel with zeros around is computed, of an image, a row, a column and a channel."""
    axes: tuple[Any, ...] = tuple(Var(f"i{at}", "int64") for at in range(len(buffer.ty.shape)))
    value = buffer[axes]
    for producer in sch.get_producers(block):
        made = sch.get(producer)
        if made.writes[0].source.same_as(buffer):
            axes = tuple(axis.var for axis in made.iter_vars)
            if not isinstance(made.body, BufferStore) or not _equal(Analyzer(), made.body.indices, axes):
                return None
            value = made.body.value
    image, channel, *places = axes
    return Element((image, places[0] if len(places) == 2 else Var("row", "int64"), places[-1], channel), value)


def _weight(buffer: Any) -> Element:
    """Return a weight of a tap's row and column, an input and an output channel."""
    axes = tuple(Var(f"w{at}", "int64") for at in range(len(buffer.ty.shape)))
    f, c, *taps = axes
    return Element((taps[0] if len(taps) == 2 else Var("row", "int64"), taps[-1], c, f), buffer[axes])
