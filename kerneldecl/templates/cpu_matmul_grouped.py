"""Owns grouped GEMM on CPUs: panels of a group's weights in float32, register tiles of its rows.

Knows nothing of how its parameters are chosen, and recognises a grouped GEMM by its computation, never by its names.

A task has a panel of columns of one group, whatever number of rows that has: it copies the weights once, in vectors of columns, and then
tile_m rows of A after the other. Rows of no group are set to zero. Whatever the sizes are, nothing outside of the arguments is touched.

Parameters:
  tile_m   rows of a register tile: 1 to 16
  vectors  vectors of columns of a register tile, and of a panel: 1 to 8

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.matmul_grouped import CpuGroupedParams
from kerneldecl.compiler.matmul_grouped import read_matmul_grouped
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.cpu.grouped_kernel import build


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the grouped GEMM as one custom kernel, or None where the function is none or a vector has no two float32."""
    chosen = CpuGroupedParams(**{name: params[name] for name in CpuGroupedParams._fields})  # type: ignore[arg-type]
    lanes = arch.the_cpu.vector_bytes // dtype_bytes("float32")
    if lanes < 2 or lanes & (lanes - 1) or not chosen.fits():
        return None
    spec = read_matmul_grouped(mod)
    return None if spec is None else build(spec, chosen, lanes)
