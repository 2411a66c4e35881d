"""Owns convolutions on CPUs whose operands are copied first: images channels last with zeros around, weights in panels.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names: images [n, c, h, w] with
weights [f, c, taps], or [n, h, w, c] with [taps, c, f], or sequences of either, in one group.

Parameters, as of `cpu_conv2d_transpose`: tile_w, vectors, block_h, panels; `pack` may be false with channels last.

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    """Return the convolution as one custom kernel, or None where the function is none in one group."""
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
    sides, order = operands.sides, operands.order
    pixel = _pixel(sch, fused.block, operands)
    sums = block.writes[0].source
    place = axes[: len(sides) + 2]
    value = last.body.value if fused.last is not None else sums[place]
    if pixel is None:
        return None
    image, f, *places = (place[at] for at in order.results)
    row = Var("row", "int64") if len(sides) == 1 else places[0]
    rows = Side(results=1, taps=1, offset=0, step=1, first=0, apart=1) if len(sides) == 1 else sides[0]
    shape = [int(operands.pixels.ty.shape[at]) for at in order.results]
    *height, width = shape[2:]
    return PhasedConv(
        args=args,
        images=shape[0],
        rows=rows,
        columns=sides[-1],
        stride=1,
        channels=shape[1],
        f=int(operands.weights.ty.shape[order.weights[0]]),
        accum=str(sums.ty.dtype),
        padded=(height[0] if height else 1, width),
        pixel=pixel,
        weight=_weight(operands),
        sums=sums,
        result=Element((image, row, places[-1], f), value),
        place=place,
    )


class Order(NamedTuple):
    """Where dimensions lie: for images, and results alike, those of the image, of channels and of places; for weights f, c and taps."""

    results: tuple[int, ...]
    weights: tuple[int, ...]


def _orders(count: int) -> tuple[Order, Order]:
    """Return the orders with channels first and with channels last, of so many sides."""
    first = tuple(range(count + 2))
    return Order(first, first), Order((0, count + 1, *range(1, count + 1)), (count + 1, count, *range(count)))


class Operands(NamedTuple):
    """What a convolution reads."""

    pixels: Any
    weights: Any
    sides: list[Side]
    order: Order


def _operands(block: Any) -> Operands | None:
    """Return what a block that convolves reads; None for another."""
    count = (len(block.iter_vars) - 3) // 2
    body = block.body
    if count not in (1, 2) or len(block.iter_vars) != 2 * count + 3 or not isinstance(body, BufferStore) or not isinstance(body.value, Add):
        return None
    product = body.value.b
    loads = [each.value if isinstance(each, Cast) else each for each in (product.a, product.b)] if isinstance(product, Mul) else []
    if len(loads) != 2 or not all(isinstance(each, TensorLoad) and len(each.indices) == count + 2 for each in loads):
        return None
    found = (_operands_in(block, loads, order) for order in _orders(count))
    return next((each for each in found if each is not None), None)


def _operands_in(block: Any, loads: Sequence[Any], order: Order) -> Operands | None:
    """Return what a block that convolves reads, if its axes and its operands' dimensions are in this order."""
    pixel, weight = loads
    count = len(order.results) - 2
    axes, extents = [axis.var for axis in block.iter_vars], [int(axis.dom.extent) for axis in block.iter_vars]
    image, f, *places = order.results
    # Reduced axes are in the order of the weights' dimensions, of which f is none.
    _, c, *taps = (count + 2 + sorted(order.weights[1:]).index(at) if at in order.weights[1:] else -1 for at in order.weights)
    analyzer = Analyzer()
    for axis in block.iter_vars:
        analyzer.bind(axis.var, axis.dom)
    sides, wanted = [], {order.results[0]: axes[image], order.results[1]: axes[c]}
    for at, place, tap in zip(order.results[2:], places, taps, strict=True):
        step, apart = (_coefficient(pixel.indices[at], axes, axes[axis]) for axis in (place, tap))
        wanted[at] = axes[place] * step + axes[tap] * apart
        sides.append(Side(extents[place], extents[tap], offset=0, step=step, first=0, apart=apart))
    of_weight = dict(zip(order.weights, (axes[f], axes[c], *(axes[tap] for tap in taps)), strict=True))
    pairs = (
        (pixel.indices, [wanted[at] for at in range(count + 2)]),
        (weight.indices, [of_weight[at] for at in range(count + 2)]),
        (block.body.indices, axes[: count + 2]),
    )
    return Operands(pixel.source, weight.source, sides, order) if all(_equal(analyzer, *pair) for pair in pairs) else None


def _coefficient(index: Any, axes: Sequence[Any], var: Any) -> int:
    """Return how far an index moves with one of the axes; 0 where it is not linear in them."""

    def at(value: int) -> Any:
        return structural.structural_map(index, [(Var, lambda each: tirx.const(value if each.same_as(var) else 0, "int64"))])

    moved = Analyzer().simplify(at(1) - at(0))
    return int(moved) if isinstance(moved, tirx.IntImm) and any(var.same_as(axis) for axis in axes) else 0


def _equal(analyzer: Analyzer, found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return len(found) == len(wanted) and all(analyzer.can_prove_equal(*pair) for pair in zip(found, wanted, strict=True))


def _pixel(sch: Schedule, block: Any, operands: Operands) -> Element | None:
    """Return how a pixel with zeros around is computed, of an image, a row, a column and a channel."""
    buffer = operands.pixels
    axes: tuple[Any, ...] = tuple(Var(f"i{at}", "int64") for at in range(len(buffer.ty.shape)))
    value = buffer[axes]
    for producer in sch.get_producers(block):
        made = sch.get(producer)
        if made.writes[0].source.same_as(buffer):
            axes = tuple(axis.var for axis in made.iter_vars)
            if not isinstance(made.body, BufferStore) or not _equal(Analyzer(), made.body.indices, axes):
                return None
            value = made.body.value
    image, channel, *places = (axes[at] for at in operands.order.results)
    return Element((image, places[0] if len(places) == 2 else Var("row", "int64"), places[-1], channel), value)


def _weight(operands: Operands) -> Element:
    """Return a weight of a tap's row and column, an input and an output channel."""
    axes = tuple(Var(f"w{at}", "int64") for at in range(len(operands.weights.ty.shape)))
    f, c, *taps = (axes[at] for at in operands.order.weights)
    return Element((taps[0] if len(taps) == 2 else Var("row", "int64"), taps[-1], c, f), operands.weights[axes])
