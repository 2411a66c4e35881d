"""Owns the converters of torch's pooling that TVM's importer lacks or gets wrong.

Knows nothing of resampling, nor of files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import relax

from kerneldecl.compiler.graph.rewriting import static_shape
from kerneldecl.compiler.model_import.model_error import ModelError
from kerneldecl.compiler.model_import.torch_arguments import with_defaults
from kerneldecl.compiler.model_import.torch_contractions import dtype_of


def _average(node: Any, importer: Any) -> Any:
    """Convert avg_pool2d. A divisor of its own replaces the window's size, which padding counts to."""
    source, kernel, stride, padding, ceils, _, divisor = with_defaults(node.args, 2, [], 0, False, True, None)
    if divisor is None:
        return NotImplemented
    if ceils:
        raise ModelError(
            f"no converter for torch's operator {node.target} (node {node.name}) with ceil_mode and a divisor", "leave one out"
        )
    x, emit = importer.env[source], importer.block_builder.emit
    window = list(kernel) * (2 // len(kernel))
    mean = emit(relax.op.nn.avg_pool2d(x, window, stride or window, padding, count_include_pad=True, layout="NCHW"))
    return emit(relax.op.multiply(mean, relax.const(window[0] * window[1] / divisor, dtype_of(x))))


def _maximum(node: Any, _: Any) -> Any:
    """Convert max_pool2d_with_indices; TVM's importer gives zeros for indices, which are refused where something reads them."""
    _refuse_indices(node)
    return NotImplemented


def _adaptive_maximum(node: Any, importer: Any) -> Any:
    _refuse_indices(node)
    x, sizes = importer.retrieve_args(node)
    shape = static_shape(x)
    if shape is None or any(extent % size for extent, size in zip(shape[-2:], sizes, strict=True)):
        sentence = f"torch's operator {node.target} (node {node.name}) has windows of several sizes, or of dynamic ones"
        raise ModelError(sentence, "make the images a multiple of its output size")
    window = [extent // size for extent, size in zip(shape[-2:], sizes, strict=True)]
    emit, emits_image = importer.block_builder.emit, x.ty.ndim == 4
    images = x if emits_image else emit(relax.op.expand_dims(x, 0))
    pooled = emit(relax.op.nn.max_pool2d(images, window, window, layout="NCHW"))
    return (pooled if emits_image else emit(relax.op.squeeze(pooled, [0])),)


def _refuse_indices(node: Any) -> None:
    if any(user.args[1] == 1 and user.users for user in node.users):
        raise ModelError(f"no converter for the indices of torch's operator {node.target} (node {node.name})", "do without return_indices")


POOLS: Mapping[str, Callable[[Any, Any], Any]] = {
    "avg_pool2d.default": _average,
    "max_pool2d_with_indices.default": _maximum,
    "adaptive_max_pool2d.default": _adaptive_maximum,
}
"""Converters by the names of torch's operators."""
