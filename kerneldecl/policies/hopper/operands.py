"""Owns how a product's operands reach the stages of a kernel on wgmma: by TMA, by threads, and which way round.

Knows nothing of tiles or of times.
"""

from __future__ import annotations

from kerneldecl.analysis.contraction import Contraction, Operand
from kerneldecl.model import dtype_bytes
from kerneldecl.policies.hopper import time_model as model
from kerneldecl.policies.hopper.tile_widths import COLUMN_UNIT

TURNED = 4
"""How much longer it takes to load bytes that lie across the reduction."""


def step_items(gemm: Contraction) -> int:
    """Return the terms of a sum in one stage."""
    return model.STEP_BYTES // dtype_bytes(gemm.a.dtype)


def is_box(operand: Operand) -> bool:
    """Say whether TMA brings a tile of an operand at once: rows are multiples of 16 bytes, and but for 16 bits the reduction is last."""
    return operand.vector() * dtype_bytes(operand.dtype) == 16 and not is_turned(operand)


def is_turned(operand: Operand) -> bool:
    """Say whether an operand is transposed on its way: wgmma wants the reduction last in all but 16-bit ones."""
    return dtype_bytes(operand.dtype) != 2 and not operand.is_k_last


def is_k_last(operand: Operand) -> bool:
    """Say whether the reduction is last in shared memory; but for 16 bits it always is."""
    return operand.is_k_last or is_turned(operand)


def unit_of(operand: Operand) -> int:
    """Return how many rows or columns of an operand come together: 64 that lie side by side, else those that TMA's swizzle permutes."""
    return COLUMN_UNIT if is_k_last(operand) else model.WGMMA_ROWS


def gathered_bytes(operand: Operand, extent: int) -> int:
    """Return what threads load of an operand for a stage, those bytes more often that they must turn; none where TMA brings it."""
    return 0 if is_box(operand) else extent * model.STEP_BYTES * (TURNED if is_turned(operand) else 1)
