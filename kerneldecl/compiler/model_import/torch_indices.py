"""Owns the converters of torch's reads at indices, which may count from the end, broadcast, and leave axes between them.

Knows nothing of writes at indices, nor of files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tvm import relax

from kerneldecl.compiler.graph.named_constants import array_of
from kerneldecl.compiler.model_import.model_error import ModelError
from kerneldecl.compiler.model_import.torch_contractions import dtype_of


def _index(node: Any, importer: Any) -> Any:
    """Convert x[:, i, j]: indexed axes are read together, and what is read stands in the place of neighbours, else in front."""
    x, indices = importer.retrieve_args(node)
    emit, rank = importer.block_builder.emit, x.ty.ndim
    given = {axis: index for axis, index in enumerate(indices) if index is not None}
    if any(dtype_of(index) == "bool" for index in given.values()):
        raise ModelError(
            f"the shape of what torch's operator {node.target} (node {node.name}) reads at a mask depends on values",
            "use torch.where, or multiply by the mask",
        )
    places = {axis: _from_start(emit, index, importer.shape_of(x)[axis]) for axis, index in given.items()}
    if len(places) == 1:
        ((axis, place),) = places.items()
        is_static = hasattr(importer.shape_of(x)[axis], "value")
        return emit(relax.op.take(x, place, axis=axis, mode="fast" if is_static else "wrap"))
    longest = max(place.ty.ndim for place in places.values())
    same = [_of_rank(importer, place, longest) for place in places.values()]
    others = [axis for axis in range(rank) if axis not in places]
    first, *_, last = places
    in_front = first if last - first + 1 == len(places) else 0
    order = [*places, *others]
    moved = x if order == sorted(order) else emit(relax.op.permute_dims(x, order))
    read = emit(relax.op.index_tensor(moved, same))
    axes = [*range(longest, longest + in_front), *range(longest), *range(longest + in_front, longest + len(others))]
    return read if axes == sorted(axes) else emit(relax.op.permute_dims(read, axes))


def _from_start(emit: Callable[[Any], Any], index: Any, extent: Any) -> Any:
    """Return indices none of which is negative, of an axis of static extent; others as they are."""
    values, dtype = array_of(index), dtype_of(index)
    if not hasattr(extent, "value") or dtype.startswith("uint") or (values is not None and not (values < 0).any()):
        return index
    if values is not None:
        return relax.const(np.where(values < 0, values + int(extent), values), dtype)
    from_end = relax.op.add(index, relax.const(int(extent), dtype))
    return emit(relax.op.where(relax.op.less(index, relax.const(0, dtype)), from_end, index))


def _of_rank(importer: Any, index: Any, rank: int) -> Any:
    missing = rank - index.ty.ndim
    return importer.block_builder.emit(relax.op.expand_dims(index, list(range(missing)))) if missing else index


def _windows(node: Any, importer: Any) -> Any:
    """Convert x.unfold(axis, size, step): windows along an axis, whose elements become the last one."""
    x, axis, size, step = importer.retrieve_args(node)
    count, rank = node.meta["val"].shape[axis], x.ty.ndim
    if not isinstance(count, int):
        raise ModelError(f"torch's operator {node.target} (node {node.name}) has windows of a dynamic axis", "make that axis static")
    emit, axis = importer.block_builder.emit, axis % rank
    places = relax.const(np.arange(count)[:, None] * step + np.arange(size), "int64")
    read = emit(relax.op.take(x, places, axis=axis, mode="fast"))
    order = [at for at in range(rank + 1) if at != axis + 1]
    return read if axis == rank - 1 else emit(relax.op.permute_dims(read, [*order, axis + 1]))


INDICES: Mapping[str, Callable[[Any, Any], Any]] = {"index.Tensor": _index, "unfold.default": _windows}
"""Converters by the names of torch's operators."""
