"""Owns the converters of ONNX's Resize and Upsample: a matrix of weights along each axis, by ONNX's definition.

Knows nothing of files. Where TVM's own operator computes the same, that is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.named_constants import Array, array_of, constant
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.model_import.onnx_elementwise import text

_AS_TVM = frozenset({"half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"})
_ROUNDED: Mapping[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@dataclass(frozen=True)
class _Manner:
    """How a node resizes, the same along each axis."""

    mode: str
    coordinates: str
    nearest: str
    cubic: float
    is_antialiased: bool
    excludes_outside: bool
    outside: float


@dataclass(frozen=True)
class _Axis:
    """What is resized along one axis."""

    axis: int
    extent: int
    out: int
    scale: float
    begin: float
    end: float


def resize(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert Resize of a static shape to static sizes; None where TVM's converter is right."""
    if len(inputs) == 2:  # of opset 10, which is Upsample by another name
        return upsample(builder, inputs, attrs)
    data, shape = inputs[0], static_shape(inputs[0])
    named = zip(("roi", "scales", "sizes"), [*inputs[1:], None, None][:3], strict=True)
    roi, scales, sizes = (_known(name, value) for name, value in named)
    if shape is None:
        raise NotImplementedError("a dynamic shape")
    manner = _Manner(
        mode=text(attrs.get("mode", "nearest")),
        coordinates=text(attrs.get("coordinate_transformation_mode", "half_pixel")),
        nearest=text(attrs.get("nearest_mode", "round_prefer_floor")),
        cubic=float(attrs.get("cubic_coeff_a", -0.75)),
        is_antialiased=bool(attrs.get("antialias")),
        excludes_outside=bool(attrs.get("exclude_outside")),
        outside=float(attrs.get("extrapolation_value", 0.0)),
    )
    chosen = [int(axis) % len(shape) for axis in attrs.get("axes", range(len(shape)))]
    axes = _axes(shape, chosen, (roi, scales, sizes), text(attrs.get("keep_aspect_ratio_policy", "stretch")))
    return None if _is_tvms(shape, axes, manner) and "axes" not in attrs else _resized(builder, data, axes, manner)


