"""Owns GEMMs of int8 by int8 on CPUs, [m, k] by [n, k]: dot products of bytes along k.

Knows nothing of how its parameters are chosen, and recognises the computation by its structure, never by its names.

Parameters:
  tile_m  rows of A of a register tile: 1 to 16
  tile_n  rows of W of a register tile: 1 to 8
  dot     instruction: "vnni" multiplies bytes and adds up fours (vpdpbusd), "pairs" multiplies int16 and adds up pairs (vpmaddwd)

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import IRModule, tirx
from tvm.tirx import Add, BufferStore, Cast, Mul

from kerneldecl.analysis.cpu_features import byte_dots
from kerneldecl.analysis.cpu_params import CpuInt8Params
from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.gemm import Gemm, read_gemm
from kerneldecl.templates.cpu.int8_kernel import Int8Gemm, build, width_of
from kerneldecl.templates.cpu.splice import Element
from kerneldecl.templates.shared.contraction import merge


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the GEMM as one custom kernel, or None where it is another function, k is no whole vectors, or the CPU lacks `dot`."""
    chosen = CpuInt8Params(**{name: params[name] for name in CpuInt8Params._fields})  # type: ignore[arg-type]
    gemm = read_gemm(mod)
    found = read(gemm) if gemm is not None and chosen.fits() and chosen.dot in byte_dots(arch) else None
    vector_bytes = arch.the_cpu.vector_bytes
    return None if found is None or found.k % width_of(chosen.dot, vector_bytes) else build(found, chosen, vector_bytes)


def read(gemm: Gemm) -> Int8Gemm | None:
    """Return the GEMM of int8 that a schedule's function is, None where it is something else."""
    sch, axes = gemm.sch, gemm.axes
    m, n, k = gemm.mnk
    if (
        gemm.rest
        or axes.batch
        or gemm.computed
        or (axes.a.spatial_dim, axes.b.spatial_dim) != (0, 0)
        or (axes.a.rank, axes.b.rank) != (2, 2)
    ):
        return None
    block, args = sch.get(gemm.block), tuple(sch.mod["main"].params)
    operands = [block.reads[operand.position].source for operand in (axes.a, axes.b)]
    positions = [at for each in operands for at, arg in enumerate(args) if arg.same_as(each)]
    sums, result = block.writes[0].source, _result(gemm, args[-1])
    if len(positions) != 2 or result is None or not _is_product(block) or any(str(each.ty.dtype) != "int8" for each in operands):
        return None
    return Int8Gemm(args=args, m=m, n=n, k=k, a=positions[0], weights=positions[1], sums=sums, result=result)


def _result(gemm: Gemm, out: Any) -> Element | None:
    """Return how an element of C is made of a sum; None where C is not written at the axes."""
    sums = gemm.sch.get(gemm.block).writes[0].source
    if not gemm.epilogue:
        axes = tuple(tirx.Var(f"i{at}", "int64") for at in range(2))
        return Element(axes, sums[axes]) if sums.same_as(out) else None
    last = gemm.sch.get(merge(gemm.sch, gemm.epilogue))
    axes = tuple(axis.var for axis in last.iter_vars)
    is_plain = isinstance(last.body, BufferStore) and last.body.buffer.same_as(out) and len(last.body.indices) == len(axes) == 2
    return Element(axes, last.body.value) if is_plain and all(map(_is_same, last.body.indices, axes)) else None


def _is_same(index: Any, axis: Any) -> bool:
    return bool(index.same_as(axis))


def _is_product(block: Any) -> bool:
    """Say whether a block adds up products of two elements in int32."""
    body = block.body
    if not isinstance(body, BufferStore) or not isinstance(body.value, Add) or not isinstance(body.value.b, Mul):
        return False
    factors = body.value.b.a, body.value.b.b
    return str(body.value.ty.dtype) == "int32" and all(isinstance(each, Cast) for each in factors)
