"""Owns how a GEMM's function makes an element of C: the multiply-add of its reduction, and its epilogue.

Knows nothing of kernels.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx import Add, BufferStore, Mul

from kerneldecl.templates.cpu.gemm import Gemm
from kerneldecl.templates.cpu.splice import Element
from kerneldecl.templates.shared.contraction import merge


def result_of(gemm: Gemm, out: Any) -> Element | None:
    """Return how an element of C is made of a sum, or of several; None where C is not written at the axes."""
    sums = gemm.sch.get(gemm.block).writes[0].source
    blocks = gemm.rest or gemm.epilogue
    if not blocks:
        axes = tuple(tirx.Var(f"i{at}", "int64") for at in range(len(out.ty.shape)))
        return Element(axes, sums[axes]) if sums.same_as(out) else None
    last = gemm.sch.get(merge(gemm.sch, blocks))
    axes = tuple(axis.var for axis in last.iter_vars)
    is_plain = isinstance(last.body, BufferStore) and last.body.buffer.same_as(out) and len(last.body.indices) == len(axes)
    return Element(axes, last.body.value) if is_plain and all(map(_is_same, last.body.indices, axes)) else None


def factors_of(block: Any, dtype: str) -> tuple[Any, ...]:
    """Return both factors of a block's multiply-add in a dtype; nothing where it computes something else."""
    body = block.body
    if not isinstance(body, BufferStore) or not isinstance(body.value, Add) or not isinstance(body.value.b, Mul):
        return ()
    return (body.value.b.a, body.value.b.b) if str(body.value.ty.dtype) == dtype else ()


def _is_same(index: Any, axis: Any) -> bool:
    return bool(index.same_as(axis))
