"""Owns the time model of an NVIDIA GPU: the slowest of compute, each memory and latency, over occupancy and waves.

Knows nothing of operators, templates or TVM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import FIRST_PDL_CAPABILITY, SM_PARTITIONS, VECTOR_BYTES
from kerneldecl.model import Candidate, Gpu, Proposal, Value

DRAM_LATENCY_SECS = 7e-7
"""Seconds of a load that misses all caches while many others do, too: about 1.5 times the idle latency that microbenchmarks
publish (Jia et al., Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking, 2018, section 3)."""
WARP_CYCLES = 20.0
"""Cycles in which an SM starts one warp that reduces rows, warps one after another: kernels of few microseconds that fill it with threads
wait for that. Fitted to GEMVs of 1024 x 1024 on an H200; kernels without reductions start faster."""
PDL_LAUNCH_SECS = 4e-7
"""Seconds to launch a kernel by programmatic dependent launch, while the preceding kernel ends. Nine kernels of 0.8 to 3 us on an H200 take
0.9 to 1.1 us less than with a whole launch; behind a foreign kernel, 0.5 to 0.9 us more than behind themselves, whatever the candidate."""
BLOCK_CYCLES = 15.0
"""Cycles in which an SM starts a block, blocks one after another: sums of 16384 rows by 31 and by 4 blocks an SM, and GEMVs of 1024 x 1024,
on an H200."""
BLOCK_LAUNCH_SECS = 1.21e-9
"""Least seconds from the start of a block to that of the next one, wherever on the GPU: kernels of 8000 to 600000 blocks of 5 to 256
threads, of six templates, took 1.21 to 1.27 ns a block (40 candidates of 14 operators on an H200, 2026-11)."""
BARRIER_SECS = 3e-8
"""Seconds in which a block's threads meet and read what the others left in shared memory: some 50 cycles."""
COMBINE_SECS = 1.1e-7
"""Seconds in which a block's threads combine their partial results: shuffles within warps, a barrier, and again. Measured on an H200."""
DRAM_SHARE = 0.92
"""Fraction of the data sheet's bandwidth that copies and additions reach: 4.41 of 4.8 TB/s on an H200."""
OVERLAP = 3.5
"""Exponent of the p-norm of times that overlap: 1 would be no overlap, infinity a perfect one. Fitted to all memory-bound kernels on an
H200."""
FEW_TURNS = 4
"""Turns of an SM's blocks up to which the last one counts as whole: a few blocks that are left take as long as all. Fitted to 190 operators
on an H200 (2026-11)."""
EXPOSED, EXPOSED_POWER = 0.6, 2.0
"""Part of the shorter of latency and throughput's time that an SM's only block does not overlap, since it loads, computes and stores in
turn; and the power of an SM's blocks by which that is less. Fitted to 190 operators on an H200 (2026-11)."""
CHAIN_CYCLES = 3.5
"""Cycles from one instruction of a warp to its next, where most wait for the one before. Fitted to 198 tilings of GEMMs with scaled values,
in which a scheduler with one warp takes as long as one with two (H200, 2026-11)."""
INTEGERS_PER_CYCLE = 64.0
"""Integer and conversion instructions of lanes that an SM does in a cycle; of multiply-adds of float32 twice as many (CUDA C++ Programming
Guide, throughput of native arithmetic instructions, compute capabilities 8.x and 9.0)."""
SM_BYTES_PER_CLOCK = 64.0
"""Bytes that one SM can draw from L2 in a cycle."""
THREAD_BYTES = 64
"""Bytes that a thread has in flight at once, as nvcc orders loads: measured with sums of columns on an H200."""
SHARED_LOAD_SECS, SHARED_BYTES = 3e-10, 1 << 14
"""Seconds for each load of a warp from an operand of so many bytes at most that all blocks read, by all warps that start together: until
lines have come to each L1, all ask L2 for the same few. Batch norms of 253 to 8448 warps with 4 to 16 such loads took 0.27 to 0.35 ns
a load, whatever the width (H200, 2026-11)."""
THREAD_LOADS = 16
"""Loads that a thread has in flight at once, however narrow: nvcc 13.0 orders unrolled loops so, in the SASS of 35 sums and GEMVs."""
RESOLVED_LOADS = 24
"""Loads of a thread up to which nvcc 13.0 finds at compile time which of them bounds can exclude. Of more, each unrolled turn of a loop
with bounds is a branch that no load crosses: 47 loads of 2 bytes in 12 turns took 12 latencies, 24 took two."""
ACCESS_FLOPS = 4.0
"""Operations that an access costs a thread besides the latency: it and its address are two instructions, each as long as a multiply-add."""
FAST_MATH_BYTES = 2
"""Bytes of an element up to which nvcc gets fast math, where all arguments have no more."""
SAME_WIDTH = 12
"""Candidates of one vector width that come before all others: the model may be wrong about what an access costs."""
PREFETCHED_BYTES = 64 * 1024
"""Bytes that the blocks of an SM prefetch before they wait for the preceding kernel, as `compiler/passes/l2_prefetch.py` has them."""
PREFETCHED_ROUND = 0.7
"""Part of DRAM's latency that a thread does not wait whose loads are all prefetched so. Of sums of rows of 7 to 2624 elements, blocks of
whole rows whose first loads have no bounds took 0.2 to 0.5 us less than others (four operators of three seeds, H200, 2026-11)."""
LINE_BYTES = 128
"""Bytes that neighbouring threads should read together: a line of the caches, and as much of a DRAM row as is worth opening it."""
SMEM_LOAD_CYCLES = 1.2
"""Cycles of a scheduler for a 16-byte load of a warp from shared memory. Fitted to the times of 320 SIMT GEMMs on an H200."""


