"""Owns which operands wgmma takes, and how each reaches shared memory: by TMA or through registers, as stored or transposed.

Knows nothing of tiles or of times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from kerneldecl.analysis.contraction import NOT_MULTIPLY_ACCUMULATE, Contraction, Operand
from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MMA_TILE_ROWS, SWIZZLE_ROWS, TMA_ALIGN_BYTES
from kerneldecl.analysis.tensor_cores import accumulators
from kerneldecl.model import Gpu, IterSpace, dtype_bytes
from kerneldecl.policies.gpu.time_model import LINE_BYTES

RESIDUAL_BYTES = 2
"""Bytes of an element of a residual that TMA loads to where results are stored from: stmatrix stores 16 bits."""
TRANSPOSE_FACTOR = 4
"""Ratio of the times to load bytes across the reduction and along it. Assumed."""


def first_reason(gemm: Contraction, gpu: Gpu, reasons: Iterable[tuple[bool, str]]) -> str:
    """Return why no wgmma multiplies a GEMM's operands, else the first of a template's reasons that applies; empty where none does."""
    return why_no_wgmma(gemm, gpu) or _first(reasons)


def _first(reasons: Iterable[tuple[bool, str]]) -> str:
    return next((reason for applies, reason in reasons if applies), "")


def why_no_wgmma(gemm: Contraction, gpu: Gpu) -> str:
    """Return why no wgmma multiplies a GEMM's operands, whatever their layout, as a sentence; empty where one does."""
    dtype, other = gemm.a.dtype, gemm.b.dtype
    reasons = (
        (not gpu.wgmma_arch, "its GPU has no wgmma"),
        (not gemm.is_plain, NOT_MULTIPLY_ACCUMULATE),
        (dtype != other, f"its operands differ in dtype: {dtype} and {other}"),
        (gemm.accum_dtype not in accumulators("wgmma", dtype), f"there is no wgmma of {dtype} with {gemm.accum_dtype} accumulators"),
        (not gpu.tensor_rate(dtype), f"the GPU's tensor cores do not take {dtype}"),
    )
    return _first(reasons)


def k_tile_items(gemm: Contraction) -> int:
    """Return the elements of a k-tile along k."""
    return K_TILE_BYTES // dtype_bytes(gemm.a.dtype)


def has_tma_rows(operand: Operand) -> bool:
    """Say whether an operand's rows in memory are multiples of TMA's 16 bytes."""
    return operand.vector() * dtype_bytes(operand.dtype) == TMA_ALIGN_BYTES


def is_tma_loadable(operand: Operand) -> bool:
    """Say whether TMA can load tiles of an operand: its rows are multiples of 16 bytes, and it needs no transpose."""
    return has_tma_rows(operand) and not needs_transpose(operand)


def is_from_registers(operand: Operand) -> bool:
    """Say whether wgmma can take an operand from registers, as its operand A, so that nothing transposes it: TF32 with k first."""
    return operand.dtype == "tfloat32" and needs_transpose(operand) and has_tma_rows(operand)


def are_tma_loadable(gemm: Contraction) -> bool:
    """Say whether TMA can load tiles of both operands, of which A is wgmma's."""
    return (is_tma_loadable(gemm.a) or is_from_registers(gemm.a)) and is_tma_loadable(gemm.b)


def needs_transpose(operand: Operand) -> bool:
    """Say whether an operand is transposed while it is loaded: wgmma reads operands with k last, unless they have 16 bits."""
    return dtype_bytes(operand.dtype) != 2 and not operand.is_k_last


def is_k_last_in_smem(operand: Operand) -> bool:
    """Say whether k is an operand's last dimension in shared memory."""
    return operand.is_k_last or needs_transpose(operand)


def smem_rows_unit(operand: Operand) -> int:
    """Return the rows of A (or columns of B) of which a tile in shared memory has a multiple.

    That is 8 with k last, the rows that TMA's swizzle permutes together; else 64, which are contiguous in one swizzled row.
    """
    return SWIZZLE_ROWS if is_k_last_in_smem(operand) else MMA_TILE_ROWS


def tma_lines(operand: Operand, extent: int) -> float:
    """Return the lines of the caches that TMA reads for an operand's k-tile of `extent` rows; 0 where TMA does not load it.

    A row of shared memory is as long as a line, but where the rows in memory are no multiples of lines, most of them touch two.
    """
    if not is_tma_loadable(operand):
        return 0.0
    unit = smem_rows_unit(operand)
    aligned = math.gcd(operand.contiguous * dtype_bytes(operand.dtype), LINE_BYTES)
    return -(-extent // unit) * unit * (2 - aligned / LINE_BYTES)


def register_load_bytes(operand: Operand, extent: int, *, is_a: bool = False) -> int:
    """Return the bytes of an operand's k-tile that producer threads load through registers, 0 where TMA loads it.

    They fill whole rows of shared memory, also where a tile is narrower. Bytes to be transposed count `TRANSPOSE_FACTOR` times.
    """
    if is_tma_loadable(operand) or (is_a and is_from_registers(operand)):
        return 0
    unit = smem_rows_unit(operand)
    return -(-extent // unit) * unit * K_TILE_BYTES * (TRANSPOSE_FACTOR if needs_transpose(operand) else 1)


def has_residual(space: IterSpace) -> bool:
    """Say whether the epilogue reads an argument of 16 bits where it stores the result, so that TMA may load its tiles."""
    after = list(itertools.dropwhile(lambda block: not block.is_reduction, space.blocks))[1:]
    out = space.blocks[-1].writes[0]
    return dtype_bytes(out.dtype) == RESIDUAL_BYTES and any(
        read.operand in space.inputs and (read.shape, read.dtype) == (out.shape, out.dtype) and read.index == block.writes[0].index
        for block in after
        for read in block.reads
    )
