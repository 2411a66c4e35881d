"""Owns how many threads and how many sorted elements a GPU should take for the first elements of a row, and what to try first.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.row_sort import MAX_ENTRIES, GpuTopParams, TopSizes, takes, top_of
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.time_model import Work, ranked

TEMPLATES = ("gpu_topk",)
AUTO = {"cuda": 53}
HAS_TRACES = False

THREADS = (128, 256, 512, 1024, 64, 32)
SPARE = 4
"""Sorted elements for each result, where a row has more: those that reach the bound are few more than the results."""
REGISTERS = 40
WORD_OPERATIONS = 6.0
"""Operations in which an element becomes a word and is compared."""
BOUND_CYCLES = 16 * 40.0
"""Cycles in which a thread block finds its bound: about 16 bits of it, a barrier each."""
PAIR_CYCLES, STAGE_CYCLES = 12.0, 30.0
"""Cycles in which a thread sorts a pair, and in which a stage of the sort waits."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time; nothing for what does not sort rows."""
    sizes, gpu = top_of(space), arch.the_gpu
    if sizes is None or not takes(sizes):
        return ()
    fitting = (params for params in dict.fromkeys(_choices(sizes)) if params.fits(sizes, gpu))
    return ranked("gpu_topk", gpu, ((params._asdict(), (_work(sizes, params, gpu),)) for params in fitting), top_k)


def _choices(sizes: TopSizes) -> Iterator[GpuTopParams]:
    """Yield the search space; some of it may not fit."""
    whole = 1 << max(5, (sizes.extent - 1).bit_length())
    few = min(MAX_ENTRIES, max(sizes.entry_count, 1 << (SPARE * sizes.results - 1).bit_length(), 256))
    for threads in THREADS:
        if whole <= MAX_ENTRIES and threads <= whole:
            yield GpuTopParams(threads, whole, 0)
        for entries, kept in itertools.product({few, min(MAX_ENTRIES, 4 * few)}, (1, 0)):
            if entries < sizes.extent and threads <= sizes.extent:
                yield GpuTopParams(threads, entries, kept)


def _work(sizes: TopSizes, params: GpuTopParams, gpu: Gpu) -> Work:
    item, width = dtype_bytes(sizes.dtype), params.width(sizes)
    nbytes = sizes.rows * sizes.extent * item
    is_whole = params.entries >= sizes.extent
    # A bound is known only of as many elements as there are threads; beyond, it is searched in some fifty passes.
    searched = not is_whole and sizes.results > min(params.threads, sizes.extent // width)
    passes = 1 if is_whole else 50 if searched else 2
    vectors = -(-sizes.extent // (width * params.threads))
    sorted_count = sizes.extent if is_whole else min(params.entries, 2 * sizes.results)
    steps = max(1, math.ceil(math.log2(max(2, sorted_count))))
    stages = steps * (steps + 1) / 2
    pairs = max(1.0, 2 ** (steps - 1) / params.threads)
    return Work(
        blocks=sizes.rows,
        threads=params.threads,
        regs_per_thread=REGISTERS,
        smem_bytes=params.smem_bytes(sizes),
        flops=sizes.rows * sizes.extent * WORD_OPERATIONS * passes,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=nbytes + sizes.rows * sizes.results * (item + 8),
        l2_bytes=nbytes * (1 if params.kept else passes),
        moved_smem_bytes=nbytes * (passes if params.kept else 0) + sizes.rows * stages * 2 ** (steps - 1) * 32,
        rounds=-(-vectors // 4) * (1 if params.kept else passes),
        barriers=3,
        serial_cycles=stages * (STAGE_CYCLES + pairs * PAIR_CYCLES) + (0.0 if is_whole else BOUND_CYCLES),
    )
