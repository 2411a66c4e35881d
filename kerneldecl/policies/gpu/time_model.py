"""Owns the time model of an NVIDIA GPU: the slowest of compute, each memory and latency, over occupancy and waves.

Knows nothing of operators, templates or TVM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kerneldecl.model import Candidate, Gpu, Proposal, Value

DRAM_LATENCY_SECS = 7e-7
"""Of a load that misses all caches while many others do, too: about 1.5 times the idle latency that microbenchmarks
publish (Jia et al., Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking, 2018, section 3)."""
WARP_CYCLES = 20.0
"""Of an SM to start a warp that reduces rows, one after the other: what kernels of few microseconds wait for that fill it with threads.
From the times of products of a matrix of 1024 x 1024 and a vector on an H200; kernels without reductions start faster."""
BARRIER_SECS = 3e-8
"""Of a block's threads to meet and read what the others left in shared memory: some 50 cycles."""
COMBINE_SECS = 1.1e-7
"""Of a block's threads to combine what each of them has: exchanges within warps, a barrier, and again. Measured on an H200."""
DRAM_SHARE = 0.92
"""Of the bandwidth on the data sheet that copies and additions reach: 4.41 of 4.8 TB/s on an H200."""
OVERLAP = 3.5
"""How well times overlap: 1 would be not at all, infinity perfectly. Measured on an H200, over all kernels of this kind."""
SM_BYTES_PER_CLOCK = 64.0
"""What one SM can draw from the second-level cache."""
THREAD_BYTES = 64
"""What a thread has on its way at once, as nvcc orders loads: measured, sums of columns on an H200."""
ACCESS_FLOPS = 4.0
"""What an access costs a thread beside the waiting: it and its address are two instructions, each as long as a multiply-add."""
ONE_WIDTH = 12
"""So many candidates of one width come first: the model may be wrong about what an access costs."""
LINE_BYTES = 128
"""What neighbouring threads should read together: a line of the caches, and of DRAM as much as is worth a new row."""
WARP_GRANULARITY = 4
"""An SM has four partitions, and a warp's registers lie in one of them."""


class Work(NamedTuple):
    """What one kernel does, all blocks together, and what each of them takes of an SM."""

    blocks: int
    threads: int
    """Of one block."""
    regs_per_thread: int = 32
    smem_bytes: int = 0
    """Of one block."""
    flops: float = 0.0
    flops_per_s: float = 1.0
    """Of the whole GPU, for the unit and the dtype that compute."""
    dram_bytes: float = 0.0
    l2_bytes: float = 0.0
    """Moved between the second-level cache and all SMs."""
    moved_smem_bytes: float = 0.0
    """Moved between shared memory and registers."""
    rounds: float = 1.0
    """How often one thread waits for memory: loads that are in flight together count once."""
    barriers: int = 0
    """How often the threads of one block wait for one another."""
    serial_cycles: float = 0.0
    """Of what one thread computes on its own, each instruction after the one before."""
    warp_cycles: float = 0.0
    """Of an SM to start one warp."""


