"""Owns what an ONNX graph computes of dynamic extents: small tensors of integers whose elements are known as expressions of them.

Knows nothing of Relax, nor of tensors whose elements are data.

Exporters write shapes so: Shape, Gather, Unsqueeze, Concat, and a Reshape to the result. TVM's importer follows few of these chains.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kerneldecl.compiler.model_import import extents
from kerneldecl.compiler.model_import.extents import UnknownError

MOST_ELEMENTS = 256
"""Elements of the largest tensor that is followed: shapes have few."""
Array = np.ndarray[Any, Any]


class Known(NamedTuple):
    """A tensor whose elements are known: integers, truth values, and expressions of dynamic extents."""

    elements: Array
    """An array of objects."""
    dtype: str

    @property
    def is_constant(self) -> bool:
        return all(isinstance(each, int | bool) for each in self.elements.flat)


def known_constant(array: Array) -> Known | None:
    """Return a constant of integers or truth values; None for one that is larger or of another dtype."""
    if array.dtype.kind not in "biu" or array.size > MOST_ELEMENTS:
        return None
    return Known(objects(array.reshape(-1).tolist(), array.shape), array.dtype.name)


def objects(values: Sequence[Any], shape: Sequence[int]) -> Array:
    """Return an array of objects; NumPy would look for sequences in them."""
    found = np.empty(len(values), object)
    for at, value in enumerate(values):
        found[at] = value
    return found.reshape(shape)


def computed(operator_name: str, inputs: Sequence[Known | None], attrs: Mapping[str, Any]) -> list[Known] | None:
    """Return what an operator gives of known tensors; None where it is not known, or depends on sizes at run time."""
    compute = _COMPUTED.get(operator_name)
    if (
        compute is None
        or not inputs
        or inputs[0] is None
        or any(each is not None and each.elements.size > MOST_ELEMENTS for each in inputs)
    ):
        return None
    try:
        found = compute(inputs, attrs)
    except (UnknownError, IndexError, KeyError, ValueError, TypeError):
        return None
    results = found if isinstance(found, list) else [found]
    return results if all(each.elements.size <= MOST_ELEMENTS for each in results) else None


def _elementwise(function: Callable[..., Any], dtype: str = "") -> Callable[..., Known]:
    """Return the converter of an operator that computes each element by itself, of tensors that broadcast."""

    def compute(inputs: Sequence[Known | None], _: Mapping[str, Any]) -> Known:
        given = [_all(each) for each in inputs]
        arrays = np.broadcast_arrays(*(each.elements for each in given))
        values = [extents.plain(function(*each)) for each in zip(*(array.reshape(-1) for array in arrays), strict=True)]
        return Known(objects(values, arrays[0].shape), dtype or given[-1].dtype)

    return compute


def _folded(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a function of any number of values."""
    return lambda *values: functools.reduce(function, values)


def _all(value: Known | None) -> Known:
    if value is None:
        raise UnknownError("an input is not known")
    return value


def _ints(value: Known | None) -> list[int]:
    given = _all(value)
    if not given.is_constant:
        raise UnknownError("an index depends on sizes at run time")
    return [int(each) for each in given.elements.reshape(-1)]


def _chosen(condition: Any, left: Any, right: Any) -> Any:
    return left if _truth(condition) else right


def _truth(value: Any) -> bool:
    if not isinstance(value, int | bool):
        raise UnknownError("a condition depends on sizes at run time")
    return bool(value)


def _cast(inputs: Sequence[Known | None], attrs: Mapping[str, Any]) -> Known:
    import onnx

    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(attrs["to"]))
    given = _all(inputs[0])
    if dtype.kind == "b":
        return Known(objects([not extents.is_same(each, 0) for each in given.elements.flat], given.elements.shape), "bool")
    if dtype.kind not in "iu":
        raise UnknownError("extents are integers")
    return Known(objects([int(each) if isinstance(each, bool) else each for each in given.elements.flat], given.elements.shape), dtype.name)


def _gather(inputs: Sequence[Known | None], attrs: Mapping[str, Any]) -> Known:
    data, indices = _all(inputs[0]), _all(inputs[1])
    places = np.array(_ints(indices), "int64").reshape(indices.elements.shape)
    found = np.take(data.elements, places, axis=attrs.get("axis", 0))
    return Known(objects(list(np.asarray(found, object).flat), np.shape(found)), data.dtype)


def _concat(inputs: Sequence[Known | None], attrs: Mapping[str, Any]) -> Known:
    given = [_all(each) for each in inputs]
    return Known(np.concatenate([each.elements for each in given], axis=attrs["axis"]), given[0].dtype)


def _axes(inputs: Sequence[Known | None], attrs: Mapping[str, Any], at: int = 1) -> list[int] | None:
    """Return axes, which newer opsets have as an input; None where none are given."""
    if len(inputs) > at and inputs[at] is not None:
        return _ints(inputs[at])
    return list(attrs["axes"]) if "axes" in attrs else None


def _unsqueeze(inputs: Sequence[Known | None], attrs: Mapping[str, Any]) -> Known:
    data, axes = _all(inputs[0]), _axes(inputs, attrs)
    assert axes is not None, "they are required"
    return Known(np.expand_dims(data.elements, tuple(axes)), data.dtype)


