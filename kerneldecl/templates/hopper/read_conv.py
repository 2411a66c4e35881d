"""Owns the reading of a convolution of images or sequences whose channels are contiguous: where operands lie, what the epilogue computes.

Knows nothing of tiles, instructions or targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Range, TensorLoad
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError
from tvm.sym import Analyzer, detect_linear_equation
from tvm_ffi import structural

from kerneldecl.analysis.contraction import Contraction, contraction_of
from kerneldecl.compiler.blocks import is_reduction
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.templates.hopper.read_gemm import dense_strides, is_load_of, loads_of, replaced, uncast
from kerneldecl.templates.hopper.read_padding import read_padding
from kerneldecl.templates.shared.contraction import FusedReduction, fuse_epilogue
from kerneldecl.templates.shared.fast_math import with_fast_activations

Terms = tuple[dict[int, int], int]
"""An index: coefficients by axis, and a constant."""
_RANK, _ROW = 4, 1
"""Dimensions of an image, and which of them is the row."""


@dataclass(frozen=True)
class SlidingWindow:
    """How a convolution's window moves along one side of an image."""

    image: int
    """Pixels along the side."""
    results: int
    taps: int
    stride: int
    dilation: int
    padding: int
    """Zeros before the first pixel; those after the last follow."""


@dataclass(frozen=True)
class Convolution:
    """Y[n, h, w, f] = epilogue(sum over r, s, c of X[n, h * stride + r * dilation - padding, ..., c] * W[r, s, c, f])."""

    func_params: tuple[Any, ...]
    views: tuple[tuple[Any, Any], ...]
    """Buffers of images of one row, each with the argument whose memory it is, where that is of sequences."""
    image: Any
    """[n, h, w, c], dense."""
    weights: Any
    weight_strides: tuple[int, int, int, int]
    """Strides of f, c, columns and rows of taps, in elements."""
    out: Any
    """[n, h, w, f], dense."""
    images: int
    channels: int
    filters: int
    rows: SlidingWindow
    columns: SlidingWindow
    accum_dtype: str
    groups: int
    """Groups of channels; filters of one see its channels alone."""
    value: Callable[[Any, Sequence[Any], Sequence[Any]], Any]
    """(accumulator, indices of the result, values of the epilogue's operands there) -> the element to store there."""
    aux: Callable[[Sequence[Any]], list[Any]]
    """Indices of the result -> loads of the epilogue's operands, such as a bias."""


def _with_zero(index: Sequence[Any], place: int, zero: int = 0) -> list[Any]:
    """Return the index, or the shape, of a sequence or its weights as that of an image of one row; that of an image as it is."""
    return list(index) if len(index) >= _RANK else [*index[:place], zero, *index[place:]]


def _with_row(buffer: Any, place: int) -> Any:
    """Return a sequence's buffer with an axis of one row; an image's as it is."""
    if len(buffer.shape) >= _RANK:
        return buffer
    return tirx.decl_buffer(_with_zero(buffer.shape, place, 1), buffer.dtype, f"{buffer.name}_image")


def with_views(mod: tvm.IRModule, convolution: Convolution) -> tvm.IRModule:
    """Return a kernel's module in which the convolution's views are those of arguments."""
    if not convolution.views:
        return mod
    func = mod["main"]
    declared = [tirx.DeclBuffer(view, data=base.data) for view, base in convolution.views]
    return tvm.IRModule({"main": func.with_body(tirx.SeqStmt([*declared, func.body]))})


def read_convolution(mod: tvm.IRModule) -> Convolution | None:
    """Return the convolution that a module's function is, None where it is none or its images have another layout."""
    sch = Schedule(mod)
    fused = fuse_epilogue(sch)
    if fused is None:
        return None
    contraction = contraction_of(iter_space(sch.mod))
    if not isinstance(contraction, Contraction) or not contraction.is_plain or contraction.batch:
        return None
    producers = [sch.get(producer) for producer in sch.get_producers(fused.block)]
    if len(producers) > 1 or any(is_reduction(producer) for producer in producers):
        return None
    try:
        positions = Operands(contraction.a.position, contraction.b.position, contraction.accum_dtype)
        return read(sch, fused, producers, positions)
    except ScheduleError:
        return None


class Operands(NamedTuple):
    """Where a reduction reads what, and what it accumulates in."""

    image: int
    """The image's place among the factors."""
    weights: int
    accum_dtype: str


class _Accesses(NamedTuple):
    """What a convolution's reduction reads and writes; sequences are images of one row, whose indices have a zero there."""

    source: Any
    """The image's buffer, without its zeros around."""
    image_shape: tuple[int, ...]
    padding: list[int]
    """Zeros before each dimension of the image."""
    weights: Any
    """The load of the weights."""
    stored: Any
    """The store of the results."""
    image_index: list[Terms]
    weight_index: list[Terms]
    accum_index: list[Terms]
    groups: int


