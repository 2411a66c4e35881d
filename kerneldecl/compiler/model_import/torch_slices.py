"""Owns the converters of torch's slices, repeats and views of dynamic extents, whose shapes torch knows and TVM's importer loses.

Knows nothing of files, nor of names of dimensions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import relax

from kerneldecl.compiler.model_import.torch_arguments import with_defaults


def _slice(node: Any, importer: Any) -> Any:
    """Convert a slice. TVM gives `x[:n]` the extent min(n, extent of x), which nothing after it can compare with n.

    Torch has proved by the ranges of its dimensions that n is inside where its own result has n elements.
    """
    x, dim, start, stop, step = with_defaults(importer.retrieve_args(node), 1, 0, None, None, 1)
    shape = importer.shape_of(x)
    if shape is None or step != 1 or not _is_inside(node):
        return NotImplemented
    axis = dim % len(shape)
    begin, end = _bound(start, 0, shape[axis]), _bound(stop, shape[axis], shape[axis])
    if isinstance(begin, int) and begin == 0 and tvm.ir.prim.expr_deep_equal(tvm.runtime.convert(end), shape[axis]):
        return x
    return importer.block_builder.emit(relax.op.strided_slice(x, [axis], [begin], [end], [1], assume_inbound=True))


def _bound(given: Any, default: Any, extent: Any) -> Any:
    if given is None or (isinstance(given, int) and given == sys.maxsize):
        return default
    return extent + given if isinstance(given, int) and given < 0 else given


def _is_inside(node: Any) -> bool:
    """Say whether torch's result has `stop - start` elements, and an extent depends on an input."""
    given = [getattr(arg, "meta", {}).get("val", arg) for arg in node.args]
    x, dim, start, stop, _ = with_defaults(given, 1, 0, None, None, 1)
    extent, found = x.shape[dim], node.meta["val"].shape[dim]
    begin, end = _bound(start, 0, extent), _bound(stop, extent, extent)
    terms = [_expression(each) for each in (begin, end, found)]
    return not all(isinstance(each, int) for each in (extent, *terms)) and terms[1] - terms[0] == terms[2]


def _expression(value: Any) -> Any:
    """Return an int, or the SymPy expression of torch's symbolic one."""
    return value if isinstance(value, int) else value.node.expr


def _repeat(node: Any, importer: Any) -> Any:
    """Convert repeat; with counts that depend on an input, as a broadcast of new axes, which TVM's tile lacks."""
    x, *counts = importer.retrieve_args(node)
    counts = list(counts[0]) if isinstance(counts[0], (list, tuple)) else counts
    if all(isinstance(count, int) for count in counts):
        return importer.block_builder.emit(relax.op.tile(x, counts))
    shape = [1] * (len(counts) - x.ty.ndim) + list(importer.shape_of(x))
    emit, pairs = importer.block_builder.emit, list(zip(counts, shape, strict=True))
    apart = emit(relax.op.reshape(x, [each for _, extent in pairs for each in (1, extent)]))
    wide = emit(relax.op.broadcast_to(apart, [each for pair in pairs for each in pair]))
    return emit(relax.op.reshape(wide, [count * extent for count, extent in pairs]))


def _view(node: Any, importer: Any) -> Any:
    """Convert a view whose shape depends on an input; TVM's importer compares some products of extents, which raises."""
    x, *extents = importer.retrieve_args(node)
    shape = list(extents[0]) if isinstance(extents[0], (list, tuple)) else extents
    numbers = [extent for extent in shape if isinstance(extent, int)]
    if len(numbers) == len(shape) or min(numbers, default=1) <= 0:
        return NotImplemented
    return importer.block_builder.emit(relax.op.reshape(x, shape))


SLICES: Mapping[str, Callable[[Any, Any], Any]] = {"slice.Tensor": _slice, "repeat.default": _repeat, "view.default": _view}
"""Converters by the names of torch's operators."""
