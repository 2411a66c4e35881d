"""Owns which operands of a GEMM are unpacked from tiles of 4-bit weights, or cannot be dequantised in vectors.

Knows nothing of TVM, of scales or of how templates copy operands.
"""

from __future__ import annotations

from kerneldecl.analysis.contraction import dequantised_operands
from kerneldecl.analysis.packed_weights import packed_shape
from kerneldecl.model import IterSpace, dtype_bytes

HALF_BYTES = 2
DIMENSIONS = len(packed_shape(0, 0))
"""Dimensions of packed weights."""


def unpacked_operands(space: IterSpace) -> frozenset[int]:
    """Return the positions of the operands of a function's only reduction that it dequantises from tiles of packed 4-bit weights."""
    reduction = next(block for block in space.blocks if block.is_reduction)
    unpacking = {
        block.writes[0].operand
        for block in space.blocks
        if not block.is_reduction and any(read.dtype == "uint8" and len(read.shape) == DIMENSIONS for read in block.reads)
    }
    return frozenset(at for at in dequantised_operands(space) if reduction.reads[at].operand in unpacking)


def scalar_operands(space: IterSpace) -> frozenset[int]:
    """Return the positions of operands that are dequantised one by one: unpacked ones, and those of 16 bits from 4-bit integers or float8.

    A vector of 16 bytes has eight of these, for which TVM's CUDA has no loads of nibbles and no conversions of float8.
    """
    reads = next(block for block in space.blocks if block.is_reduction).reads
    narrow = {
        block.writes[0].operand
        for block in space.blocks
        if not block.is_reduction and any(read.dtype == "uint8" or read.dtype.startswith("float8") for read in block.reads)
    }
    wide = {at for at in dequantised_operands(space) if dtype_bytes(reads[at].dtype) == HALF_BYTES and reads[at].operand in narrow}
    return unpacked_operands(space) | wide