def read(sch: Schedule, fused: FusedReduction, producers: Sequence[Any], operands: Operands) -> Convolution | None:
    """Return the convolution that a multiply-accumulate of two operands is, of one group of channels or several."""
    block, last = fused.blocks(sch)
    func = sch.mod["main"]
    fresh = {param: tirx.decl_buffer([int(extent) for extent in param.shape], param.dtype, param.name) for param in func.params}
    axes = _Axes(block)
    found = _accesses(axes, block, last, producers, operands)
    if found is None or any(buffer not in fresh for buffer in (found.source, found.weights.source, found.stored.buffer)):
        return None
    windows = _windows(axes, found)
    strides = _weight_strides(axes, found)
    if windows is None or strides is None:
        return None
    given = (fresh[found.source], fresh[found.weights.source], fresh[found.stored.buffer])
    image, weights, out = (_with_row(buffer, place) for buffer, place in zip(given, (_ROW, 0, _ROW), strict=True))
    return Convolution(
        func_params=tuple(fresh[param] for param in func.params),
        views=tuple((view, base) for view, base in zip((image, weights, out), given, strict=True) if not view.same_as(base)),
        image=image,
        weights=weights,
        weight_strides=strides,
        out=out,
        images=found.image_shape[0],
        channels=found.image_shape[3],
        filters=int(out.shape[3]),
        rows=windows[0],
        columns=windows[1],
        accum_dtype=operands.accum_dtype,
        groups=found.groups,
        **epilogue_functions(found.stored, None if last is None else block.body.buffer, fresh),
    )


def _accesses(axes: _Axes, block: Any, last: Any, producers: Sequence[Any], operands: Operands) -> _Accesses | None:
    """Return what a reduction reads and writes, None where that is no convolution's order of dimensions."""
    total = block.body.value
    multiply = uncast(total.b if is_load_of(total.a, block.body.buffer) else total.a)
    loads = [uncast(multiply.a), uncast(multiply.b)]
    image, weights = loads[operands.image], loads[operands.weights]
    stored = last.body if last is not None else block.body
    padded = read_padding(producers[0]) if producers else (image.source, [0] * len(image.indices))
    if padded is None or (producers and not image.source.same_as(producers[0].writes[0].source)):
        return None
    groups, pixel = _split_groups(axes, image, block.body.indices)
    places = (_with_zero(pixel, _ROW), _with_zero(weights.indices, 0), _with_zero(block.body.indices, _ROW))
    indices = [axes.all_terms(index) for index in places]
    known = [index for index in indices if index is not None]
    is_in_order = last is None or all(map(tvm_ffi.structural_equal, stored.indices, _read_at(last, block.body.buffer)))
    if len(known) < len(indices) or not is_in_order:
        return None
    return _Accesses(
        source=padded[0],
        image_shape=tuple(_with_zero([int(extent) for extent in padded[0].shape], _ROW, 1)),
        padding=_with_zero(padded[1], _ROW),
        weights=weights,
        stored=stored,
        image_index=known[0],
        weight_index=known[1],
        accum_index=known[2],
        groups=groups,
    )


