"""Owns GEMMs of any sizes on CPUs: panels of B in vectors of columns, by vdpbf16ps for bfloat16 where the CPU has it, else in float32.

Knows nothing of how its parameters are chosen, and recognises the computation by its structure, never by its names: two arguments, and sums
in float32. With vdpbf16ps, B may be dequantised from integers as `cpu_matmul_quantized` reads them.

Parameters:
  tile_m   rows of A of a register tile: 1 to 16
  vectors  vectors of columns of a register tile, and of a panel of B: 1 to 4
  block_k  elements along k of a panel, rounded down to whole vectors
  block_m  rows of A of a task

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import IRModule
from tvm.ir import TensorLoad
from tvm.tirx import Cast

from kerneldecl.analysis.cpu_features import has_bfloat16_dots
from kerneldecl.analysis.cpu_params import CpuPanelParams
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.cpu.bf16_weights import LANES, STEP
from kerneldecl.templates.cpu.gemm import Gemm, Operand, read_gemm
from kerneldecl.templates.cpu.gemm_result import factors_of, result_of
from kerneldecl.templates.cpu.panel_kernel import PanelGemm, Stored, build
from kerneldecl.templates.cpu.quantized_kernel import QuantizedGemm
from kerneldecl.templates.cpu.vectors import has_vectors
from kerneldecl.templates.cpu_matmul_quantized import read as read_quantized
from kerneldecl.templates.shared.contraction import plain_positions

PAIRS = "bfloat16"
"""Dtype of what vdpbf16ps multiplies."""
LEAST_COLUMNS = 2
"""Columns of C that are a vector."""


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the GEMM as one custom kernel; None where the function is none, or C is one column."""
    chosen = CpuPanelParams(**{name: params[name] for name in CpuPanelParams._fields})  # type: ignore[arg-type]
    gemm = read_gemm(mod)
    found = read(gemm) if gemm is not None and chosen.fits() else None
    if gemm is None or found is None or found.n < LEAST_COLUMNS:
        return None
    reads = gemm.sch.get(gemm.block).reads
    pairs = has_bfloat16_dots(arch) and found.n >= LANES and all(str(each.source.ty.dtype) == PAIRS for each in reads)
    if isinstance(found.b, QuantizedGemm) and not pairs:
        return None
    lanes = min(arch.the_cpu.vector_bytes // dtype_bytes("float32"), 1 << (found.n.bit_length() - 1))
    return build(found, chosen, lanes, pairs=pairs)


def read(gemm: Gemm) -> PanelGemm | None:
    """Return the GEMM that a schedule's function is, None where it is something else."""
    sch, axes = gemm.sch, gemm.axes
    block, args = sch.get(gemm.block), tuple(sch.mod["main"].params)
    a = None if axes.a.position in gemm.computed else _stored(gemm, axes.a, args)
    if a is None or not _is_multiply_add(block) or len(gemm.rest) > 1 or (gemm.rest and axes.batch):
        return None
    m, n, k = gemm.mnk
    batch = tuple(gemm.extents[axis] for axis in axes.batch)
    c = _matrix(block.writes[0], gemm, (axes.m, axes.n), len(args) - 1)
    b = _quantized(gemm) if axes.b.position in gemm.computed else _stored(gemm, axes.b, args)
    result = result_of(gemm, args[-1]) if not isinstance(b, QuantizedGemm) else b.result
    if b is None or c is None or result is None:
        return None
    return PanelGemm(args, batch, m, n, k, a, b, sums=block.writes[0].source, c=c, result=result, is_gated=bool(gemm.rest))


def _stored(gemm: Gemm, operand: Operand, args: tuple[Any, ...]) -> Stored | None:
    """Return how an operand is stored; None where it is no argument, or its vectors are not converted to float32."""
    region = gemm.sch.get(gemm.block).reads[operand.position]
    position = next((at for at, each in enumerate(args) if each.same_as(region.source)), None)
    if position is None or not has_vectors(str(region.source.ty.dtype)):
        return None
    place = gemm.axes.m if operand is gemm.axes.a else gemm.axes.n
    return _matrix(region, gemm, (place, gemm.axes.k), position)


def _matrix(region: Any, gemm: Gemm, axes: tuple[int, int], position: int) -> Stored | None:
    """Return how the axes of rows and columns, and batch axes, index a matrix."""
    found = plain_positions(region, [axis.var for axis in gemm.sch.get(gemm.block).iter_vars])
    if found is None or not set(axes) <= set(found) <= {*axes, *gemm.axes.batch}:
        return None
    batch = tuple(gemm.axes.batch.index(axis) if axis in gemm.axes.batch else -1 for axis in found)
    return Stored(position, batch, found.index(axes[0]), found.index(axes[1]))


def _quantized(gemm: Gemm) -> QuantizedGemm | None:
    """Return how B is dequantised; None where it is computed otherwise, or groups are no whole vectors."""
    found = read_quantized(gemm)
    return found if found is not None and found.weight_dtype == PAIRS and found.group % STEP == 0 else None


def _is_multiply_add(block: Any) -> bool:
    """Say whether a block multiplies two elements and accumulates in float32."""
    factors = [each.value if isinstance(each, Cast) else each for each in factors_of(block, "float32")]
    return bool(factors) and all(isinstance(each, TensorLoad) for each in factors)
