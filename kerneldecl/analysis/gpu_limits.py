"""Owns limits of NVIDIA GPUs and of CUDA that no arch file holds, since they are the same on all GPUs that kerneldecl knows.

Knows nothing of TVM, policies, templates or any one computation.
"""

from __future__ import annotations

MAX_GRID_Z = 65535
"""Thread blocks along a grid's z, which a batch must not exceed (CUDA C++ Programming Guide, technical specifications)."""
SM_PARTITIONS = 4
"""Partitions of an SM, each with a scheduler that issues one instruction per cycle, registers and CUDA cores of its own (NVIDIA Volta
architecture whitepaper, 2017, and those of all architectures since)."""
WARP_LANES = 32
"""Threads of a warp."""
VECTOR_BYTES = 16
"""Bytes that one instruction of a thread loads, stores or copies at most."""
SECTOR_BYTES = 32
"""Bytes of a sector, the least that L2 transfers (CUDA C++ Best Practices Guide, coalesced access to global memory)."""
MIN_ASYNC_COPY_BYTES = 4
"""Bytes that cp.async copies at least (PTX ISA, cp.async: 4, 8 or 16)."""
FIRST_PDL_CAPABILITY = (9, 0)
"""Compute capability of the first GPUs with programmatic dependent launch (CUDA C++ Programming Guide)."""
FIRST_FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with conversions from and to float8 (PTX ISA, cvt)."""
FIRST_CLUSTER_CAPABILITY = (9, 0)
"""Compute capability of the first GPUs with thread block clusters (CUDA C++ Programming Guide)."""
MAX_CLUSTER = 8
"""Thread blocks of a cluster that every GPU with clusters takes (CUDA C++ Programming Guide, thread block clusters)."""
PLAIN_SMEM_BYTES = 48 * 1024
"""Bytes of shared memory that a block has where the launch does not ask for more (CUDA C++ Programming Guide, compute capabilities)."""


def launched_smem_bytes(static: int, dynamic: int) -> int:
    """Return the dynamic shared memory that a launch requests for a block that has static memory as well, in bytes.

    TVM's runtime asks CUDA for more than PLAIN_SMEM_BYTES only where the dynamic part has so many.
    """
    return max(dynamic, PLAIN_SMEM_BYTES) if dynamic and static + dynamic > PLAIN_SMEM_BYTES else dynamic
