"""Owns how long a GPU's SMs take for blocks that copy tiles to shared memory and multiply them on tensor cores.

Knows nothing of TVM, templates or where tiles come from.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.model import Gpu

PARTITIONS = 4
"""Of an SM, each with a tensor core and a scheduler of its own."""
MMA_SYNC_SHARE = 0.62
"""What mma.sync reaches of the tensor cores' rate on a GPU that also has wgmma, which alone feeds them in full
(Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking, 2024, section on tensor cores)."""
SUSTAINED_CLOCK = 0.87
"""Of the boost clock, while tensor cores are busy: 1.7 of 1.98 GHz, as products of 4096 and 8192 ran on an H200."""
STEP_CYCLES = 90.0
"""Of a step that no other block's work hides: two barriers, and the first fragments."""
LOAD_CYCLES = 900.0
"""From a copy out of the second-level cache or beyond it to its arrival, while many are under way."""
DIVISION_CYCLES = 40.0
"""Of the place of a stage, where the number of stages is no power of 2."""
LATE = 0.15
"""Of that, what a step still waits although its copies were asked for steps ago: all SMs ask at once."""
LOADS_AT_ONCE = 4.0
"""Copies through registers that a thread has under way: those that nvcc finds between two branches."""
SINGLE_SHARE = 0.3
"""Of STEP_CYCLES, for a block of one warp, which waits for no other."""
CHAIN_CYCLES = 35.0
"""From a multiplication to the next one that adds to the same sums."""
EDGE_CYCLES = 1300.0
"""Of a block that computes nothing yet or no more: launched, first tile, its last results on their way."""
OVERLAPPED_LAUNCH_SECS = 4e-7
"""Of a kernel that is brought to the SMs while the one before it ends, where that is possible: a softmax of 128 x 10 takes 1.04 us
on an H200, most of it the way to memory and back."""
FIRST_OVERLAP = (9, 0)
"""Compute capability of the first GPUs that have programmatic dependent launch."""
STORED_BYTES_PER_CYCLE = 12.0
"""In which results leave an SM while all store theirs, measured; lanes alone store half of what L2 takes in one go."""
ROUNDED_DOWN = 1 - 1e-9
"""For bounds: what keeps one a bound whatever floating point makes of it."""
SM_BYTES_PER_CYCLE = 64.0
"""What one SM draws from the second-level cache."""


class Step(NamedTuple):
    """What one block does between two barriers, in cycles of a whole SM."""

    multiply_cycles: float
    chain_cycles: float
    """Of multiplications that wait for one another."""
    smem_cycles: float
    copy_cycles: float
    """Of the way from the second-level cache."""
    issue_cycles: float
    """Of one scheduler, for all copies and their addresses."""
    hidden: float
    """What part of the shorter of multiplying and loading goes on behind the longer one."""
    copies: float
    """Of one thread, that pass through its registers and are waited for; 0 where they are asynchronous."""


class Blocks(NamedTuple):
    """How many blocks of so many warps do so many steps each."""

    total: int
    warps: int
    resident: int
    """On one SM at once."""
    steps: int
    stages: int
    edge_cycles: float
    """Of a block's results, beside EDGE_CYCLES."""


def multiplies_per_cycle(gpu: Gpu, dtype: str, accum_dtype: str) -> float:
    """Return the multiply-adds of one SM in a cycle, by mma.sync."""
    rate = gpu.tensor_rate(dtype) * (MMA_SYNC_SHARE if gpu.wgmma_arch else 1.0)
    rate *= gpu.float16_accum_speedup if accum_dtype == "float16" else 1.0
    return rate / (2 * gpu.sm_count * gpu.clock_hz)


def sm_secs(gpu: Gpu, blocks: Blocks, step: Step) -> float:
    """Return how long the busiest SM works, but for the beginning of its first block and the end of its last one.

    Infinite where it can hold no block.
    """
    if not blocks.resident:
        return math.inf
    per_sm = -(-blocks.total // gpu.sm_count)
    rounds, rest = divmod(per_sm, blocks.resident)
    cycles = rounds * _round_cycles(blocks, step, blocks.resident)
    if rest:
        cycles += _round_cycles(blocks, step, rest)
    return (cycles - EDGE_CYCLES) / (gpu.clock_hz * SUSTAINED_CLOCK)


def _round_cycles(blocks: Blocks, step: Step, resident: int, rounds: int = 1) -> float:
    """Return the cycles in which an SM finishes so many blocks side by side, or with the waiting of so many rounds.

    Warps wait for one another at each step, so that they load and multiply in turn, all of them; only within a warp do
    loads go on behind multiplications that do not need them.
    """
    idle = max(1.0, PARTITIONS / (resident * blocks.warps))
    multiply, smem = resident * step.multiply_cycles * idle, resident * step.smem_cycles
    issue = resident * step.issue_cycles / min(PARTITIONS, resident * blocks.warps)
    busy = multiply + smem - step.hidden * min(multiply, smem) + issue
    ahead = blocks.stages - 1
    arrival = LOAD_CYCLES / max(1, ahead)
    divided = 0.0 if blocks.stages.bit_count() == 1 else DIVISION_CYCLES
    met = STEP_CYCLES * (SINGLE_SHARE if blocks.warps == 1 else 1.0)
    waited = met + divided + LATE * arrival + step.copies / LOADS_AT_ONCE * LOAD_CYCLES
    cycles = max(max(busy, rounds * step.chain_cycles) + rounds * waited, resident * step.copy_cycles)
    # What the first stages hold is on its way before the first step.
    arrivals = rounds * max(0, blocks.steps - ahead) * arrival
    return max(blocks.steps * cycles, arrivals) + rounds * EDGE_CYCLES + resident * blocks.edge_cycles


def least_sm_secs(gpu: Gpu, blocks: Blocks, step: Step) -> float:
    """Return a time that `sm_secs` is not below with as many blocks at once and stages as these, a power of 2, or with less of either.

    All of an SM's blocks share its units at once, but wait in as many rounds as there are at least.
    """
    if not blocks.resident:
        return math.inf
    per_sm = -(-blocks.total // gpu.sm_count)
    cycles = _round_cycles(blocks, step, per_sm, -(-per_sm // blocks.resident))
    return (cycles - EDGE_CYCLES) / (gpu.clock_hz * SUSTAINED_CLOCK)


def start_secs(gpu: Gpu) -> float:
    """Return what a kernel takes beside its SMs' work: launch, the first tiles' arrival, the last results' way."""
    launch = OVERLAPPED_LAUNCH_SECS if gpu.compute_capability >= FIRST_OVERLAP else gpu.launch_secs
    return launch + EDGE_CYCLES / (gpu.clock_hz * SUSTAINED_CLOCK)


def hidden_part(rows: int, columns: int, held: int) -> float:
    """Return what part of a warp's loads goes on behind its multiplications, for a tile of so many fragments.

    One multiplication for each load hides a half of it, four seven eighths: products of 1024 and 8192 on an H200. With the
    fragments of two steps held at once, half of the rest is hidden too: products of 4096 there.
    """
    return 1.0 - (rows + columns) / (4 * rows * columns * held)


def together(*secs: float, exponent: float = 4.0) -> float:
    """Return the time of things that go on at once: hardly more than the longest alone, unless others are as long."""
    return float(sum([part**exponent for part in secs]) ** (1 / exponent))
