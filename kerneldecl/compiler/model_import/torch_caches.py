"""Owns the converters of what torch programs write KV caches with: rows put at positions, and caches that begin empty.

Knows nothing of attention, nor of files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import relax

from kerneldecl.compiler.graph.rewriting import static_shape
from kerneldecl.compiler.model_import.torch_contractions import dtype_of
from kerneldecl.compiler.model_import.torch_scatters import add_at, put_where


def _cat(node: Any, importer: Any) -> Any:
    """Convert cat. As in torch, vectors without an element are left out beside tensors of any rank: a cache begins as one."""
    tensors, *given = importer.retrieve_args(node)
    axis = given[0] if given else node.kwargs.get("dim", 0)
    kept = [each for each in tensors if static_shape(each) != (0,)] or tensors[:1]
    return kept[0] if len(kept) == 1 else importer.block_builder.emit(relax.op.concat(kept, axis=int(axis)))


def _index_put(node: Any, importer: Any) -> Any:
    """Convert rows that are put at positions along one axis, which TVM's importer takes along the last one only; leave it the others."""
    data, indices, values, *accumulate = importer.retrieve_args(node)
    adds = any(accumulate) or node.kwargs.get("accumulate")
    shape, positions = static_shape(data), [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if len(positions) == 1 and adds and positions[0][1].ty.ndim == 1 and dtype_of(positions[0][1]) != "bool":
        return add_at(importer, data, *positions[0], values)
    if len(positions) == 1 and dtype_of(positions[0][1]) == "bool" and static_shape(values) == () and not adds and not positions[0][0]:
        return put_where(importer, data, positions[0][1], values)
    counts = static_shape(positions[0][1]) if len(positions) == 1 and dtype_of(positions[0][1]) != "bool" else None
    if shape is None or counts is None or len(counts) != 1 or adds:
        return NotImplemented
    emit, (axis, index) = importer.block_builder.emit, positions[0]
    rows, along = counts[0], [-1 if at == axis else 1 for at in range(len(shape))]
    placed = emit(relax.op.reshape(index, along))
    new = emit(relax.op.broadcast_to(values, [*shape[:axis], rows, *shape[axis + 1 :]]))
    if rows > 1:
        return emit(relax.op.scatter_elements(data, emit(relax.op.broadcast_to(placed, new.ty.shape)), new, axis=axis))
    # One row is a choice for each element, which every target has a schedule for. Positions may count from the end.
    extent, dtype = shape[axis], dtype_of(index)
    own = emit(relax.op.where(relax.op.less(placed, relax.const(0, dtype)), relax.op.add(placed, relax.const(extent, dtype)), placed))
    at = emit(relax.op.reshape(emit(relax.op.arange(0, extent, 1, dtype)), along))
    return emit(relax.op.where(emit(relax.op.equal(at, own)), new, data))


CACHES: Mapping[str, Callable[[Any, Any], Any]] = {"cat.default": _cat, "index_put.default": _index_put}
