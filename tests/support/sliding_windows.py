"""Owns reductions over windows of images, as Relax has them: pooling, and a convolution of each channel by itself.

Knows nothing of what is made of them.
"""

from __future__ import annotations

from typing import Any

from tvm import te, topi


def pool(kind: str, shape: tuple[int, ...], dtype: str, side: int = 3, stride: int = 2, padding: int = 1) -> Any:
    x = te.placeholder(shape, dtype, "X")
    y = topi.nn.pool2d(x, (side, side), (stride, stride), (1, 1), (padding,) * 4, kind, layout="NHWC")
    return te.create_prim_func([x, y], index_dtype_override="int64")


def convolution_of_each_channel() -> Any:
    x, w = te.placeholder((2, 11, 10, 24), "float16", "X"), te.placeholder((3, 3, 24, 1), "float16", "W")
    y = topi.nn.depthwise_conv2d_nhwc(x, w, (1, 1), (1, 1), (1, 1), "float32")
    out = te.compute(y.shape, lambda *i: te.max(y(*i).astype("float16"), te.const(0, "float16")), "Y")
    return te.create_prim_func([x, w, out], index_dtype_override="int64")


max_pool = pool("max", (2, 12, 12, 64), "float16")
max_pool_of_integers = pool("max", (3, 7, 7, 36), "int8")
mean_pool = pool("avg", (1, 13, 9, 20), "float32")
mean_of_few_channels = pool("avg", (1, 9, 9, 7), "float32", 2, 1, 0)
large_max_pool = pool("max", (128, 112, 112, 64), "float16")
depthwise = convolution_of_each_channel()
