"""Owns how much shared memory the epilogue of a tile on wgmma takes, and how its results leave through it.

Knows nothing of TVM, of templates or of time.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.analysis.hopper_limits import (
    EPILOGUE_BUFFER_BYTES,
    MMA_TILE_ROWS,
    WARPGROUP_THREADS,
    epilogue_tile_bytes,
    fitting_epilogue_buffers,
    split_k_share,
)
from kerneldecl.policies.hopper.time_model import ACCUM_BYTES


def epilogue_smem_bytes(thread_accumulators: int, consumers: int, split_k: int, out_bytes: int) -> int:
    """Return the least shared memory of a CTA's epilogue: accumulators that split-K reduces, and a buffer for each consumer."""
    reduced = consumers * WARPGROUP_THREADS * split_k * split_k_share(thread_accumulators, split_k) * ACCUM_BYTES
    return (reduced if split_k > 1 else 0) + (consumers * EPILOGUE_BUFFER_BYTES if out_bytes == 2 else 0)


class EpilogueSmem(NamedTuple):
    """What of a tile's epilogue is in shared memory."""

    buffers: int
    """Buffers of 64 x 64 results of each consumer."""
    extra_bytes: int
    """Bytes besides one buffer for each consumer."""
    residual_chunks: int
    """Chunks whose residual threads load themselves."""


def epilogue_smem(free_bytes: int, consumers: int, thread_accumulators: int, *, loads: str) -> EpilogueSmem:
    """Return how a tile is stored where `free_bytes` are free besides one buffer for each consumer.

    `loads` says how a residual comes: "tma" where TMA may load whole tiles of it, "threads" where it may not, "" without one.
    """
    chunks = max(1, thread_accumulators * WARPGROUP_THREADS // MMA_TILE_ROWS**2)
    tile_bytes, one_each = consumers * epilogue_tile_bytes(thread_accumulators * WARPGROUP_THREADS), consumers * EPILOGUE_BUFFER_BYTES
    if loads == "tma" and tile_bytes <= free_bytes + one_each:
        return EpilogueSmem(chunks, max(0, tile_bytes - one_each), 0)
    buffers = fitting_epilogue_buffers(chunks, consumers, free_bytes + one_each)
    return EpilogueSmem(buffers, (max(1, buffers) - 1) * EPILOGUE_BUFFER_BYTES, chunks if loads else 0)