def upsample(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert Upsample, and Resize of opset 10: `scales` are an input or, of opset 7, an attribute."""
    data, shape = inputs[0], static_shape(inputs[0])
    scales = np.array(attrs["scales"]) if "scales" in attrs else _known("scales", inputs[1])
    if shape is None:
        raise NotImplementedError("a dynamic shape")
    mode = text(attrs.get("mode", "nearest"))
    manner = _Manner(mode, "asymmetric", "floor", -0.75, is_antialiased=False, excludes_outside=False, outside=0.0)
    return _resized(builder, data, _axes(shape, range(len(shape)), (None, scales, None), "stretch"), manner)


def _known(name: str, value: Any) -> Array | None:
    found = array_of(value) if value is not None else None
    if value is not None and found is None:
        raise NotImplementedError(f"its {name} are no constant")
    return found if found is not None and found.size else None


def _axes(shape: Sequence[int], chosen: Sequence[int], given: tuple[Array | None, ...], policy: str) -> list[_Axis]:
    roi, scales, sizes = given
    extents = np.array([shape[axis] for axis in chosen])
    bounds = np.array([[0.0, 1.0]] * len(chosen)) if roi is None else roi.reshape(2, -1).T.astype("float64")
    if sizes is None:
        assert scales is not None, "onnx's checker wants one of them"
        factors = scales.astype("float64")
        outs = np.floor((bounds[:, 1] - bounds[:, 0]) * extents * factors if roi is not None else extents * factors)
    elif policy == "stretch":
        outs, factors = sizes, sizes / extents
    else:
        factor = (np.min if policy == "not_larger" else np.max)(sizes / extents)
        outs, factors = np.floor(factor * extents + 0.5), np.full(len(chosen), factor)
    rows = zip(chosen, extents, outs, factors, *bounds.T, strict=True)
    return [_Axis(axis, int(extent), int(out), float(scale), float(begin), float(end)) for axis, extent, out, scale, begin, end in rows]


def _is_tvms(shape: Sequence[int], axes: Sequence[_Axis], manner: _Manner) -> bool:
    """Say whether TVM's converter computes this: it knows no scale but out / extent, and no cubic one at the edges as ONNX has it."""
    is_exact = all(each.scale * each.extent == each.out and (each.out > 1 or each.extent == 1) for each in axes)
    is_plain = manner.mode in {"nearest", "linear"} and manner.coordinates in _AS_TVM
    is_plain = is_plain and not manner.is_antialiased and not manner.excludes_outside
    return is_exact and is_plain and 3 <= len(shape) <= 5 and all(each.extent == each.out for each in axes[:2])


def _resized(builder: Any, data: Any, axes: Sequence[_Axis], manner: _Manner) -> Any:
    emit, dtype = builder.emit, dtype_of(data)
    is_cropped = manner.coordinates == "tf_crop_and_resize"
    if manner.mode != "nearest" and not dtype.startswith(("float", "bfloat")):
        raise NotImplementedError(f"mode {manner.mode} of {dtype}")
    found, beyond = data, np.zeros((), "bool")
    for each in axes:
        if each.extent == each.out and each.scale == 1 and not is_cropped:
            continue
        at = _places(each, manner.coordinates)
        outside = (at < 0) | (at > each.extent - 1) if is_cropped else np.zeros(each.out, "bool")
        beyond = beyond | outside.reshape([-1 if axis == each.axis else 1 for axis in range(data.ty.ndim)])
        if manner.mode == "nearest":
            nearest = np.clip(_ROUNDED[manner.nearest](at), 0, each.extent - 1).astype("int64")
            found = emit(op.take(found, relax.const(nearest, "int64"), axis=each.axis))
        else:
            found = _weighted(builder, found, each.axis, constant(_weights(at, each, manner), dtype))
    if beyond.any():
        found = emit(op.where(relax.const(beyond, "bool"), relax.const(manner.outside, dtype), found))
    return found


def _places(axis: _Axis, coordinates: str) -> Array:
    """Return where in the input each element of the output lies, by ONNX's formula of a coordinate transformation mode."""
    at, length = np.arange(axis.out, dtype="float64"), axis.scale * axis.extent
    if coordinates == "align_corners":
        return at * (axis.extent - 1) / (length - 1) if length != 1 else at * 0
    if coordinates == "asymmetric":
        return at / axis.scale
    if coordinates == "tf_crop_and_resize":
        begin, end = axis.begin * (axis.extent - 1), axis.end * (axis.extent - 1)
        return np.full(1, (begin + end) / 2) if axis.out == 1 else begin + at * (end - begin) / (axis.out - 1)
    half = (at + 0.5) / axis.scale - 0.5
    if coordinates == "half_pixel_symmetric":
        return axis.extent / 2 * (1 - axis.out / length) + half
    if coordinates in {"half_pixel", "pytorch_half_pixel"}:
        return np.full(1, -0.5) if coordinates == "pytorch_half_pixel" and axis.out == 1 else half
    raise NotImplementedError(f"coordinate_transformation_mode {coordinates}")


def _weights(at: Array, axis: _Axis, manner: _Manner) -> Array:
    """Return [out, extent]: the weight of each element of the input; elements beyond the edge are the edge's, or do not count."""
    stretch = min(axis.scale, 1.0) if manner.is_antialiased else 1.0
    radius, curve = (1, _triangle) if manner.mode == "linear" else (2, lambda distance: _cubic(distance, manner.cubic))
    reach = int(np.ceil(radius / stretch)) + 1
    taps = np.floor(at)[:, None] + np.arange(-reach, reach + 1)[None, :]
    weights = curve(np.abs(taps - at[:, None]) * stretch)
    if manner.excludes_outside:
        weights = np.where((taps < 0) | (taps > axis.extent - 1), 0, weights)
    weights = weights / weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((axis.out, axis.extent))
    rows = np.broadcast_to(np.arange(axis.out)[:, None], taps.shape)
    np.add.at(matrix, (rows, np.clip(taps, 0, axis.extent - 1).astype("int64")), weights)
    return matrix


def _triangle(distance: Array) -> Array:
    return np.asarray(np.maximum(1 - distance, 0))


def _cubic(distance: Array, a: float) -> Array:
    """Return Keys' cubic convolution kernel (IEEE Trans. ASSP 29, 1981), whose parameter ONNX calls cubic_coeff_a."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = a * (((distance - 5) * distance + 8) * distance - 4)
    weights = np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
    return np.asarray(weights)


def _weighted(builder: Any, data: Any, axis: int, weights: Any) -> Any:
    """Return the products of a matrix [out, extent] with the data along an axis."""
    emit, rank = builder.emit, data.ty.ndim
    if axis == rank - 2:
        return emit(op.matmul(weights, data))
    order = [each for each in range(rank) if each != axis] + [axis]
    last = data if axis == rank - 1 else emit(op.permute_dims(data, order))
    product = emit(op.matmul(last, emit(op.permute_dims(weights))))
    return product if axis == rank - 1 else emit(op.permute_dims(product, [order.index(each) for each in range(rank)]))
