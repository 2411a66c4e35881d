"""Owns the limits of kernels on wgmma that policies and templates share: registers, shared memory, pipeline stages, TMA boxes.

Knows nothing of TVM, of which kernels are fast or of what tensor cores multiply, which is `tensor_cores`.
"""

from __future__ import annotations

WARPGROUP_THREADS = 128
MMA_TILE_ROWS = 64
"""Rows of A that one wgmma multiplies, and rows or columns that are contiguous in shared memory where k is not."""
MAX_BLOCK_N = 256
"""Columns that one wgmma multiplies at most (PTX ISA, "Asynchronous Warpgroup Level Matrix Shape")."""
K_TILE_BYTES = 128
"""Bytes of each operand row in one k-tile: what TMA's 128-byte swizzle permutes together (PTX ISA, "Strides")."""
SWIZZLE_ROWS = 8
"""Rows of K_TILE_BYTES that the 128-byte swizzle permutes together, so that a TMA box begins with the first of them."""

MIN_STAGES, MAX_STAGES = 2, 12
"""Stages of the shared-memory pipeline that the templates build."""
MAX_SPLIT_K = 8
"""CTAs of one cluster among which the templates split k at most: the largest portable cluster (CUDA programming guide, compute capability
9.0)."""
MAX_WORKSPACE_SPLIT_K = 64
"""CTAs among which the templates split k at most where partial accumulators go through global memory."""
MAX_MULTICAST_CLUSTER = 4
"""CTAs of one cluster that share operands by multicast in the templates."""

SM_REGISTERS = 65536
"""32-bit registers of an SM (CUDA programming guide, compute capability 9.0)."""
MAX_ACCUM_REGISTERS = {1: 192, 2: 192, 3: 104, 4: 48}
"""Hard limit: registers per thread that may hold accumulators, by the number of consumer warpgroups. Above it kernels spill, since the
rest hold addresses and the epilogue. Templates refuse more."""
PREFERRED_ACCUM_REGISTERS = {**MAX_ACCUM_REGISTERS, 2: 160}
"""Preferred limit, of the policies: with two consumers more accumulators leave less for the epilogue, so tiles use them only where
that fills the SMs better."""
RESIDENT_OTHER_REGISTERS = 48
"""Registers per thread besides the accumulators, where an SM holds several CTAs of one consumer."""

SM_SMEM_BYTES = 228 * 1024
"""Shared memory of an SM (CUDA programming guide, compute capability 9.0)."""
MAX_CTA_SMEM_BYTES = 227 * 1024
"""Shared memory that one CTA may have (same)."""
SYSTEM_SMEM_BYTES = 1024
"""Shared memory that the system reserves in each CTA (same)."""
RESERVED_SMEM_BYTES = 1024
"""Shared memory that kernels keep for barriers and alignment."""
EPILOGUE_BUFFER_BYTES = MMA_TILE_ROWS * MMA_TILE_ROWS * 2
"""Shared memory through which a consumer stores 64 x 64 results of 16 bits."""
EPILOGUE_BUFFER_CHOICES = (4, 2, 1)
"""Epilogue buffers of one consumer: the most that fit and divide its chunks of results."""

TMA_ALIGN_BYTES = 16
"""Bytes of which tensor-map strides, and the addresses that TMA reads, are multiples (CUDA driver API, cuTensorMapEncodeTiled)."""
TMA_SMEM_ALIGN_BYTES = 128
"""Bytes of which the addresses of TMA's boxes in shared memory are multiples (PTX ISA, "cp.async.bulk.tensor")."""
MAX_TMA_BOX = 256
"""Elements along a side of a TMA box, those that it steps over included (same)."""
MAX_TMA_BOX_STRIDE = 8
"""Traversal stride of a TMA box along a dimension (same)."""
MAX_TMA_RANK = 5
"""Dimensions of a tensor map (same)."""
MAX_TMA_BOXES = 4
"""TMA boxes of one operand and k-tile that one CTA loads: more take longer to start than a k-tile lasts."""
SMEM_BOX_ALIGN_BYTES = 128
"""Bytes of which the shared-memory address of a TMA box is a multiple (CUDA programming guide, asynchronous data copies)."""


def epilogue_tile_bytes(consumer_results: int) -> int:
    """Return the shared memory of all results of a consumer's part of a tile, of 16 bits, where TMA loads a residual's tile there."""
    return 2 * consumer_results


def split_k_share(registers: int, split_k: int) -> int:
    """Return how many of a thread's registers of accumulators each CTA of a split-K cluster reduces; the last CTAs may have fewer.

    Where they do not divide evenly, shares are of whole 16 bytes.
    """
    return registers // split_k if registers % split_k == 0 else -(-registers // (split_k * 4)) * 4


def fitting_epilogue_buffers(chunks: int, consumers: int, free_bytes: int) -> int:
    """Return how many epilogue buffers each consumer has in so much shared memory for so many chunks of results; 0 where none fits."""
    fitting = (
        count for count in EPILOGUE_BUFFER_CHOICES if chunks % count == 0 and count * consumers * EPILOGUE_BUFFER_BYTES <= free_bytes
    )
    return next(fitting, 0)
