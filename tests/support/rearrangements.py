"""Owns functions that put elements elsewhere: rows joined, cut, turned as rotary embeddings turn them.

Knows nothing of what is made of them.
"""

from __future__ import annotations

from typing import Any

from tvm import te, topi


def _joined() -> Any:
    x, y = te.placeholder((6, 1, 40), "float32", "X"), te.placeholder((6, 1, 1), "float32", "Y")
    return te.create_prim_func([x, y, topi.concatenate([x, y], 2)], index_dtype_override="int64")


def _cut() -> Any:
    x = te.placeholder((6, 1, 41), "float16", "X")
    return te.create_prim_func([x, topi.strided_slice(x, [0, 0, 0], [6, 1, 40], [1, 1, 1])], index_dtype_override="int64")


def _turned() -> Any:
    """Return a rotary embedding, heads first, from rows of all heads."""
    x, cos, sin = (te.placeholder(shape, "float16", name) for shape, name in (((5, 64), "X"), ((5, 8), "C"), ((5, 8), "S")))
    heads = topi.transpose(topi.reshape(x, (5, 4, 16)), [1, 0, 2])
    left, right = topi.split(heads, 2, 2)
    turned = topi.concatenate([left * cos - right * sin, right * cos + left * sin], 2)
    return te.create_prim_func([x, cos, sin, turned], index_dtype_override="int64")


joined, cut, turned = _joined(), _cut(), _turned()