def _squeeze(inputs: Sequence[Known | None], attrs: Mapping[str, Any]) -> Known:
    data, axes = _all(inputs[0]), _axes(inputs, attrs)
    return Known(np.squeeze(data.elements, None if axes is None else tuple(axes)), data.dtype)


def _reshape(inputs: Sequence[Known | None], attrs: Mapping[str, Any]) -> Known:
    data, shape = _all(inputs[0]), _ints(inputs[1])
    copied = [data.elements.shape[at] if extent == 0 and not attrs.get("allowzero") else extent for at, extent in enumerate(shape)]
    return Known(data.elements.reshape(copied), data.dtype)


def _slice(inputs: Sequence[Known | None], attrs: Mapping[str, Any]) -> Known:
    data = _all(inputs[0])
    given = [*inputs, None, None, None, None]
    starts, ends = (_ints(given[at]) if given[at] is not None else list(attrs[name]) for at, name in ((1, "starts"), (2, "ends")))
    axes = _axes(inputs, attrs, 3) or list(range(len(starts)))
    steps = _ints(given[4]) if given[4] is not None else [1] * len(starts)
    places = [slice(None)] * data.elements.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        places[axis] = slice(start, None if step < 0 and end < -data.elements.shape[axis] else end, step)
    return Known(data.elements[tuple(places)], data.dtype)


def _split(inputs: Sequence[Known | None], attrs: Mapping[str, Any]) -> list[Known]:
    data, axis = _all(inputs[0]), attrs.get("axis", 0)
    sizes = _ints(inputs[1]) if len(inputs) > 1 and inputs[1] is not None else list(attrs["split"])
    return [Known(part, data.dtype) for part in np.split(data.elements, np.cumsum(sizes)[:-1], axis)]


def _expand(inputs: Sequence[Known | None], _: Mapping[str, Any]) -> Known:
    data, shape = _all(inputs[0]), _ints(inputs[1])
    return Known(np.broadcast_to(data.elements, np.broadcast_shapes(data.elements.shape, tuple(shape))).copy(), data.dtype)


def _constant_of_shape(inputs: Sequence[Known | None], attrs: Mapping[str, Any]) -> Known:
    from onnx import numpy_helper

    shape = _ints(inputs[0])
    value = numpy_helper.to_array(attrs["value"]).reshape(-1)[0] if "value" in attrs else np.float32(0)
    if value.dtype.kind not in "biu" or int(np.prod(shape)) > MOST_ELEMENTS:
        raise UnknownError("not a tensor of a few integers")
    return Known(objects([value.item()] * int(np.prod(shape)), shape), value.dtype.name)


def _range(inputs: Sequence[Known | None], _: Mapping[str, Any]) -> Known:
    (start,), (limit,), (step,) = (_ints(each) for each in inputs)
    values = list(range(start, limit, step))
    return Known(objects(values, [len(values)]), _all(inputs[0]).dtype)


def _reduced(function: Callable[[Any, Any], Any]) -> Callable[..., Known]:
    """Return the converter of a reduction of all elements, or of a vector's."""

    def compute(inputs: Sequence[Known | None], attrs: Mapping[str, Any]) -> Known:
        data, axes = _all(inputs[0]), _axes(inputs, attrs)
        if data.elements.ndim > 1 and axes is not None and len(axes) < data.elements.ndim:
            raise UnknownError("a reduction of some axes")
        value = extents.plain(functools.reduce(function, data.elements.flat))
        return Known(objects([value], [1] * data.elements.ndim if attrs.get("keepdims", 1) else []), data.dtype)

    return compute


def _transpose(inputs: Sequence[Known | None], attrs: Mapping[str, Any]) -> Known:
    data = _all(inputs[0])
    return Known(np.transpose(data.elements, attrs.get("perm")), data.dtype)


def _identity(inputs: Sequence[Known | None], _: Mapping[str, Any]) -> Known:
    return _all(inputs[0])


def _not(value: Any) -> bool:
    return not _truth(value)


_COMPUTED: Mapping[str, Callable[[Sequence[Known | None], Mapping[str, Any]], Known | list[Known]]] = {
    "Add": _elementwise(operator.add),
    "And": _elementwise(lambda left, right: _truth(left) and _truth(right), "bool"),
    "Cast": _cast,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Div": _elementwise(extents.quotient),
    "Equal": _elementwise(extents.is_same, "bool"),
    "Expand": _expand,
    "Gather": _gather,
    "Greater": _elementwise(lambda left, right: extents.is_less(right, left), "bool"),
    "GreaterOrEqual": _elementwise(lambda left, right: not extents.is_less(left, right), "bool"),
    "Identity": _identity,
    "Less": _elementwise(extents.is_less, "bool"),
    "LessOrEqual": _elementwise(lambda left, right: not extents.is_less(right, left), "bool"),
    "Max": _elementwise(_folded(extents.most)),
    "Min": _elementwise(_folded(extents.least)),
    "Mod": _elementwise(extents.remainder),
    "Mul": _elementwise(operator.mul),
    "Neg": _elementwise(operator.neg),
    "Not": _elementwise(_not, "bool"),
    "Or": _elementwise(lambda left, right: _truth(left) or _truth(right), "bool"),
    "Range": _range,
    "ReduceProd": _reduced(operator.mul),
    "ReduceSum": _reduced(operator.add),
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Sub": _elementwise(operator.sub),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _elementwise(_chosen),
}
"""What operators that shapes are computed by give."""