def _split_groups(axes: _Axes, image: Any, out: Sequence[Any]) -> tuple[int, list[Any]]:
    """Return the groups of channels, and an image's indices with the channel counted from the first one of its group.

    With several groups, the channel is f // filters * channels + c, for a group's filters and channels and a reduced axis c.
    """
    *pixel, channel = image.indices
    filters, whole = axes.extent_of(out[-1]), int(image.source.shape[-1])
    for each in range(1, whole + 1):
        if whole % each or filters % each:
            continue
        within = channel - tirx.floordiv(out[-1], filters // each) * (whole // each)
        if axes.reduced_alone(within, whole // each):
            return each, [*pixel, within]
    return 1, list(image.indices)


def epilogue_functions(stored: Any, accum: Any, fresh: dict[Any, Any]) -> dict[str, Any]:
    """Return a convolution's functions of a result's indices; `accum` is the buffer that the epilogue reads accumulators from, or None."""
    end = with_fast_activations(stored.value, str(stored.buffer.dtype))
    loads = [] if accum is None else loads_of(end, accum)

    def known(index: Sequence[Any]) -> dict[Any, Any]:
        own = index if len(stored.indices) == _RANK else [*index[:_ROW], *index[_ROW + 1 :]]
        places = zip(stored.indices, own, strict=True)
        return {**fresh, **{var: tirx.Cast(var.ty.dtype, tirx.const(0, "int32") + at) for var, at in places}}

    def value(total: Any, index: Sequence[Any], aux: Sequence[Any]) -> Any:
        return total if accum is None else replaced(end, (accum, total), dict(zip(loads, aux, strict=True)), known(index))

    def aux(index: Sequence[Any]) -> list[Any]:
        return [replaced(load, None, {}, known(index)) for load in loads]

    return {"value": value, "aux": aux}


def _read_at(last: Any, accum: Any) -> list[Any]:
    """Return the indices at which a block reads the accumulators."""
    found: list[Any] = []

    def note(load: Any) -> None:
        if load.source.same_as(accum):
            found[:] = list(load.indices)

    structural.structural_walk(last.body, [(TensorLoad, note)])
    return found


class _Axes:
    """A block's axes, and indices as linear terms of them."""

    def __init__(self, block: Any) -> None:
        self._vars = [axis.var for axis in block.iter_vars]
        self.extents = [int(axis.dom.extent) for axis in block.iter_vars]
        self.is_reduced = [axis.iter_type == tirx.IterVar.CommReduce for axis in block.iter_vars]
        self._analyzer = Analyzer()
        for axis in block.iter_vars:
            self._analyzer.bind(axis.var, Range.from_min_extent(axis.dom.min, axis.dom.extent))

    def all_terms(self, indices: Sequence[Any]) -> list[Terms] | None:
        """Return the terms of the indices of an operand with four dimensions; None for others."""
        found = [self._terms(index) for index in indices]
        known = [terms for terms in found if terms is not None]
        return known if len(known) == len(found) == _RANK else None

    def extent_of(self, index: Any) -> int:
        """Return the extent of an axis, given its variable; 1 for anything else."""
        return next((extent for var, extent in zip(self._vars, self.extents, strict=True) if var.same_as(index)), 1)

    def reduced_alone(self, index: Any, extent: int) -> bool:
        """Say whether an index is one reduced axis of this extent, or 0 where that is 1."""
        terms = self._terms(index)
        if terms is None or terms[1] or len(terms[0]) != int(extent > 1):
            return False
        return all(c == 1 and self.is_reduced[at] and self.extents[at] == extent for at, c in terms[0].items())

    def _terms(self, index: Any) -> Terms | None:
        """Return the coefficient of each axis longer than 1 that an index has, and its constant; None where it is not linear."""
        found = detect_linear_equation(self._analyzer.simplify(index), self._vars)
        if not found or not all(isinstance(term, tirx.IntImm) for term in found):
            return None
        *coefficients, constant = (int(term.value) for term in found)
        return {at: c for at, c in enumerate(coefficients) if c and self.extents[at] > 1}, constant


def _windows(axes: _Axes, found: _Accesses) -> tuple[SlidingWindow, SlidingWindow] | None:
    """Return the windows over rows and columns; None where the dimensions are not image, row, column, channel."""
    for dim in (0, 3):
        terms, constant = found.image_index[dim]
        if constant or found.padding[dim] or any(coefficient != 1 for coefficient in terms.values()) or len(terms) > 1:
            return None
    (image, _), (channel, _) = found.image_index[0], found.image_index[3]
    is_image_first = image == found.accum_index[0][0] and not any(axes.is_reduced[at] for at in image)
    if not is_image_first or not all(axes.is_reduced[at] for at in channel):
        return None
    rows, columns = (_window(axes, found, dim) for dim in (1, 2))
    return None if rows is None or columns is None else (rows, columns)


def _window(axes: _Axes, found: _Accesses, dim: int) -> SlidingWindow | None:
    terms, constant = found.image_index[dim]
    spatial = {at: c for at, c in terms.items() if not axes.is_reduced[at]}
    reduced = {at: c for at, c in terms.items() if axes.is_reduced[at]}
    has_other_axes = len(spatial) > 1 or len(reduced) > 1 or set(spatial) != set(found.accum_index[dim][0])
    if has_other_axes or any(c < 1 for c in terms.values()):
        return None
    return SlidingWindow(
        image=found.image_shape[dim],
        results=next((axes.extents[at] for at in spatial), 1),
        taps=next((axes.extents[at] for at in reduced), 1),
        stride=next(iter(spatial.values()), 1),
        dilation=next(iter(reduced.values()), 1),
        padding=found.padding[dim] - constant,
    )


def _weight_strides(axes: _Axes, found: _Accesses) -> tuple[int, int, int, int] | None:
    """Return the strides of filters, channels, columns and rows of taps, in elements; 0 where there is one."""
    strides: dict[int, int] = {}
    pitches = dense_strides(_with_zero(found.weights.source.shape, 0, 1))
    for (terms, constant), pitch in zip(found.weight_index, pitches, strict=True):
        if constant:
            return None
        for at, coefficient in terms.items():
            strides[at] = strides.get(at, 0) + coefficient * pitch

    def stride(terms: dict[int, int], *, is_reduced: bool) -> int:
        return sum(strides.pop(at, 0) for at in terms if axes.is_reduced[at] == is_reduced)

    channel = stride(found.image_index[3][0], is_reduced=True)
    row = stride(found.image_index[1][0], is_reduced=True)
    column = stride(found.image_index[2][0], is_reduced=True)
    filters = stride(found.accum_index[3][0], is_reduced=False)
    return None if strides else (filters, channel, column, row)
