"""Owns the converters of ONNX operators whose result has extents that are expressions of a model's dynamic dimensions.

Knows nothing of files, nor of how the expressions are found.

Each takes the data, and what is known of the elements of all inputs. It returns None where TVM's own converter is right. Where ONNX
broadcasts by sizes at run time, two extents are taken to be equal: the importer makes the dimensions of inputs so, and the model checks
these when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relax, te
from tvm.relax import op

from kerneldecl.compiler.graph.rewriting import dtype_of
from kerneldecl.compiler.model_import import extents
from kerneldecl.compiler.model_import.onnx_extents import Known, objects

_ENDLESS = extents.LARGEST
_OPAQUE = 8


def shape_of(value: Any) -> list[Any] | None:
    """Return the extents of a tensor, as ints where they are numbers; None where its shape is not known."""
    shape = getattr(value.ty, "shape", None)
    return [extents.plain(extent) for extent in shape.values] if isinstance(shape, relax.ShapeExpr) else None


def tensor_of(builder: Any, known: Known) -> Any:
    """Return a tensor of known elements: a constant, or one that is made of extents when the model runs."""
    if known.is_constant:
        array = np.array(known.elements.reshape(-1).tolist(), known.dtype).reshape(known.elements.shape)
        return relax.const(array, known.dtype)
    values = [tvm.tirx.const(each, "int64") if isinstance(each, int) else each for each in known.elements.flat]

    def vector(*values: Any) -> Any:
        def element(at: Any) -> Any:
            found = tvm.tirx.const(0, "int64")
            for place, value in enumerate(values):
                found = tvm.tirx.Select(at == place, value, found)
            return found

        return te.compute((len(values),), element, name="extents")

    # TVM's own, shape_to_tensor, cannot be fused: TVM defines its extents twice then. Nor is this one, by its pattern.
    found = builder.emit_te(vector, *values, primfunc_name_hint="extents", primfunc_attrs={"op_pattern": _OPAQUE})
    if known.elements.ndim != 1:
        found = builder.emit(op.reshape(found, known.elements.shape))
    return found if known.dtype == "int64" else builder.emit(op.astype(found, known.dtype))


def unknowns(left: Any, right: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a dimension, and the extent that it is where two are equal: each of the two that is a dimension, and not in the other."""
    for symbol, other in ((left, right), (right, left)):
        if tvm.ir.is_prim_var(symbol) and symbol not in extents.symbols_in(other):
            yield symbol, other


class Emitter:
    """A block builder, and the extents that the nodes so far take to be equal though nothing says that they are."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.equal: list[tuple[Any, Any]] = []

    def emit(self, expr: Any) -> Any:
        return self.builder.emit(expr)

    def tensor(self, values: Sequence[Any], shape: Sequence[int], dtype: str = "int64") -> Any:
        """Return a tensor of extents."""
        return tensor_of(self.builder, Known(objects(values, shape), dtype))

    def with_extents(self, value: Any, shape: Sequence[Any]) -> Any:
        """Return a tensor with other expressions for its extents."""
        own = shape_of(value) or []
        different = [pair for pair in zip(own, shape, strict=True) if not extents.are_equal(*pair)]
        if not different or not all(any(unknowns(*pair)) for pair in different):
            return value
        self.equal += different
        return self.builder.match_cast(value, relax.TensorType(list(shape), value.ty.dtype.dtype))


def reshape(builder: Emitter, inputs: Sequence[Any], known: Sequence[Known | None], attrs: Mapping[str, Any]) -> Any:
    """Convert Reshape: 0 is the data's extent, and -1 what is left."""
    own, wanted = shape_of(inputs[0]), known[1]
    if own is None or wanted is None:
        return None
    shape = [own[at] if _is(extent, 0) and not attrs.get("allowzero") else extent for at, extent in enumerate(wanted.elements)]
    rest = [at for at, extent in enumerate(shape) if _is(extent, -1)]
    if rest:
        (at,) = rest
        shape[at] = extents.ratio(own, [extent for other, extent in enumerate(shape) if other != at])
    return builder.emit(op.reshape(inputs[0], shape))


def expand(builder: Emitter, inputs: Sequence[Any], known: Sequence[Known | None], _: Mapping[str, Any]) -> Any:
    """Convert Expand: an extent of 1 there leaves the data's."""
    own, wanted = shape_of(inputs[0]), known[1]
    if own is None or wanted is None:
        return None
    shape = broadcast(own, list(wanted.elements))
    return builder.emit(op.broadcast_to(_fitting(builder, inputs[0], shape), shape))


def constant_of_shape(builder: Emitter, _: Sequence[Any], known: Sequence[Known | None], attrs: Mapping[str, Any]) -> Any:
    """Convert ConstantOfShape."""
    from onnx import numpy_helper

    if known[0] is None:
        return None
    value = numpy_helper.to_array(attrs["value"]).reshape(()) if "value" in attrs else np.zeros((), "float32")
    return builder.emit(op.broadcast_to(relax.const(value, str(value.dtype)), list(known[0].elements)))


