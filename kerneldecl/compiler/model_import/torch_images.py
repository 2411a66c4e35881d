"""Owns the converters of torch's resampling of images: sizes that are no multiples, scales, antialiasing, grids.

Knows nothing of pooling, nor of files. TVM's importer drops scales and antialiasing, and reads nearest pixels by their centres.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax

from kerneldecl.arrays import Array
from kerneldecl.compiler.graph.rewriting import static_shape
from kerneldecl.compiler.model_import.torch_contractions import dtype_of

_Weights = Callable[[int, int, float], Array]
"""Weights [out, in] of an axis, given the extents and how many of its pixels make one of the result."""


def _nearest(extent: int, size: int, scale: float) -> Array:
    places = np.minimum(np.floor(np.arange(size, dtype=np.float32) * np.float32(scale)).astype(int), extent - 1)
    return np.asarray(np.eye(extent)[places])


def _linear(extent: int, size: int, scale: float) -> Array:
    centres = np.maximum((np.arange(size) + 0.5) * scale - 0.5, 0)
    return np.asarray(np.maximum(1 - np.abs(np.minimum(centres, extent - 1)[:, None] - np.arange(extent)), 0))


def _cubic(extent: int, size: int, scale: float) -> Array:
    """Return weights of four pixels, of which those outside are the border's."""
    centres = (np.arange(size) + 0.5) * scale - 0.5
    weights = np.zeros((size, extent))
    for step in range(-1, 3):
        places = np.floor(centres).astype(int) + step
        np.add.at(weights, (np.arange(size), np.clip(places, 0, extent - 1)), _cubic_kernel(np.abs(centres - places), -0.75))
    return weights


def _cubic_kernel(x: Array, a: float) -> Array:
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _triangle(x: Array) -> Array:
    return np.asarray(np.maximum(1 - x, 0))


def _antialiased(kernel: Callable[[Array], Array], radius: int) -> _Weights:
    """Return weights of a kernel that is as wide as the pixels of the result, cut off at the border and scaled to the sum 1."""

    def weights(extent: int, size: int, scale: float) -> Array:
        wide, found = max(scale, 1.0), np.zeros((size, extent))
        for row, centre in enumerate((np.arange(size) + 0.5) * scale):
            first, end = max(int(centre - radius * wide + 0.5), 0), min(int(centre + radius * wide + 0.5), extent)
            values = kernel(np.abs(np.arange(first, end) - centre + 0.5) / wide)
            found[row, first:end] = values / values.sum()
        return found

    return weights


def _resized(weights: _Weights, has_corners: bool, is_exact: Callable[[int, int, float], bool]) -> Callable[[Any, Any], Any]:
    """Return the converter of a resampling; TVM's where `is_exact` says of each axis that it computes the same."""

    def convert(node: Any, importer: Any) -> Any:
        x, *rest = importer.retrieve_args(node)
        corners = bool(rest[1]) if has_corners else False
        shape, sizes = static_shape(x), [int(extent) for extent in node.meta["val"].shape[2:]] if static_shape(x) else []
        factors = _factors(rest[2:] if has_corners else rest[1:], len(sizes))
        axes = [
            (extent, size, 1 / factor if factor else extent / size)
            for extent, size, factor in zip((shape or ())[2:], sizes, factors, strict=True)
        ]
        if shape is None or corners or all(is_exact(*axis) for axis in axes):
            return NotImplemented
        return _weighted(importer, x, [weights(*axis) for axis in axes])

    return convert


def _factors(given: Sequence[Any], count: int) -> Sequence[float | None]:
    """Return the scale factors that a node gives: a list of all, one for each axis, or none."""
    flat = list(given[0]) if given and isinstance(given[0], (list, tuple)) else list(given)
    return flat if len(flat) == count else [None] * count


def _weighted(importer: Any, x: Any, weights: Sequence[Array]) -> Any:
    """Emit rows @ image @ columns, in float32."""
    emit, dtype = importer.block_builder.emit, dtype_of(x)
    rows, columns = (relax.const(each.astype(np.float32), "float32") for each in (weights[0], weights[1].T))
    wide = x if dtype == "float32" else emit(relax.op.astype(x, "float32"))
    return emit(relax.op.matmul(rows, emit(relax.op.matmul(wide, columns))))


def _is_multiple(extent: int, size: int, scale: float) -> bool:
    return size % extent == 0 and scale == extent / size


def _is_of_sizes(extent: int, size: int, scale: float) -> bool:
    return math.isclose(scale, extent / size, rel_tol=1e-12)


def _never(*_: float) -> bool:
    return False


def _grid_sampler(node: Any, importer: Any) -> Any:
    """Convert grid_sampler_2d, whose grid has its coordinates last; TVM wants them second."""
    x, grid, method, padding, corners = importer.retrieve_args(node)
    emit = importer.block_builder.emit
    moved = emit(relax.op.permute_dims(grid, [0, 3, 1, 2]))
    names = {"method": ("bilinear", "nearest", "bicubic")[method], "padding_mode": ("zeros", "border", "reflection")[padding]}
    return emit(relax.op.image.grid_sample(x, moved, layout="NCHW", align_corners=corners, **names))


IMAGES: Mapping[str, Callable[[Any, Any], Any]] = {
    "upsample_nearest2d.vec": _resized(_nearest, False, _is_multiple),
    "upsample_bilinear2d.vec": _resized(_linear, True, _is_of_sizes),
    "upsample_bicubic2d.vec": _resized(_cubic, True, _is_of_sizes),
    "_upsample_bilinear2d_aa.default": _resized(_antialiased(_triangle, 1), True, _never),
    "_upsample_bicubic2d_aa.default": _resized(_antialiased(lambda x: _cubic_kernel(x, -0.5), 2), True, _never),
    "grid_sampler_2d.default": _grid_sampler,
}
"""Converters by the names of torch's operators."""
