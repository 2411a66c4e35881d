"""Owns among how many threads the slices that indices name should be shared on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.gather import GatherRowsParams, GatherSizes, gather_of, takes
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies import gpu_elementwise
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, SHARED_BYTES, Work, ranked, waves

TEMPLATES = ("gpu_gather_rows", "gpu_elementwise")
AUTO = {"cuda": 76}
HAS_TRACES = False

THREADS = (256, 128, 512)
UNROLL = (2, 4, 1, 3, 8, 16)
MOST_IDLE = 1.1
"""Vectors that the threads of a slice's pieces have room for, by those that there are."""
OTHER_REGISTERS = 24
VECTOR_CYCLES = 20.0
"""Cycles of a thread for each vector, which it loads and stores. Assumed."""
ROUNDS, AHEAD_ROUNDS = 2.0, 1.0
"""Latencies of a slice: its index, its vectors; of L2 alone where both are on their way when the preceding kernel has ended. Assumed."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return pieces of slices, and the best of gpu_elementwise in turns; nothing for what is no lookup by indices."""
    sizes, gpu = gather_of(space), arch.the_gpu
    if sizes is None or not takes(sizes):
        return ()
    own = ranked("gpu_gather_rows", gpu, ((params._asdict(), (_work(sizes, params, gpu),)) for params in _choices(sizes, gpu)), top_k)
    return tuple(interleaved(own, gpu_elementwise.propose(space, arch, top_k)))[:top_k] if own else ()


def _choices(sizes: GatherSizes, gpu: Gpu) -> Iterator[GatherRowsParams]:
    """Yield the search space: warps with a piece each, or several short slices; prefetches where all blocks start at once."""
    lanes = min(WARP_LANES, 1 << (sizes.vectors - 1).bit_length())
    for threads, unroll, ahead in itertools.product(THREADS, UNROLL, (1, 0)):
        params = GatherRowsParams(threads, lanes, unroll, ahead)
        idle = params.pieces(sizes) * lanes * unroll / sizes.vectors
        # The fewest threads for a slice idle where it is short.
        if not params.fits(sizes, gpu) or (idle > MOST_IDLE and unroll > 1):
            continue
        if not ahead or waves(gpu, _work(sizes, params, gpu)) <= 1:
            yield params


def _work(sizes: GatherSizes, params: GatherRowsParams, gpu: Gpu) -> Work:
    vectors = sizes.outer * sizes.indices * params.pieces(sizes) * params.lanes * params.unroll
    has_few_indices = sizes.indices * dtype_bytes(sizes.index_dtype) <= SHARED_BYTES
    return Work(
        blocks=params.blocks(sizes),
        threads=params.threads,
        regs_per_thread=OTHER_REGISTERS + params.unroll * -(-sizes.access_bytes // 4),
        flops=vectors * ACCESS_FLOPS,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=sizes.nbytes,
        l2_bytes=sizes.nbytes * (VECTOR_BYTES / sizes.access_bytes) ** 0.5,
        rounds=AHEAD_ROUNDS if params.ahead else ROUNDS,
        serial_cycles=VECTOR_CYCLES * params.unroll,
        shared_loads=(1 + params.ahead) * has_few_indices,
    )
