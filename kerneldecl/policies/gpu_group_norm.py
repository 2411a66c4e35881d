"""Owns among how many threads and thread blocks a group norm should be shared on a GPU, in one kernel or two, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.group_norm import STATISTICS, GpuGroupNormParams, GroupNormSizes, group_norm_of, takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, LINE_BYTES, Timed, Work, access_widths, ranked, rounds

TEMPLATES = ("gpu_group_norm",)
AUTO = {"cuda": 55}
HAS_TRACES = False

BLOCK_THREADS = (512, 256, 1024, 128)
MOST_COLUMNS = 512
"""Threads of a row where channels are last."""
STEPS = (1, 2, 4, 6, 8, 12, 16, 32)
"""Steps of a thread where several thread blocks share groups."""
UNROLL = (4, 8)
OTHER_REGISTERS = 30
"""Registers of a thread besides loaded elements and its channels' sums. With 32 loaded float16 and 8 channels, nvcc takes 51 for the
sums and 76 for the normalisation (sm_90)."""
SUM_FLOPS, RESULT_FLOPS = 8.0, 18.0
"""Cost of an element in operations, two for an instruction: convert, subtract, add, multiply-add; those, and silu, convert."""

SUM_CYCLES = 6.0
"""Cycles in which a thread adds one number from shared memory to a sum, one after another."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, one kernel and two in turns; nothing for what is no group norm."""
    sizes, gpu = group_norm_of(space), arch.the_gpu
    if sizes is None or not takes(sizes):
        return ()
    fitting = [params for params in dict.fromkeys(_choices(sizes)) if params.fits(sizes, gpu)]
    kinds = [[params for params in fitting if (params.chunks == 1) is is_one] for is_one in (True, False)]
    found = [ranked("gpu_group_norm", gpu, (_timed(sizes, params, gpu) for params in kind), top_k) for kind in kinds]
    found.sort(key=lambda proposals: proposals[0].predicted_secs if proposals else float("inf"))
    # The model may be wrong about which is faster.
    return tuple(each for pair in itertools.zip_longest(*found) for each in pair if each is not None)[:top_k]


def _choices(sizes: GroupNormSizes) -> Iterator[GpuGroupNormParams]:
    """Yield the search space; some of it may not fit."""
    for width, threads in itertools.product(access_widths(sizes.most_width, dtype_bytes(sizes.dtype)), BLOCK_THREADS):
        for columns in _columns(sizes, width, threads):
            rows = max(1, threads // columns) if sizes.is_channels_last else 1
            one = GpuGroupNormParams(width, columns, min(rows, sizes.pixels), 1, 1)
            all_steps = one.steps(sizes)
            for steps in {min(steps, all_steps) for steps in (*STEPS, all_steps)}:
                chunks = -(-one.vectors(sizes) // (steps * one.rows))
                for unroll in {min(unroll, steps) for unroll in UNROLL}:
                    yield one._replace(chunks=chunks, unroll=unroll)


def _columns(sizes: GroupNormSizes, width: int, threads: int) -> list[int]:
    """Return how many threads may stand beside one another: those of whole groups' channels, or all of a thread block."""
    if not sizes.is_channels_last:
        return [threads]
    divisors = [groups for groups in range(1, sizes.groups + 1) if sizes.groups % groups == 0 and groups * sizes.size % width == 0]
    return [columns for groups in divisors if (columns := groups * sizes.size // width) <= min(threads, MOST_COLUMNS)]


def _timed(sizes: GroupNormSizes, params: GpuGroupNormParams, gpu: Gpu) -> Timed:
    return params._asdict(), _works(sizes, params, gpu)


def _works(sizes: GroupNormSizes, params: GpuGroupNormParams, gpu: Gpu) -> tuple[Work, ...]:
    """Return the work of one kernel, or of the sums and the normalisation."""
    element = dtype_bytes(sizes.dtype)
    nbytes, steps = sizes.elements * element, params.steps(sizes)
    waste = params.chunks * steps * params.rows / params.vectors(sizes) * params.threads / (params.columns * params.rows)
    lines = max(1.0, LINE_BYTES / (params.columns * params.width * element))
    loaded = rounds(steps * params.width * element)
    kept = params.width if sizes.is_channels_last else 1
    base = Work(
        blocks=params.units(sizes) * params.chunks,
        threads=params.threads,
        regs_per_thread=OTHER_REGISTERS + params.unroll * -(-params.width * element // 4) + 4 * kept,
        smem_bytes=params.smem_bytes(sizes),
        flops_per_s=gpu.simt_rate("float32"),
        serial_cycles=SUM_CYCLES * (params.rows + params.chunks / params.parts(sizes)),
    )
    access = ACCESS_FLOPS / params.width
    if params.chunks == 1:
        passes = 1 if steps <= params.unroll else 2
        return (
            base._replace(
                flops=sizes.elements * (SUM_FLOPS + RESULT_FLOPS + access * (passes + 1)) * waste,
                dram_bytes=2 * nbytes,
                l2_bytes=nbytes * (passes + 1) * lines,
                rounds=loaded * passes,
                barriers=5,
            ),
        )
    sums_bytes = base.blocks * params.chunks * STATISTICS * params.block_groups(sizes) * 4
    sums = base._replace(
        flops=sizes.elements * (SUM_FLOPS + access) * waste,
        dram_bytes=nbytes,
        l2_bytes=nbytes * lines,
        rounds=loaded,
        barriers=3,
    )
    # What fits in L2 is there after the first kernel.
    again = nbytes if nbytes > gpu.l2_bytes / 2 else 0
    normalised = base._replace(
        flops=sizes.elements * (RESULT_FLOPS + 2 * access) * waste,
        dram_bytes=nbytes + again,
        l2_bytes=2 * nbytes * lines + sums_bytes,
        rounds=loaded,
        barriers=4,
    )
    return sums, normalised