def occupancy(gpu: Gpu, threads: int, regs_per_thread: int, smem_bytes: int) -> int:
    """Return how many blocks an SM holds at once, 0 where it cannot hold one.

    Registers are given to warps in units, and shared memory to blocks with a share of the system's, as in NVIDIA's
    occupancy calculator.
    """
    warps = -(-threads // gpu.warp_size)
    warp_registers = -(-regs_per_thread * gpu.warp_size // gpu.register_allocation_unit) * gpu.register_allocation_unit
    if threads > gpu.max_threads_per_block or smem_bytes > gpu.smem_per_block_optin_bytes:
        return 0
    if regs_per_thread > gpu.max_registers_per_thread or warps * warp_registers > gpu.registers_per_block:
        return 0
    by_registers = gpu.registers_per_sm // warp_registers // WARP_GRANULARITY * WARP_GRANULARITY // warps
    by_smem = gpu.smem_per_sm_bytes // (smem_bytes + gpu.smem_reserved_per_block_bytes) if smem_bytes else gpu.max_blocks_per_sm
    return min(gpu.max_blocks_per_sm, gpu.max_threads_per_sm // (warps * gpu.warp_size), by_registers, by_smem)


def waves(gpu: Gpu, work: Work) -> float:
    """Return how often the whole GPU is filled with the kernel's blocks; infinite where not even one fits."""
    resident = occupancy(gpu, work.threads, work.regs_per_thread, work.smem_bytes)
    return work.blocks / (resident * gpu.sm_count) if resident else math.inf


def busiest_share(gpu: Gpu, work: Work) -> float:
    """Return how much longer the busiest SM works than an average one: blocks are dealt out whole, so the last wave is a part of one."""
    return -(-work.blocks // gpu.sm_count) * gpu.sm_count / work.blocks


def predicted_secs(gpu: Gpu, work: Work) -> float:
    """Return the largest of compute, shared memory, L2, DRAM and latency times, plus the launch; infinite if no SM holds a block.

    The roofline model (Williams, Waterman, Patterson, CACM 2009, section 3) with one roof for each memory. Compute,
    shared memory and the way to L2 belong to an SM, so the busiest SM decides; L2 and DRAM belong to all of them.
    Latency is Little's law read backwards: what a wave of blocks cannot have in flight at once, it waits for in turn.
    """
    filled = waves(gpu, work)
    if math.isinf(filled):
        return math.inf
    latency = max(1.0, filled) * (work.rounds * DRAM_LATENCY_SECS + work.barriers * BARRIER_SECS)
    return max(*_throughput_secs(gpu, work), work.dram_bytes / gpu.dram_bytes_per_s, latency) + gpu.launch_secs


def streamed_secs(gpu: Gpu, work: Work) -> float:
    """Return what `predicted_secs` is for, of a kernel that memory limits: there, what is nearly as slow as the slowest shows, too.

    Instead of the largest, a norm of the same times, so that of two ways to fill the memory's bandwidth the one wins
    that has more to spare.
    """
    resident = occupancy(gpu, work.threads, work.regs_per_thread, work.smem_bytes)
    if not resident:
        return math.inf
    share = -(-work.blocks // gpu.sm_count)
    turns = max(1.0, share / resident)
    serial_secs = work.serial_cycles / gpu.clock_hz
    # What starts later does so while others work.
    start_secs = work.warp_cycles * min(share, resident) * -(-work.threads // gpu.warp_size) / gpu.clock_hz
    latency = start_secs + turns * (work.rounds * DRAM_LATENCY_SECS + work.barriers * COMBINE_SECS + serial_secs)
    times = (*_throughput_secs(gpu, work), work.dram_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE), latency)
    return float(math.fsum(secs**OVERLAP for secs in times) ** (1 / OVERLAP)) + gpu.launch_secs


def _throughput_secs(gpu: Gpu, work: Work) -> tuple[float, float, float, float]:
    """Return the times of compute, of shared memory, of an SM's way to L2 and of L2."""
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

    Beside the widest, its half: more threads may hide latency better.
    """
    width = math.gcd(extent, max(1, 16 // element_bytes))
    return [width, width // 2] if width > 1 else [1]


def in_flight_bytes(nbytes: int) -> int:
    """Return how much one thread has on its way at once of what it could load together: nvcc gives no more registers to that."""
    return min(nbytes, THREAD_BYTES)


def rounds(nbytes: int) -> int:
    """Return how often a thread waits for memory that loads so many bytes one after another, however its loop is unrolled."""
    return max(1, -(-nbytes // THREAD_BYTES))


Timed = tuple[Mapping[str, Value], tuple[Work, ...]]
"""Parameters of a template, and the work of each kernel that it makes of them."""


def ranked(template: str, gpu: Gpu, timed: Iterable[Timed], top_k: int) -> tuple[Proposal, ...]:
    """Return distinct candidates that an SM can hold, least predicted time first, those of one width beyond so many last."""
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
        (first if seen[width] <= ONE_WIDTH else later).append(Proposal(candidate, secs))
        if len(first) == top_k:
            break
    return tuple([*first, *later][:top_k])
