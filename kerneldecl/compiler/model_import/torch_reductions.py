"""Owns the converters of torch's reductions that TVM's importer lacks or gets wrong.

Knows nothing of files, nor of GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import relax


def _truth(of_all: bool) -> Callable[[Any, Any], Any]:
    """Return the converter of any (or all) over given axes, or over all of them."""

    def convert(node: Any, importer: Any) -> Any:
        x, *rest = importer.retrieve_args(node)
        axes, keepdims = (*rest, None, False)[:2] if len(rest) < 2 else rest[:2]
        reduced = (relax.op.min if of_all else relax.op.max)(relax.op.astype(_is_true(x), "int8"), axes, keepdims=keepdims)
        return importer.block_builder.emit(relax.op.astype(reduced, "bool"))

    return convert


def _is_true(x: Any) -> Any:
    dtype = str(x.ty.dtype.dtype)
    return x if dtype == "bool" else relax.op.not_equal(x, relax.const(0, dtype))


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


REDUCTIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    **{f"any.{overload}": _truth(of_all=False) for overload in ("default", "dim", "dims")},
    **{f"all.{overload}": _truth(of_all=True) for overload in ("default", "dim", "dims")},
    "native_group_norm.default": _group_norm,
    "rms_norm.default": _rms_norm,
}
"""Converters by the names of torch's operators."""
