"""Owns the converters of torch's GEMMs and convolutions, whose results have torch's dtype and float32 accumulators.

Knows nothing of files, nor of operators that contract nothing.

TVM's importer gives all of these float32 results, whatever their operands. The form written here is the one that the standard
rules declare: a contraction with `out_dtype` float32, then a cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import relax

HALF = ("float16", "bfloat16")
_Convert = Callable[[Any, Any], Any]
"""A converter of TVM's importer: of a node of the graph and the importer to an expression."""


def accumulated(importer: Any, product: Callable[[str], Any], dtype: str) -> Any:
    """Emit a product, given its `out_dtype`, of operands of `dtype`; return it as that dtype."""
    result = importer.block_builder.emit(product("float32" if dtype in HALF else dtype))
    return importer.block_builder.emit(relax.op.astype(result, dtype)) if dtype in HALF else result


def matmul(importer: Any, a: Any, b: Any) -> Any:
    return accumulated(importer, lambda out_dtype: relax.op.matmul(a, b, out_dtype=out_dtype), dtype_of(a))


def dtype_of(expr: Any) -> str:
    return str(expr.ty.dtype.dtype)


def _product(node: Any, importer: Any) -> Any:
    a, b = (importer.env[arg] for arg in node.args[:2])
    return matmul(importer, a, b)


def _linear(node: Any, importer: Any) -> Any:
    x, weights, *bias = importer.retrieve_args(node)
    result = matmul(importer, x, importer.block_builder.emit(relax.op.permute_dims(weights)))
    return importer.block_builder.emit(relax.op.add(result, bias[0])) if bias and bias[0] is not None else result


def _addmm(node: Any, importer: Any) -> Any:
    """Convert beta * added + alpha * a @ b; a factor of 0 leaves its term out, as in torch, NaN or not."""
    added, a, b = (importer.env[arg] for arg in node.args[:3])
    alpha, beta = (node.kwargs.get(name, 1) for name in ("alpha", "beta"))
    if not alpha:
        zeros = relax.op.full(node.meta["val"].shape, relax.const(0, dtype_of(a)), dtype_of(a))
        return importer.block_builder.emit(relax.op.add(_scaled(importer, added, beta), zeros) if beta else zeros)
    result = _scaled(importer, matmul(importer, a, b), alpha)
    return importer.block_builder.emit(relax.op.add(_scaled(importer, added, beta), result)) if beta else result


def _scaled(importer: Any, x: Any, factor: float) -> Any:
    return x if factor == 1 else importer.block_builder.emit(relax.op.multiply(x, relax.const(factor, dtype_of(x))))


_CONVOLUTIONS: Mapping[tuple[int, bool], tuple[Any, str, str]] = {
    (3, False): (relax.op.nn.conv1d, "NCW", "OIW"),
    (4, False): (relax.op.nn.conv2d, "NCHW", "OIHW"),
    (5, False): (relax.op.nn.conv3d, "NCDHW", "OIDHW"),
    (3, True): (relax.op.nn.conv1d_transpose, "NCW", "IOW"),
    (4, True): (relax.op.nn.conv2d_transpose, "NCHW", "IOHW"),
}
"""Operator and layouts by the rank of the images and whether the convolution is transposed."""


def _convolution(node: Any, importer: Any) -> Any:
    x, weights, bias, stride, padding, dilation, transposed, output_padding, groups = importer.retrieve_args(node)
    rank = x.ty.ndim
    if (rank, transposed) not in _CONVOLUTIONS:
        raise NotImplementedError(f"a {'transposed ' if transposed else ''}convolution of {rank - 2} dimensions")
    operator, data_layout, kernel_layout = _CONVOLUTIONS[rank, transposed]
    window = {"strides": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        window["output_padding"] = output_padding
    layouts = {"data_layout": data_layout, "kernel_layout": kernel_layout}
    result = accumulated(importer, lambda out: operator(x, weights, **window, **layouts, out_dtype=out), dtype_of(x))
    if bias is None:
        return result
    return importer.block_builder.emit(relax.op.add(result, relax.op.reshape(bias, (1, -1, *[1] * (rank - 2)))))


CONTRACTIONS: Mapping[str, _Convert] = {
    "addmm.default": _addmm,
    "baddbmm.default": _addmm,
    "bmm.default": _product,
    "convolution.default": _convolution,
    "linear.default": _linear,
    "matmul.default": _product,
    "mm.default": _product,
}
"""Converters by the names of torch's operators."""