def arange(builder: Emitter, _: Sequence[Any], known: Sequence[Known | None], __: Mapping[str, Any]) -> Any:
    """Convert Range of integers."""
    if any(each is None for each in known):
        return None
    start, limit, step = (each.elements.reshape(-1)[0] for each in known if each is not None)
    dtype = known[0].dtype if known[0] is not None else ""
    if step != 1:
        return None
    # From 0 on: TVM simplifies the number of elements of that alone.
    places = builder.emit(op.arange(0, extents.plain(limit - start), 1, "int64"))
    if not _is(start, 0):
        places = builder.emit(op.add(places, builder.tensor([start], [1])))
    return places if dtype == "int64" else builder.emit(op.astype(places, dtype))


def gather(builder: Emitter, inputs: Sequence[Any], known: Sequence[Known | None], attrs: Mapping[str, Any]) -> Any:
    """Convert Gather at constant indices: those of a dynamic axis count from the end as a slice does."""
    own, places = shape_of(inputs[0]), known[1]
    if own is None:
        return None
    axis = int(attrs.get("axis", 0)) % len(own)
    if places is None or not places.is_constant:
        return builder.emit(op.take(inputs[0], _from_start(builder, inputs[1], [own[axis]], []), axis))
    indices = np.array(places.elements.reshape(-1).tolist(), "int64")
    if isinstance(own[axis], int):
        indices = np.where(indices < 0, indices + own[axis], indices)
    if not (indices < 0).any():
        return builder.emit(op.take(inputs[0], relax.const(indices.reshape(places.elements.shape), "int64"), axis))
    if indices.size != 1:
        return None
    begin = extents.plain(own[axis] + int(indices[0]))
    one = builder.emit(op.strided_slice(inputs[0], [axis], [begin], [begin + 1], assume_inbound=True))
    return builder.emit(op.reshape(one, [*own[:axis], *places.elements.shape, *own[axis + 1 :]]))


def gather_elements(builder: Emitter, inputs: Sequence[Any], _: Sequence[Known | None], attrs: Mapping[str, Any]) -> Any:
    """Convert GatherElements."""
    own = shape_of(inputs[0])
    if own is None:
        return None
    axis = int(attrs.get("axis", 0)) % len(own)
    return builder.emit(op.gather_elements(inputs[0], _from_start(builder, inputs[1], [own[axis]], []), axis))


def gather_nd(builder: Emitter, inputs: Sequence[Any], _: Sequence[Known | None], attrs: Mapping[str, Any]) -> Any:
    """Convert GatherND."""
    own, places = shape_of(inputs[0]), shape_of(inputs[1])
    batch = int(attrs.get("batch_dims", 0))
    if own is None or places is None or not isinstance(places[-1], int):
        return None
    counted = own[batch : batch + places[-1]]
    return builder.emit(op.gather_nd(inputs[0], _from_start(builder, inputs[1], counted, [len(counted)]), batch))


