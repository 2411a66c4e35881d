"""Owns among how many threads and thread blocks a row or column should be shared whose extreme element is looked for on a GPU.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from kerneldecl.analysis.arg_reduce import ArgReduceParams, ArgSizes, arg_sizes_of, takes
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
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
ROWS = (1, 4, 8, 2, 16)
MOST_WAVES = 16
"""Thread blocks of a row's parts for each SM at most."""
ELEMENT_FLOPS = 8.0
"""Cost of an element in operations: converted, compared, looked at whether it is a number, and its share of a vector's comparison."""
KEPT_COST = 0.0185
"""How much longer than predicted `gpu_rowwise` takes for each element that a thread keeps, where a warp or less has a row, as it
compares places as well: 8192 rows of 1000 float16 took 7.5 us by 32 threads each and 10.2 by 16, where 4.8 and 4.5 were predicted (H200,
2026-11)."""
WARP_REGISTERS, NARROW_WARP_REGISTERS = 32, 40
"""Registers of a thread whose warp has a row, with vectors of 16 bytes and narrower ones: nvcc 13.0 takes 30 to 32 and 34 to 38."""
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
    rivals = sorted(_rowwise(space, sizes, arch, top_k), key=lambda proposal: proposal.predicted_secs)
    found = sorted(filter(None, (own, rivals)), key=lambda proposals: min(proposal.predicted_secs for proposal in proposals))
    return tuple(interleaved(*found))[:top_k] if own and rivals else own


def _rowwise(space: IterSpace, sizes: ArgSizes, arch: Arch, top_k: int) -> Iterator[Proposal]:
    """Yield the proposals of gpu_rowwise with what the comparison of places costs them."""
    for proposal in gpu_rowwise.propose(space, arch, top_k):
        threads = dict(proposal.candidate.params)["threads"]
        assert isinstance(threads, int)
        kept = -(-sizes.extent // threads) if threads <= WARP_LANES else 0
        yield replace(proposal, predicted_secs=(1 + KEPT_COST * kept) * proposal.predicted_secs)


def _timed(sizes: ArgSizes, gpu: Gpu) -> Iterator[Timed]:
    for width in access_widths(sizes.extent, dtype_bytes(sizes.dtype)):
        for threads, unroll, parts, rows in itertools.product(THREADS, UNROLL, PARTS, ROWS):
            params = ArgReduceParams(threads, width, unroll, parts, rows)
            is_idle = threads * unroll >= 2 * params.vectors(sizes) and (threads, unroll) != (WARP_LANES, 1)
            if params.fits(sizes, gpu) and not is_idle and (parts == 1 or sizes.outer * parts <= MOST_WAVES * gpu.sm_count):
                named = {name: value for name, value in params._asdict().items() if name != "rows" or value > 1}
                yield named, _works(sizes, params, gpu)


def _registers(params: ArgReduceParams, item: int) -> int:
    """Return the registers of a thread."""
    if params.rows > 1:
        return WARP_REGISTERS if params.width * item == VECTOR_BYTES else NARROW_WARP_REGISTERS
    return OTHER_REGISTERS + params.unroll * -(-params.width * item // 4)


def _works(sizes: ArgSizes, params: ArgReduceParams, gpu: Gpu) -> tuple[Work, ...]:
    """Return the work of the kernel that reads rows, and of the one that chooses among parts."""
    item, elements = dtype_bytes(sizes.dtype), sizes.elements
    turns = math.ceil(params.vectors(sizes) / (params.threads * params.unroll))
    waste = turns * params.threads * params.unroll / params.vectors(sizes)
    reading = Work(
        blocks=-(-sizes.outer // params.rows) * params.parts,
        threads=params.threads * params.rows,
        regs_per_thread=_registers(params, item),
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