class Work(NamedTuple):
    """What all thread blocks of one kernel do, and what each of them takes of an SM."""

    blocks: int
    threads: int
    """Threads of one block."""
    regs_per_thread: int = 32
    smem_bytes: int = 0
    """Shared memory of one block."""
    flops: float = 0.0
    flops_per_s: float = 1.0
    """Rate of the whole GPU, for the unit and the dtype that compute."""
    dram_bytes: float = 0.0
    l2_bytes: float = 0.0
    """Bytes moved between L2 and all SMs."""
    moved_smem_bytes: float = 0.0
    """Bytes moved between shared memory and registers."""
    rounds: float = 1.0
    """How often one thread waits for memory: loads that are in flight together count once."""
    barriers: int = 0
    """How often the threads of one block wait for one another."""
    serial_cycles: float = 0.0
    """Cycles of instructions of one thread that depend on one another."""
    thread_instructions: float = 0.0
    """Instructions of a thread between its loads and its stores: threads that start together have them together, and no loads meanwhile."""
    warp_cycles: float = 0.0
    """Cycles in which an SM starts one warp."""
    shared_loads: int = 0
    """Loads of one thread from small operands that all blocks read."""
    ends_together: bool = True
    """Whether an SM's blocks end together, so that few of them that are left take as long as all: not where threads only load and store."""