def _from_start(builder: Emitter, indices: Any, counted: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return indices of axes of these extents without those that count from the end."""
    dtype = dtype_of(indices)
    is_below = builder.emit(op.less(indices, relax.const(0, dtype)))
    return builder.emit(op.where(is_below, builder.emit(op.add(indices, builder.tensor(counted, shape, dtype))), indices))


def cut(builder: Emitter, inputs: Sequence[Any], known: Sequence[Known | None], attrs: Mapping[str, Any]) -> Any:
    """Convert Slice with steps of 1, of tensors of dynamic extents or with ends that are."""
    data, own = inputs[0], shape_of(inputs[0])
    bounds = [*known[1:], None, None, None, None][:4] if len(known) > 1 else [None] * 4
    starts, ends, axes, steps = (
        list(each.elements.reshape(-1)) if each is not None else attrs.get(name)
        for each, name in zip(bounds, ("starts", "ends", "axes", "steps"), strict=True)
    )
    if own is None or starts is None or ends is None or len([each for each in inputs if each is not None]) > 1 + sum(map(bool, bounds)):
        return None
    if any(not _is(step, 1) for step in steps or ()):
        return None
    axes = [int(axis) % len(own) for axis in axes or range(len(starts))]
    places = [_place(own[axis], start, end) for axis, start, end in zip(axes, starts, ends, strict=True)]
    whole = [place for place in zip(axes, places, strict=True) if place[1].is_inside]
    if whole:
        inner, bounds_of = [axis for axis, _ in whole], [place for _, place in whole]
        stops = [extents.plain(place.begin + place.extent) for place in bounds_of]
        data = builder.emit(op.strided_slice(data, inner, [place.begin for place in bounds_of], stops, assume_inbound=True))
    for axis, place in zip(axes, places, strict=True):
        if not place.is_inside:
            data = _rows(builder, data, axis, place)
    return data


class _Place(NamedTuple):
    """The elements of an axis that a slice takes."""

    begin: Any
    extent: Any
    is_inside: bool
    """All of them are there, whatever the sizes."""


def _place(extent: Any, start: Any, end: Any) -> _Place:
    """Return what a slice takes of an axis; an end that an input tells is meant to be inside, as that of positions of so many tokens."""
    begin = _from_end(extent, start)
    if isinstance(end, int) and end >= _ENDLESS:
        return _Place(begin, extents.plain(extent - extents.least(begin, extent)), True)
    stop = _from_end(extent, end)
    inside = extents.least(stop, extent)
    if extents.are_equal(inside, stop) or (isinstance(stop, int) and stop != 1):
        return _Place(begin, extents.plain(inside - begin), True)
    return _Place(begin, extents.plain(stop - begin), stop == 1 and isinstance(stop, int))


def _rows(builder: Emitter, data: Any, axis: int, place: _Place) -> Any:
    """Return elements from a place on; where the axis has no more of them, its last one, so that nothing outside is read."""
    places = builder.emit(op.arange(0, place.extent, 1, "int64"))
    if not _is(place.begin, 0):
        places = builder.emit(op.add(places, builder.tensor([place.begin], [1])))
    return builder.emit(op.take(data, places, axis, mode="clip"))


def _from_end(extent: Any, place: Any) -> Any:
    return extents.plain(extent + place) if isinstance(place, int) and place < 0 else place


def tile(builder: Emitter, inputs: Sequence[Any], known: Sequence[Known | None], _: Mapping[str, Any]) -> Any:
    """Convert Tile, with counts that may be dynamic: as a broadcast of new axes."""
    own, counts = shape_of(inputs[0]), known[1]
    if own is None or counts is None:
        return None
    pairs = list(zip(counts.elements, own, strict=True))
    apart = builder.emit(op.reshape(inputs[0], [each for _, extent in pairs for each in (1, extent)]))
    wide = builder.emit(op.broadcast_to(apart, [each for pair in pairs for each in pair]))
    return builder.emit(op.reshape(wide, [extents.product(pair) for pair in pairs]))


def broadcast(left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    """Return the shape that two broadcast to; where only sizes at run time tell, the extents are taken to be equal, and not 1."""
    rank = max(len(left), len(right))
    wide = ([1] * (rank - len(shape)) + list(shape) for shape in (left, right))
    return [_common(*pair) for pair in zip(*wide, strict=True)]


def _common(left: Any, right: Any) -> Any:
    if _is(left, 1) or _is(right, 1):
        return right if _is(left, 1) else left
    return right if isinstance(right, int) else left


def _fitting(builder: Emitter, value: Any, shape: Sequence[Any]) -> Any:
    """Return a tensor whose extents are 1 or those of a shape that it is broadcast to."""
    own = shape_of(value)
    assert own is not None, "the shape was made of it"
    wanted = shape[len(shape) - len(own) :]
    return builder.with_extents(value, [mine if _is(mine, 1) else other for mine, other in zip(own, wanted, strict=True)])


def fitted(builder: Emitter, operator: str, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the inputs of an operator; they broadcast by what is known of their extents."""
    if operator not in _FITTED:
        return inputs
    kept = _FITTED[operator]
    shapes = [shape_of(each) if isinstance(getattr(each, "ty", None), relax.TensorType) else None for each in inputs]
    if any(shape is None or len(shape) < kept for shape in shapes):
        return inputs
    outer = [shape[: len(shape) - kept] for shape in shapes if shape is not None]
    common: list[Any] = []
    for shape in outer:
        common = broadcast(common, shape)
    found = []
    for value, shape in zip(inputs, outer, strict=True):
        wanted = common[len(common) - len(shape) :]
        whole = [mine if _is(mine, 1) else other for mine, other in zip(shape, wanted, strict=True)]
        own = shape_of(value) or []
        found.append(builder.with_extents(value, [*whole, *own[len(shape) :]]))
    return found


def _is(extent: Any, number: int) -> bool:
    return isinstance(extent, int) and extent == number


Converter = Callable[[Emitter, Sequence[Any], Sequence[Known | None], Mapping[str, Any]], Any]

DYNAMIC: Mapping[str, Converter] = {
    "ConstantOfShape": constant_of_shape,
    "Expand": expand,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "Range": arange,
    "Reshape": reshape,
    "Slice": cut,
    "Tile": tile,
}
"""Converters of results of dynamic extents."""

_BROADCAST = ("Add", "Sub", "Mul", "Div", "Pow", "Where", "And", "Or", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")

_FITTED: Mapping[str, int] = {
    **dict.fromkeys(_BROADCAST, 0),
    "MatMul": 2,
}
"""Operators whose inputs broadcast, and how many of their last axes do not."""
