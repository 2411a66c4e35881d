"""Owns the converters of torch's reductions that TVM's importer lacks or gets wrong.

Knows nothing of files, nor of GEMMs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tvm import relax

from kerneldecl.compiler.model_import.torch_arguments import with_defaults


def _truth(of_all: bool) -> Callable[[Any, Any], Any]:
    """Return the converter of any (or all) over given axes, or over all of them."""

    def convert(node: Any, importer: Any) -> Any:
        x, axes, keepdims = with_defaults(importer.retrieve_args(node), 1, None, False)
        reduced = (relax.op.min if of_all else relax.op.max)(relax.op.astype(_is_true(x), "int8"), axes, keepdims=keepdims)
        return importer.block_builder.emit(relax.op.astype(reduced, "bool"))

    return convert


def _is_true(x: Any) -> Any:
    dtype = str(x.ty.dtype.dtype)
    return x if dtype == "bool" else relax.op.not_equal(x, relax.const(0, dtype))


def _over(reduce: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return the converter of a reduction over given axes, in the dtype that torch computes it in: that of its result."""

    def convert(node: Any, importer: Any) -> Any:
        x, axes, keepdims = with_defaults(importer.retrieve_args(node), 1, None, False)
        return importer.block_builder.emit(reduce(_as_result(node, x), axes or None if isinstance(axes, list) else axes, keepdims=keepdims))

    return convert


def _scan(scan: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return the converter of a cumulative reduction: torch's of integers and truth values are int64, TVM's stay as they are."""

    def convert(node: Any, importer: Any) -> Any:
        x, axis = importer.retrieve_args(node)[:2]
        return importer.block_builder.emit(scan(_as_result(node, x), axis))

    return convert


def _as_result(node: Any, x: Any) -> Any:
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    return x if str(x.ty.dtype.dtype) == dtype else relax.op.astype(x, dtype)


def _min_dim(node: Any, importer: Any) -> Any:
    """Convert the smallest elements along an axis and their places; TVM's importer has the largest alone."""
    x, axis, keepdims = with_defaults(importer.retrieve_args(node), 2, False)
    emit = importer.block_builder.emit
    place = emit(relax.op.argmin(x, axis, keepdims))
    return emit(relax.Tuple([emit(relax.op.min(x, axis, keepdims)), emit(relax.op.astype(place, "int64"))]))


def _variance_and_mean(node: Any, importer: Any) -> Any:
    x, axes, *_ = with_defaults(importer.retrieve_args(node), 1, None)
    correction, keepdims = node.kwargs.get("correction"), node.kwargs.get("keepdim", False)
    shape = node.args[0].meta["val"].shape
    count = math.prod(int(shape[axis]) for axis in axes or range(len(shape)))
    freedom = count - (1 if correction is None else correction)
    factor = relax.const(count / freedom if freedom > 0 else math.inf, str(x.ty.dtype.dtype))
    emit = importer.block_builder.emit
    variance = emit(relax.op.multiply(emit(relax.op.variance(x, axes or None, keepdims)), factor))
    return emit(relax.Tuple([variance, emit(relax.op.mean(x, axes or None, keepdims))]))


def _rms_norm(node: Any, importer: Any) -> Any:
    x, shape, weight, eps = (*importer.retrieve_args(node), None, None)[:4]
    dtype = str(x.ty.dtype.dtype)
    if eps is None:
        import torch

        eps = torch.finfo(getattr(torch, "float32" if dtype in {"float16", "bfloat16"} else dtype)).eps
    if weight is None:
        weight = relax.op.ones(shape, dtype)
    return importer.block_builder.emit(relax.op.nn.rms_norm(x, weight, axes=list(range(-len(shape), 0)), epsilon=eps))


def _group_norm(node: Any, importer: Any) -> Any:
    """Convert native_group_norm(x, weight, bias, n, channels, pixels, groups, eps); TVM's takes neither bfloat16 nor absent weights."""
    x, weight, bias, _, channels, _, groups, eps = importer.retrieve_args(node)
    emit, dtype = importer.block_builder.emit, str(x.ty.dtype.dtype)
    narrow = dtype == "bfloat16"
    given = [
        x,
        relax.op.ones((channels,), dtype) if weight is None else weight,
        relax.op.zeros((channels,), dtype) if bias is None else bias,
    ]
    wide = [emit(relax.op.astype(each, "float32")) for each in given] if narrow else given
    norm = emit(relax.op.nn.group_norm(*wide, groups, 1, list(range(2, x.ty.ndim)), eps))
    return emit(relax.op.astype(norm, dtype)) if narrow else norm


def _statistics_norm(node: Any, importer: Any) -> Any:
    """Convert the batch norm that an instance norm is written with, where its channels are those of a dynamic number of images."""
    x, weight, bias, _, _, eps = importer.retrieve_args(node)
    if hasattr(importer.shape_of(x)[1], "value"):
        return NotImplemented
    emit, dtype, axes = importer.block_builder.emit, str(x.ty.dtype.dtype), [0, *range(2, x.ty.ndim)]
    apart = emit(relax.op.subtract(x, emit(relax.op.mean(x, axes, keepdims=True))))
    variance = emit(relax.op.mean(emit(relax.op.multiply(apart, apart)), axes, keepdims=True))
    result = emit(relax.op.multiply(apart, emit(relax.op.rsqrt(emit(relax.op.add(variance, relax.const(eps, dtype)))))))
    for given, combine in ((weight, relax.op.multiply), (bias, relax.op.add)):
        if given is not None:
            result = emit(combine(result, emit(relax.op.expand_dims(given, [0, *range(2, x.ty.ndim)]))))
    return (result,)


REDUCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    **{f"any.{overload}": _truth(of_all=False) for overload in ("default", "dim", "dims")},
    **{f"all.{overload}": _truth(of_all=True) for overload in ("default", "dim", "dims")},
    **{f"{name}.default": _over(reduce) for name, reduce in (("amax", relax.op.max), ("amin", relax.op.min))},
    "prod.dim_int": _over(relax.op.prod),
    "var_mean.correction": _variance_and_mean,
    "min.dim": _min_dim,
    "cumsum.default": _scan(relax.op.cumsum),
    "cumprod.default": _scan(relax.op.cumprod),
    "native_group_norm.default": _group_norm,
    "_native_batch_norm_legit.no_stats": _statistics_norm,
    "rms_norm.default": _rms_norm,
}
"""Converters by the names of torch's operators."""
