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

from tvm import IRModule
from tvm.tirx import Cast

from kerneldecl.analysis.cpu_features import byte_dots
from kerneldecl.analysis.cpu_params import CpuInt8Params
from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.gemm import Gemm, read_gemm
from kerneldecl.templates.cpu.gemm_result import factors_of, result_of
from kerneldecl.templates.cpu.int8_kernel import Int8Gemm, build, width_of


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
    sums, result = block.writes[0].source, result_of(gemm, args[-1])
    if len(positions) != 2 or result is None or not _is_multiply_add(block) or any(str(each.ty.dtype) != "int8" for each in operands):
        return None
    return Int8Gemm(args=args, m=m, n=n, k=k, a=positions[0], weights=positions[1], sums=sums, result=result)


def _is_multiply_add(block: Any) -> bool:
    """Say whether a block multiplies two converted elements and accumulates in int32."""
    factors = factors_of(block, "int32")
    return bool(factors) and all(isinstance(each, Cast) for each in factors)
