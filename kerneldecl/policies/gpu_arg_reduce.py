"""Owns among how many threads and thread blocks a row or column should be shared whose extreme element is looked for on a GPU.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.arg_reduce import ArgReduceParams, ArgSizes, arg_sizes_of, takes
from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies import gpu_rowwise
from kerneldecl.policies.gpu import arg_columns
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, WARP_CYCLES, Timed, Work, access_widths, ranked
from kerneldecl.policies.gpu_rowwise import INSTRUCTION_CYCLES, OTHER_REGISTERS, SHUFFLE_CYCLES

TEMPLATES = ("gpu_arg_reduce", "gpu_arg_columns", "gpu_rowwise")
AUTO = {"cuda": 56}
HAS_TRACES = False

THREADS = (128, 256, 64, 512, 32, 1024)
UNROLL = (4, 8, 2, 1)
PARTS = (1, 2, 4, 8, 16, 32)
MOST_WAVES = 16
"""Thread blocks of a row's parts for each SM at most."""
ELEMENT_FLOPS = 8.0
"""Cost of an element in operations: converted, compared, looked at whether it is a number, and its share of a vector's comparison."""
SHUFFLES = 20
"""Shuffles of a warp: five of two words, before the exchange through shared memory and after it."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return how to share columns; or rows, and the best of gpu_rowwise in turns; nothing for what looks for no extreme elements."""
    sizes = arg_sizes_of(space)
    if sizes is None or not takes(sizes):
        return ()
    if sizes.inner > 1:
        return ranked("gpu_arg_columns", arch.the_gpu, arg_columns.timed(sizes, arch.the_gpu), top_k)
    own = ranked("gpu_arg_reduce", arch.the_gpu, _timed(sizes, arch.the_gpu), top_k)
    rivals = gpu_rowwise.propose(space, arch, top_k)
    found = sorted(filter(None, (own, rivals)), key=lambda proposals: min(proposal.predicted_secs for proposal in proposals))
    return tuple(interleaved(*found))[:top_k] if own and rivals else own


def _timed(sizes: ArgSizes, gpu: Gpu) -> Iterator[Timed]:
    for width in access_widths(sizes.extent, dtype_bytes(sizes.dtype)):
        for threads, unroll, parts in itertools.product(THREADS, UNROLL, PARTS):
            params = ArgReduceParams(threads, width, unroll, parts)
            is_idle = threads * unroll >= 2 * params.vectors(sizes) and (threads, unroll) != (WARP_LANES, 1)
            if params.fits(sizes, gpu) and not is_idle and (parts == 1 or sizes.outer * parts <= MOST_WAVES * gpu.sm_count):
                yield params._asdict(), _works(sizes, params, gpu)


def _works(sizes: ArgSizes, params: ArgReduceParams, gpu: Gpu) -> tuple[Work, ...]:
    """Return the work of the kernel that reads rows, and of the one that chooses among parts."""
    item, elements = dtype_bytes(sizes.dtype), sizes.elements
    turns = math.ceil(params.vectors(sizes) / (params.threads * params.unroll))
    waste = turns * params.threads * params.unroll / params.vectors(sizes)
    reading = Work(
        blocks=sizes.outer * params.parts,
        threads=params.threads,
        regs_per_thread=OTHER_REGISTERS + params.unroll * -(-params.width * item // 4),
        flops=elements * (ELEMENT_FLOPS + ACCESS_FLOPS / params.width) * waste,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=elements * item,
        l2_bytes=elements * item,
        # A whole row's first thread reads the vector again that it has chosen, from L2.
        rounds=turns + (0.5 if params.parts == 1 else 0),
        barriers=int(params.threads > WARP_LANES),
        serial_cycles=turns * params.unroll * params.width * INSTRUCTION_CYCLES + SHUFFLES * SHUFFLE_CYCLES,
        warp_cycles=WARP_CYCLES,
    )
    if params.parts == 1:
        return (reading,)
    return reading, Work(blocks=sizes.outer, threads=WARP_LANES, dram_bytes=sizes.outer * params.parts * 8.0, rounds=1.5)