def occupancy(gpu: Gpu, threads: int, regs_per_thread: int, smem_bytes: int) -> int:
    """Return how many blocks an SM holds at once, 0 where it cannot hold one.

    Warps get registers in units, from one of the SM's partitions; each block's shared memory includes what the system reserves. Both
    follow NVIDIA's occupancy calculator.
    """
    warps = -(-threads // gpu.warp_size)
    warp_registers = -(-regs_per_thread * gpu.warp_size // gpu.register_allocation_unit) * gpu.register_allocation_unit
    if threads > gpu.max_threads_per_block or smem_bytes > gpu.smem_per_block_optin_bytes:
        return 0
    if regs_per_thread > gpu.max_registers_per_thread or warps * warp_registers > gpu.registers_per_block:
        return 0
    by_registers = gpu.registers_per_sm // warp_registers // SM_PARTITIONS * SM_PARTITIONS // warps
    by_smem = gpu.smem_per_sm_bytes // (smem_bytes + gpu.smem_reserved_per_block_bytes) if smem_bytes else gpu.max_blocks_per_sm
    return min(gpu.max_blocks_per_sm, gpu.max_threads_per_sm // (warps * gpu.warp_size), by_registers, by_smem)


def waves(gpu: Gpu, work: Work) -> float:
    """Return how often the whole GPU is filled with the kernel's blocks; infinite where not even one fits."""
    resident = occupancy(gpu, work.threads, work.regs_per_thread, work.smem_bytes)
    return work.blocks / (resident * gpu.sm_count) if resident else math.inf


def busiest_share(gpu: Gpu, work: Work) -> float:
    """Return how much longer the busiest SM works than an average one: the last wave of blocks may leave SMs idle."""
    return -(-work.blocks // gpu.sm_count) * gpu.sm_count / work.blocks


def predicted_secs(gpu: Gpu, work: Work) -> float:
    """Return the largest of compute, shared memory, L2, DRAM and latency times, plus the launch; infinite if no SM holds a block.

    The roofline model (Williams, Waterman, Patterson, CACM 2009, section 3) with one roof for each memory. Compute,
    shared memory and an SM's bandwidth from L2 belong to an SM, so the busiest SM decides; L2 and DRAM belong to all of them.
    Latency follows from Little's law: what a wave of blocks cannot have in flight at once, it waits for in turn.
    """
    filled = waves(gpu, work)
    if math.isinf(filled):
        return math.inf
    latency = max(1.0, filled) * (work.rounds * DRAM_LATENCY_SECS + work.barriers * BARRIER_SECS)
    started = work.blocks * BLOCK_LAUNCH_SECS
    return max(*_throughput_secs(gpu, work), work.dram_bytes / gpu.dram_bytes_per_s, latency, started) + gpu.launch_secs


def streamed_secs(gpu: Gpu, work: Work) -> float:
    """Return the time of a kernel that memory limits: a p-norm of `predicted_secs`'s times, not the largest of them.

    What is nearly as slow as the slowest shows in such kernels, so that among those that fill the memory's bandwidth the one wins
    that has more to spare.
    """
    resident = occupancy(gpu, work.threads, work.regs_per_thread, work.smem_bytes)
    if not resident:
        return math.inf
    blocks_per_sm = -(-work.blocks // gpu.sm_count)
    turns = max(1.0, blocks_per_sm / resident)
    turns = math.ceil(turns) if turns < FEW_TURNS and work.ends_together else turns
    serial_secs = work.serial_cycles / gpu.clock_hz
    # Later blocks start while others work.
    start_cycles = work.warp_cycles * min(blocks_per_sm, resident) * -(-work.threads // gpu.warp_size) + BLOCK_CYCLES * blocks_per_sm
    start_secs = start_cycles / gpu.clock_hz
    shared_secs = work.shared_loads * min(work.blocks, resident * gpu.sm_count) * -(-work.threads // gpu.warp_size) * SHARED_LOAD_SECS
    latency = start_secs + shared_secs + turns * (work.rounds * DRAM_LATENCY_SECS + work.barriers * COMBINE_SECS + serial_secs)
    times = (*_throughput_secs(gpu, work), work.dram_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE))
    exposed = EXPOSED * min(latency, max(times)) / math.pow(min(resident, blocks_per_sm), EXPOSED_POWER)
    exposed += work.thread_instructions * CHAIN_CYCLES / gpu.clock_hz / max(1.0, blocks_per_sm / resident)
    return max(p_norm(*times, latency, exponent=OVERLAP) + exposed, work.blocks * BLOCK_LAUNCH_SECS) + launch_secs(gpu)


def launch_secs(gpu: Gpu) -> float:
    """Return what a launch takes behind a kernel that lets the next one start early, where GPUs have that."""
    return PDL_LAUNCH_SECS if gpu.compute_capability >= FIRST_PDL_CAPABILITY else gpu.launch_secs


def p_norm(*secs: float, exponent: float) -> float:
    """Return the time of activities that overlap: hardly more than the longest alone, unless others are as long."""
    return float(sum([each**exponent for each in secs]) ** (1 / exponent))


def warp_fma_cycles(gpu: Gpu, dtype: str) -> float:
    """Return the cycles that a multiply-add of a whole warp keeps a partition's CUDA cores busy."""
    rate = gpu.simt_rate(dtype) or gpu.simt_rate("float32")
    return 2.0 * gpu.warp_size * SM_PARTITIONS * gpu.sm_count * gpu.clock_hz / rate


def _throughput_secs(gpu: Gpu, work: Work) -> tuple[float, float, float, float]:
    """Return the times of compute, of shared memory, of an SM's bandwidth from L2 and of L2."""
    share = busiest_share(gpu, work)
    sm_bytes_per_s = gpu.sm_count * gpu.clock_hz
    return (
        work.flops * share / work.flops_per_s,
        work.moved_smem_bytes * share / (sm_bytes_per_s * gpu.smem_bytes_per_clock_per_sm),
        work.l2_bytes * share / (sm_bytes_per_s * SM_BYTES_PER_CLOCK),
        work.l2_bytes / gpu.l2_bytes_per_s,
    )


def access_widths(extent: int, element_bytes: int) -> list[int]:
    """Return how many neighbours a thread may access at once: divisors of the extent, powers of 2, at most 16 bytes; widest first.

    Half of the widest comes second: more threads may hide latency better.
    """
    width = math.gcd(extent, max(1, VECTOR_BYTES // element_bytes))
    return [width, width // 2] if width > 1 else [1]


def in_flight_bytes(nbytes: int) -> int:
    """Return how many of the bytes that a thread could load together are in flight at once: nvcc gives no more registers to that."""
    return min(nbytes, THREAD_BYTES)


def rounds(nbytes: int) -> int:
    """Return how often a thread that loads so many bytes waits for memory, however its loop is unrolled."""
    return max(1, -(-nbytes // THREAD_BYTES))


def load_rounds(loads: int, access_bytes: int, bounded_turns: int = 0) -> int:
    """Return how often a thread waits for memory that loads so many vectors of all its operands.

    `bounded_turns` are the turns of an unrolled loop that tests bounds, 0 where vectors divide evenly among threads and turns.
    """
    in_flight = max(1, -(-loads // THREAD_LOADS), rounds(loads * access_bytes))
    return max(in_flight, bounded_turns) if loads > RESOLVED_LOADS else in_flight


def prefetched_share(gpu: Gpu, blocks: int, threads: int, loads: int, access_bytes: int) -> float:
    """Return how many of a thread's loads without bounds are prefetched while the preceding kernel ends, by blocks that start at once.

    Nothing without programmatic dependent launch.
    """
    if gpu.compute_capability < FIRST_PDL_CAPABILITY or not loads:
        return 0.0
    resident = max(1, min(gpu.max_blocks_per_sm, gpu.max_threads_per_sm // threads))
    first = max(1, PREFETCHED_BYTES // (resident * threads) // access_bytes)
    return min(1.0, first / loads) * min(1.0, resident * gpu.sm_count / blocks)


def touched_share(piece_bytes: int) -> float:
    """Return how many bytes the lines have that neighbouring threads read together, for each byte that they need."""
    return (piece_bytes + LINE_BYTES - math.gcd(piece_bytes, LINE_BYTES)) / piece_bytes


Timed = tuple[Mapping[str, Value], tuple[Work, ...]]
"""Parameters of a template, and the work of each kernel that they lead to."""


def ranked(template: str, gpu: Gpu, timed: Iterable[Timed], top_k: int) -> tuple[Proposal, ...]:
    """Return distinct candidates that an SM can hold, least predicted time first, but those beyond `SAME_WIDTH` of one width last."""
    proposals: dict[Candidate, float] = {}
    for params, works in timed:
        secs = sum(streamed_secs(gpu, work) for work in works)
        if math.isfinite(secs):
            proposals.setdefault(Candidate.of(template, params), secs)
    order = sorted(proposals.items(), key=lambda item: (item[1], item[0].params))
    seen: Counter[Value] = Counter()
    first: list[Proposal] = []
    later: list[Proposal] = []
    for candidate, secs in order:
        width = dict(candidate.params).get("width", 1)
        seen[width] += 1
        (first if seen[width] <= SAME_WIDTH else later).append(Proposal(candidate, secs))
        if len(first) == top_k:
            break
    return tuple([*first, *later][:top_k])
