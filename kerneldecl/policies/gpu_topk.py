"""Owns how many threads and how many sorted elements a GPU should take for the first elements of a row, and what to try first.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.row_sort import MAX_ENTRIES, GpuSortParams, GpuTopParams, TopSizes, takes, top_of
from kerneldecl.analysis.top_vectors import has_ends, top_width
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.gpu.time_model import Work, ranked
from kerneldecl.policies.gpu_split_rows import ENDS_CYCLES

TEMPLATES = ("gpu_topk", "gpu_sort")
AUTO = {"cuda": 53}
HAS_TRACES = False

THREADS = (128, 256, 512, 1024, 64, 32)
SPARE = 4
"""Sorted elements for each result, where a row has more: those that reach the bound are few more than the results."""
ITEMS = (16, 8, 32, 4, 2, 1)
REGISTERS = 40
SORT_REGISTERS = 8
"""Registers of a thread that sorts in registers besides 1.75 times its entries: as nvcc 13.0 gives them for 4 to 32 entries of 64 bits."""
RIVAL_SLOWDOWN = 5.0
"""How much slower than the best of the other template may candidates be predicted, and still be tried."""
WORD_OPERATIONS = 6.0
"""Operations in which an element becomes a word and is compared."""
BOUND_CYCLES = 16 * 40.0
"""Cycles in which a thread block finds its bound: about 16 bits of it, a barrier each."""
PAIR_CYCLES, STAGE_CYCLES = 12.0, 30.0
"""Cycles in which a thread sorts a pair, and in which a stage of the sort waits."""
PAIR_INSTRUCTIONS, KEPT_INSTRUCTIONS = {4: 2.0, 8: 6.0}, {4: 3.0, 8: 5.0}
"""Instructions that order a pair of entries of a thread, and that keep one of two which threads exchange, by the bytes of an entry."""
INSTRUCTION_FLOPS = 4.0
"""Cost of an instruction of integers in operations: half as many run at once as multiply-adds."""
SHUFFLE_CYCLES, EXCHANGE_CYCLES = 40.0, 150.0
"""Cycles in which a thread exchanges its entries with one of its warp, and with another through shared memory, besides the accesses."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time; nothing for what does not sort rows."""
    sizes, gpu = top_of(space), arch.the_gpu
    if sizes is None or not takes(sizes):
        return ()
    fitting = (params for params in dict.fromkeys(_choices(sizes)) if params.fits(sizes, gpu))
    chosen = ranked("gpu_topk", gpu, ((params._asdict(), (_work(sizes, params, gpu),)) for params in fitting), top_k)
    kept = (params for params in itertools.starmap(GpuSortParams, itertools.product(THREADS, ITEMS)) if params.fits(sizes, gpu))
    rows = ((params._asdict(), (_sort_work(sizes, params, gpu),)) for params in kept if params.entries < 2 * max(sizes.extent, WARP_LANES))
    found = sorted(filter(None, (chosen, ranked("gpu_sort", gpu, rows, top_k))), key=lambda proposals: proposals[0].predicted_secs)
    if len(found) < 2:
        return chosen
    first, second = found
    rivals = [proposal for proposal in second if proposal.predicted_secs <= RIVAL_SLOWDOWN * first[0].predicted_secs]
    return tuple(interleaved(first, rivals))[:top_k]


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
    item, width = dtype_bytes(sizes.dtype), top_width(sizes, params)
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
        serial_cycles=stages * (STAGE_CYCLES + pairs * PAIR_CYCLES)
        + (0.0 if is_whole else BOUND_CYCLES)
        + (passes * ENDS_CYCLES if has_ends(sizes) else 0.0),
    )


def _sort_work(sizes: TopSizes, params: GpuSortParams, gpu: Gpu) -> Work:
    """Return the work of rows that are sorted in registers, stage by stage of the bitonic sort."""
    item, entry = dtype_bytes(sizes.dtype), params.entry_bytes(sizes)
    own, lanes, threads = (each.bit_length() - 1 for each in (params.items, WARP_LANES, params.threads))
    merges = range(1, own + threads + 1)
    inside = sum(min(merge, own) for merge in merges)
    shuffled = sum(min(max(merge - own, 0), lanes) for merge in merges)
    # A merge of several warps begins with a mirrored exchange, which is one of these.
    exchanged = sum(max(merge - own - lanes, 0) for merge in merges)
    instructions = params.items * (
        inside * PAIR_INSTRUCTIONS[entry] / 2 + (shuffled + exchanged) * KEPT_INSTRUCTIONS[entry] + WORD_OPERATIONS + 10
    )
    moved = params.items * entry * (shuffled + 2 * exchanged + 2)
    return Work(
        blocks=sizes.rows,
        threads=params.threads,
        regs_per_thread=SORT_REGISTERS + params.items * entry * 7 // 16,
        smem_bytes=params.smem_entries * entry,
        flops=sizes.rows * params.threads * instructions * INSTRUCTION_FLOPS,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=sizes.rows * (sizes.extent * item + sizes.results * (item + 8)),
        l2_bytes=sizes.rows * (sizes.extent + sizes.results) * 32 / 8,
        moved_smem_bytes=sizes.rows * params.threads * moved,
        rounds=2,
        serial_cycles=instructions * 2 + shuffled * SHUFFLE_CYCLES + exchanged * EXCHANGE_CYCLES,
    )
