"""Owns the converters of torch's writes at indices that add, multiply, or keep an extreme: what graph networks sum edges with.

Knows nothing of rows that replace others (`torch_caches`), nor of files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm_ffi
from tvm import relax

from kerneldecl.compiler.model_import.torch_contractions import dtype_of

_REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min", "mean": "add"}


def _scatter_add(node: Any, importer: Any) -> Any:
    x, axis, index, source = importer.retrieve_args(node)
    return _scattered(importer, x, axis, index, source, "add")


def _scatter_reduce(node: Any, importer: Any) -> Any:
    """Convert scatter_reduce; without `include_self`, elements that something is written to begin as the reduction's neutral value."""
    x, axis, index, source, name = importer.retrieve_args(node)[:5]
    emit, dtype = importer.block_builder.emit, dtype_of(x)
    includes = node.args[5] if len(node.args) > 5 else node.kwargs.get("include_self", True)
    is_mean = name == "mean"
    if includes and not is_mean:
        return _scattered(importer, x, axis, index, source, _REDUCTIONS[name])
    ones = emit(relax.op.ones(importer.shape_of(index), dtype))
    counts = _scattered(importer, emit(relax.op.zeros(importer.shape_of(x), dtype)), axis, index, ones, "add")
    if not includes:
        touched = emit(relax.op.greater(counts, relax.const(0, dtype)))
        x = emit(relax.op.where(touched, _neutral(name, node, dtype), x))
    found = _scattered(importer, x, axis, index, source, _REDUCTIONS[name])
    if not is_mean:
        return found
    one = relax.const(1, dtype)
    counts = emit((relax.op.add if includes else relax.op.maximum)(counts, one))
    divide = relax.op.divide if "float" in dtype else relax.op.floor_divide
    return emit(divide(found, counts))


def _neutral(name: str, node: Any, dtype: str) -> Any:
    import torch

    kind = node.meta["val"].dtype
    if name in {"amax", "amin"}:
        info = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
        most = float("inf") if kind.is_floating_point else info.max
        least = -float("inf") if kind.is_floating_point else info.min
        return relax.const(least if name == "amax" else most, dtype)
    return relax.const(1 if name == "prod" else 0, dtype)


def _scattered(importer: Any, x: Any, axis: int, index: Any, source: Any, reduction: str) -> Any:
    """Emit the scatter of as much of `source` as there are indices."""
    wanted, given = importer.shape_of(index), importer.shape_of(source)
    if not _is_same(wanted, given):
        source = importer.block_builder.emit(relax.op.strided_slice(source, list(range(len(wanted))), [0] * len(wanted), list(wanted)))
    return importer.block_builder.emit(relax.op.scatter_elements(x, index, source, axis, reduction))


def _is_same(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(tvm_ffi.structural_equal(a, b) for a, b in zip(left, right, strict=True))


def add_at(importer: Any, x: Any, axis: int, index: Any, values: Any) -> Any:
    """Return `x` with values added at positions along an axis: index_add, which torch writes as index_put."""
    emit, shape, (rows,) = importer.block_builder.emit, list(importer.shape_of(x)), importer.shape_of(index)
    wide = emit(relax.op.broadcast_to(values, [*shape[:axis], rows, *shape[axis + 1 :]]))
    placed = emit(relax.op.reshape(index, [rows if at == axis else 1 for at in range(len(shape))]))
    return emit(relax.op.scatter_elements(x, emit(relax.op.broadcast_to(placed, wide.ty.shape)), wide, axis, "add"))


def put_where(importer: Any, x: Any, mask: Any, values: Any) -> Any:
    """Return `x` with one value where a mask of its first axes is true: `x[mask] = 0`."""
    emit = importer.block_builder.emit
    missing = x.ty.ndim - mask.ty.ndim
    wide = emit(relax.op.expand_dims(mask, [mask.ty.ndim + axis for axis in range(missing)])) if missing else mask
    return emit(relax.op.where(wide, values, x))


SCATTERS: Mapping[str, Callable[[Any, Any], Any]] = {"scatter_add.default": _scatter_add, "scatter_reduce.two": _scatter_reduce}
"""Converters by the names of torch's operators."""
