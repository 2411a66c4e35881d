"""Owns the converters of torch's embedding bags: rows of a table, summed or averaged by bag.

Knows nothing of files, nor of single rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import relax

from kerneldecl.compiler.model_import.model_error import ModelError
from kerneldecl.compiler.model_import.torch_arguments import with_defaults
from kerneldecl.compiler.model_import.torch_contractions import dtype_of, matmul

_SUM, _MEAN, _MAX = range(3)


def _embedding_bag(node: Any, importer: Any) -> tuple[Any]:
    """Convert _embedding_bag(table, indices, offsets, …) to its first result; a bag is a row of indices, or ends where the next begins."""
    given = importer.retrieve_args(node)
    table, indices, offsets, _, mode, _, weights, ends, padding = with_defaults(given, 3, False, _SUM, False, None, False, -1)
    emit, length = importer.block_builder.emit, _length(node)
    if mode == _MAX and (length is None or padding >= 0):
        sentence = f"no converter for torch's operator {node.target} (node {node.name}) of mode max with offsets or a padding index"
        raise ModelError(sentence, "give it indices of two axes")
    rows = emit(relax.op.take(table, indices, axis=0, mode="fast"))
    of_rows = [weights] if weights is not None else []
    if padding >= 0:
        kept = emit(relax.op.not_equal(indices, relax.const(padding, dtype_of(indices))))
        of_rows.append(emit(relax.op.astype(kept, dtype_of(table))))
    if length is None:
        return (_offset_bags(importer, rows, of_rows, offsets, has_end=bool(ends), is_mean=mode == _MEAN),)
    bags = node.meta["val"][0].shape[0]
    count = bags if isinstance(bags, int) else importer.shape_of(offsets)[0]
    columns = table.ty.shape[1]
    for each in of_rows:
        rows = emit(relax.op.multiply(rows, emit(relax.op.expand_dims(each, 1))))
    apart = emit(relax.op.reshape(rows, [count, length, columns]))
    if mode == _MAX:
        return (emit(relax.op.max(apart, 1)),)
    total = emit(relax.op.sum(apart, 1))
    if mode == _SUM:
        return (total,)
    if padding < 0:
        return (emit(relax.op.divide(total, relax.const(length, dtype_of(table)))),)
    counts = emit(relax.op.sum(emit(relax.op.reshape(of_rows[-1], [count, length])), 1, keepdims=True))
    return (emit(relax.op.divide(total, _at_least_one(emit, counts))),)


def _length(node: Any) -> int | None:
    """Return how many indices each bag has where offsets are every so many, as torch writes them for indices of two axes."""
    offsets = node.args[2]
    if getattr(offsets.target, "__name__", "") != "arange.start_step":
        return None
    start, _, step = (*offsets.args, 1)[:3]
    extent, bags = node.args[1].meta["val"].shape[0], offsets.meta["val"].shape[0]
    return step if start == 0 and isinstance(step, int) and step and bool(bags * step == extent) else None


def _offset_bags(importer: Any, rows: Any, of_rows: list[Any], offsets: Any, *, has_end: bool, is_mean: bool) -> Any:
    """Return sums over bags that begin at `offsets`: a GEMM of rows with a matrix that is 1 where a row is in a bag."""
    emit, dtype, extent = importer.block_builder.emit, dtype_of(rows), importer.shape_of(rows)[0]
    place = emit(relax.op.arange(0, extent, 1, dtype_of(offsets)))
    begun = emit(relax.op.astype(emit(relax.op.greater_equal(place, emit(relax.op.expand_dims(offsets, 1)))), dtype))
    if not has_end:
        begun = emit(relax.op.concat([begun, emit(relax.op.zeros([1, extent], dtype))], 0))
    bags = importer.shape_of(offsets)[0] - int(has_end)
    bounds = (emit(relax.op.strided_slice(begun, [0], [first], [bags + first], assume_inbound=True)) for first in (0, 1))
    members = emit(relax.op.subtract(*bounds))
    for each in of_rows:
        members = emit(relax.op.multiply(members, each))
    total = matmul(importer, members, rows)
    if not is_mean:
        return total
    return emit(relax.op.divide(total, _at_least_one(emit, emit(relax.op.sum(members, 1, keepdims=True)))))


def _at_least_one(emit: Callable[[Any], Any], counts: Any) -> Any:
    return emit(relax.op.maximum(counts, relax.const(1, dtype_of(counts))))


BAGS: Mapping[str, Callable[[Any, Any], Any]] = {
    "_embedding_bag.default": _embedding_bag,
    "_embedding_bag_forward_only.default": _embedding_bag,
}
"""Converters by the names of torch's operators."""
