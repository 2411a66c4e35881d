"""Owns GEMV as a computation: its TensorIR, and its recognition.

Knows nothing of schedules, targets, or who declares it. A function is recognised as `compiler.attention` does it: by its canonical text.
"""

from __future__ import annotations

import tvm
from tvm import te

from kerneldecl.analysis.unaligned_gemv import GemvSizes
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of

ACCUM_DTYPE = "float32"
"""Dtype of the accumulators."""


def gemv(sizes: GemvSizes) -> list[te.Tensor]:
    """Return y = W x with accumulators of float32."""
    w = te.placeholder((sizes.k, sizes.n) if sizes.is_across else (sizes.n, sizes.k), sizes.dtype, "W")
    x = te.placeholder((sizes.k,), sizes.dtype, "x")
    k = te.reduce_axis((0, sizes.k), "k")

    def element(row: tvm.tirx.Var) -> tvm.tirx.Expr:
        weight = w(k, row) if sizes.is_across else w(row, k)
        return te.sum(weight.astype(ACCUM_DTYPE) * x(k).astype(ACCUM_DTYPE), axis=k)

    sums = te.compute((sizes.n,), element, name="sums")
    if sizes.out_dtype == ACCUM_DTYPE:
        return [w, x, sums]
    return [w, x, te.compute((sizes.n,), lambda i: sums(i).astype(sizes.out_dtype), name="y")]


def read_gemv(mod: tvm.IRModule) -> GemvSizes | None:
    """Return the sizes of the GEMV that a canonical module's `main` is, None if it computes something else."""
    try:
        args = signature_of(mod["main"])
    except (TypeError, ValueError):
        return None
    if [len(shape) for shape, _ in args] != [2, 1, 1]:
        return None
    (shape, dtype), ((k,), _), ((n,), out_dtype) = args
    text = canonical_text(mod)
    for is_across in (False, True):
        sizes = GemvSizes(n, k, is_across, dtype, out_dtype)
        if shape != ((k, n) if is_across else (n, k)):
            continue
        func = te.create_prim_func(gemv(sizes), index_dtype_override="int64")
        if canonical_text(canonical_module(func)) == text:
            return sizes
    return None
