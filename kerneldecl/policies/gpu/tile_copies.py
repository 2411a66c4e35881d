"""Owns what thread blocks on mma.sync take to copy the k-tiles of a GEMM to shared memory: instructions, addresses, waits.

Knows nothing of TVM, of multiplications or of which tiles are tried.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.analysis.gpu_limits import MIN_ASYNC_COPY_BYTES, WARP_LANES
from kerneldecl.analysis.params import GemmTcParams
from kerneldecl.model import dtype_bytes
from kerneldecl.policies.gpu.tensor_core_model import (
    FIRST_WINDOW_COPY_CYCLES,
    IMAGE_RESOLVED_COPIES,
    MIXED_WAIT,
    OVERLAPPED_ADDRESS_CYCLES,
    RESOLVED_COPIES,
    RESOLVED_WAIT,
    register_waits,
)

COPY_INSTRUCTIONS, BOUNDED_COPY_INSTRUCTIONS = 6.0, 14.0
"""Instructions of one copy with its address, as nvcc emits them: of whole tiles of a matrix; and with bounds, or with the divisions that
find a pixel in its image."""
ADDRESS_CYCLES, BOUNDED_ADDRESS_CYCLES, IMAGE_ADDRESS_CYCLES, PAST_IMAGES_CYCLES = 10.0, 40.0, 100.0, 20.0
"""Cycles of one warp for each copy of whole tiles, of others, and of pixels, and what each of these takes more where tiles reach past the
last pixel: instructions of an address wait for one another, so that few warps with many copies wait for that. Fitted, as the next two, to
510 tilings of 60 GEMMs and convolutions (H200, 2026-11)."""
UNEVEN_ROW_INSTRUCTIONS, UNEVEN_ROW_CYCLES = 20.0, 80.0
"""Instructions, and cycles of one warp, that each copy takes more where a row in shared memory is no power of 2, so that its index is
divided."""
FIRST_BOUNDED_COPY_CYCLES = 45.0
"""Cycles of a thread for each copy with bounds of its first k-tile, whose addresses wait for one another while nothing is multiplied.
Fitted to 749 tilings of 96 GEMMs and convolutions of less than 8 us (H200, 2026-11)."""
WARP_COPY_BYTES = 512
"""Bytes that a warp copies at once at most."""
BOUNDED_INT8_VECTOR = 4
"""Elements of 8 bits that the template copies at once where some of them may lie beyond the operand."""


class CopyCost(NamedTuple):
    """What a block's copies of a k-tile cost; see `KTile`."""

    issue_cycles: float
    address_cycles: float
    register_waits: float
    first_cycles: float


def copy_cost(gemm: Contraction, tiling: GemmTcParams, vectors: tuple[int, int], *, is_double_buffered: bool) -> CopyCost:
    """Return what a block's copies of a k-tile cost; `vectors` are the elements of A and of B that one copy takes at most."""
    item_bytes, threads = dtype_bytes(gemm.a.dtype), tiling.warps * WARP_LANES
    _, m, n, k = gemm.extents
    tile_bytes = (tiling.block_m + tiling.block_n) * tiling.block_k * item_bytes
    issue = -tile_bytes / WARP_COPY_BYTES * COPY_INSTRUCTIONS if is_double_buffered else 0.0
    address = waits = first = 0.0
    is_k_whole, is_k_one_axis = k % (tiling.block_k * tiling.split_k) == 0, len(gemm.k) == 1
    is_mixed = len({widest * item_bytes < MIN_ASYNC_COPY_BYTES for widest in vectors}) == 2
    operands = ((tiling.block_m, m, gemm.m, gemm.a), (tiling.block_n, n, gemm.n, gemm.b))
    for (extent, size, axes, operand), widest in zip(operands, vectors, strict=True):
        is_whole, elements = is_k_whole and size % extent == 0, extent * tiling.block_k
        vector = math.gcd(widest, max(1, elements // threads))
        copied = elements / (vector if is_whole or item_bytes > 1 else math.gcd(vector, BOUNDED_INT8_VECTOR))
        is_simple = is_whole and is_k_one_axis and len(axes) == 1
        is_divided = not operand.is_k_last and is_uneven(extent)
        instructions = COPY_INSTRUCTIONS if is_simple else BOUNDED_COPY_INSTRUCTIONS
        image_cycles = IMAGE_ADDRESS_CYCLES + (PAST_IMAGES_CYCLES if size % extent else 0.0)
        cycles = ADDRESS_CYCLES if is_simple else image_cycles if len(axes) > 1 else BOUNDED_ADDRESS_CYCLES
        issue += copied / WARP_LANES * (instructions + is_divided * UNEVEN_ROW_INSTRUCTIONS)
        address += copied / threads * (cycles + is_divided * UNEVEN_ROW_CYCLES)
        if widest * item_bytes < MIN_ASYNC_COPY_BYTES:
            copies = copied / threads
            # Pixels that are all read once, in their order, are rows of a matrix.
            has_windows = len(axes) > 1 and operand.size_bytes != size * k * item_bytes
            most = IMAGE_RESOLVED_COPIES if has_windows else RESOLVED_COPIES
            resolved = MIXED_WAIT if is_mixed and not operand.is_k_last else RESOLVED_WAIT
            waits += register_waits(copies, resolved if copies <= most else None, is_divided=is_divided)
            address -= copies * OVERLAPPED_ADDRESS_CYCLES
            first += has_windows * copies * FIRST_WINDOW_COPY_CYCLES
        elif len(axes) == 1 and not is_simple:
            first += copied / threads * FIRST_BOUNDED_COPY_CYCLES
    return CopyCost(issue, address, waits, first)


def is_uneven(extent: int) -> bool:
    """Say whether indices are divided by an extent: it is no power of 2."""
    return extent.bit_count() > 1
