"""Owns how long a GPU's SMs take for thread blocks that copy k-tiles to shared memory and multiply them by mma.sync.

Knows nothing of TVM, templates or where tiles come from.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import SM_PARTITIONS
from kerneldecl.analysis.tensor_cores import shape_of
from kerneldecl.model import Gpu
from kerneldecl.policies.gpu.time_model import launch_secs

MMA_SYNC_SHARE = 0.62
"""Fraction of the tensor cores' rate that mma.sync reaches on a GPU that also has wgmma, which alone feeds them in full
(Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking, 2024, section on tensor cores)."""
CONVERTED_SHARE = 0.5
"""Fraction of float16's rate where operands are converted first, assumed: nvcc 13.0 emits two to three conversions a multiplication."""
SUSTAINED_CLOCK = 0.87
"""Fraction of the boost clock while tensor cores are busy: 1.7 of 1.98 GHz, in GEMMs of 4096 and 8192 on an H200."""
TENSOR_CORE_OVERLAP = 4.0
"""Exponent of the p-norm of the times of SMs, L2 and DRAM, which overlap."""
K_TILE_CYCLES = 160.0
"""Cycles of a k-tile that no other block's work overlaps where a block's warps wait for one another: two barriers, and the first
fragments."""
LOAD_CYCLES = 900.0
"""Cycles from the issue of a copy out of L2 or DRAM to its arrival, while many are in flight."""
DIVISION_CYCLES = 40.0
"""Cycles to compute a stage's index where the number of stages is no power of 2."""
LATE = 0.15
"""Fraction of a copy's latency that a k-tile still waits although it was issued several k-tiles ago: all SMs issue at once."""
LOADS_IN_FLIGHT, BRANCHED_LOADS_IN_FLIGHT = 16.0, 6.0
"""Copies through registers of one operand that a thread has in flight: where nvcc resolves their bounds, and where each is a branch that
others do not cross. The latter took 110 (matrices) to 350 (images) cycles a copy: 110 tilings of ten operators (H200, 2026-11)."""
DIVIDED_LOADS_IN_FLIGHT = 3.0
"""As `BRANCHED_LOADS_IN_FLIGHT`, where a row in shared memory is no power of 2 as well: copies took 200 to 460 cycles each then (six GEMMs
of odd rows across k in tiles of 96 and 192, H200, 2026-11)."""
FIRST_WINDOW_COPY_CYCLES = 300.0
"""Cycles for each copy through registers of a block's first k-tile of pixels that windows share: each tests the bounds of its image, and
nothing is multiplied meanwhile. Four convolutions of 3 x 3 x 3 took 0.2 to 0.3 us a copy so (40 tilings, H200, 2026-11)."""
RESOLVED_COPIES, IMAGE_RESOLVED_COPIES = 32, 8
"""Copies of an operand up to which their bounds are resolved: of a matrix's rows, and of pixels, each of which has the bounds of its image.
GEMMs and convolutions with 4 to 192 copies (H200, 2026-11): where a window slides over odd channels, a copy took 20 to 30 cycles of a
scheduler with 4 and 8 copies a thread, and 30 to 190 with more."""
RESOLVED_WAIT = 0.5
"""Part of a latency that copies through registers wait for where their bounds are resolved: other warps multiply meanwhile. Fitted, as
the next one, to 240 tilings of 33 GEMMs and convolutions (H200, 2026-11)."""
MIXED_WAIT = 1.5
"""As `RESOLVED_WAIT`, where one operand goes through registers in rows that lie across k, and the other does not: nvcc moves no load across
cp.async, so that no multiplication overlaps with the latency. Nine GEMMs of 3 to 119 rows took 1.5 times as long as predicted with
`RESOLVED_WAIT`; those whose operands both go through registers did not (H200, 2026-11)."""
OVERLAPPED_ADDRESS_CYCLES = 40.0
"""Cycles of a copy's address that pass while the copies through registers before it are in flight."""
MMA_LATENCY_CYCLES = 35.0
"""Cycles from an mma.sync to the next one that adds to the same accumulators."""
UNEVEN_EPILOGUE_FACTOR = 2.0
"""Ratio of the times to store tiles whose columns are no power of 2 and others."""
SMEM_EPILOGUE_CYCLES = 60.0
"""Cycles that a block takes more to store its results through shared memory, besides their bytes: two barriers, one more latency. Fitted
to GEMMs of less than 8 us, each with both epilogues (43 operators, 380 tilings, H200, 2026-11)."""
EDGE_CYCLES = 1300.0
"""Cycles in which a block computes nothing yet or no more: its launch, its first k-tile, its last results' way."""
RESIDUAL_LOAD_CYCLES, DIRECT_RESIDUAL_SHARE = 400.0, 0.5
"""Cycles in which a thread loads a vector of the residual that it adds to results in shared memory: bounds keep each load behind the store
before it. And the part of that for results that do not go through shared memory. Twelve convolutions and GEMMs (H200, 2026-11)."""
RESIDUAL_VECTOR = 8
"""Elements of such a vector."""
ODD_RESULT_CYCLES = 120.0
"""Cycles in which a thread stores each of its results by itself where rows of results are no whole 4 bytes and do not go through shared
memory: bounds keep the stores apart, and neighbouring lanes write no neighbours. Three GEMMs of 57, 345 and 1075 columns (seed 43, H200,
2026-11)."""
DOUBLE_BUFFER_CYCLES = 300.0
"""Cycles of a block that register double buffering costs at its start and end, where fragments are loaded ahead and multiplied alone:
seven GEMMs and convolutions of 2 to 4 us took 0.1 to 0.4 us more with it (seed 43, H200, 2026-11)."""
STORED_BYTES_PER_CYCLE = 12.0
"""Bytes of results that leave an SM in a cycle while all SMs store, measured on an H200; without an epilogue through shared memory lanes
store half of what L2 takes at once."""
ROUNDED_DOWN = 1 - 1e-9
"""Factor that keeps a lower bound one whatever floating point rounds."""


class KTile(NamedTuple):
    """What one block does for one k-tile, between two barriers, in cycles of a whole SM."""

    multiply_cycles: float
    chain_cycles: float
    """Latency of multiplications that depend on one another."""
    smem_cycles: float
    copy_cycles: float
    """Cycles of an SM's bandwidth from L2."""
    issue_cycles: float
    """Cycles of one scheduler, for all copies and their addresses."""
    address_cycles: float
    """Cycles of one warp for its copies' addresses, one instruction after the other."""
    overlapped: float
    """Fraction of the shorter of multiplying and loading that overlaps with the longer one."""
    register_waits: float
    """Latencies that one thread waits for copies through its registers; 0 where they are asynchronous."""
    first_cycles: float = 0.0
    """Cycles that a block waits for its first k-tile's copies, besides EDGE_CYCLES."""


class Grid(NamedTuple):
    """The thread blocks of a kernel: how many there are, with how many warps, and what each goes through."""

    blocks: int
    warps: int
    """Warps of a block."""
    resident: int
    """Blocks on one SM at once."""
    k_tiles: int
    """K-tiles of a block."""
    stages: int
    epilogue_cycles: float
    """Cycles in which a block stores its results, besides EDGE_CYCLES."""
    residual_cycles: float = 0.0
    """Cycles in which each thread waits for what it adds to results, which no other block's stores take longer."""


def multiplies_per_cycle(gpu: Gpu, dtype: str, accum_dtype: str) -> float:
    """Return the multiply-adds of one SM in a cycle, by mma.sync."""
    shape = shape_of("mma.sync", dtype, gpu.compute_capability)
    is_converted = shape is not None and gpu.compute_capability[0] in shape.converted_on
    rate = gpu.tensor_rate("float16") * CONVERTED_SHARE if is_converted else gpu.tensor_rate(dtype)
    rate *= MMA_SYNC_SHARE if gpu.wgmma_arch else 1.0
    rate *= gpu.float16_accum_speedup if accum_dtype == "float16" else 1.0
    return rate / (2 * gpu.sm_count * gpu.clock_hz)


def sm_secs(gpu: Gpu, grid: Grid, k_tile: KTile) -> float:
    """Return how long the busiest SM works, without the start of its first block and the end of its last one.

    Infinite where it can hold no block.
    """
    if not grid.resident:
        return math.inf
    per_sm = -(-grid.blocks // gpu.sm_count)
    rounds, rest = divmod(per_sm, grid.resident)
    cycles = rounds * _round_cycles(grid, k_tile, grid.resident)
    if rest:
        cycles += _round_cycles(grid, k_tile, rest)
    return (cycles - EDGE_CYCLES) / (gpu.clock_hz * SUSTAINED_CLOCK)


def _round_cycles(grid: Grid, k_tile: KTile, resident: int, rounds: int = 1) -> float:
    """Return the cycles in which an SM finishes so many blocks at once, or with the waiting of so many rounds.

    Warps wait for one another at each k-tile, so that all of them load and multiply in turn; only within a warp do loads overlap with
    multiplications that do not need them.
    """
    idle = max(1.0, SM_PARTITIONS / (resident * grid.warps))
    multiply, smem = resident * k_tile.multiply_cycles * idle, resident * k_tile.smem_cycles
    issue = resident * k_tile.issue_cycles / min(SM_PARTITIONS, resident * grid.warps)
    busy = multiply + smem - k_tile.overlapped * min(multiply, smem) + issue
    prefetched = grid.stages - 1
    arrival = LOAD_CYCLES / max(1, prefetched)
    division = 0.0 if grid.stages.bit_count() == 1 else DIVISION_CYCLES
    barriers = 0.0 if grid.warps == 1 else K_TILE_CYCLES
    waited = barriers + division + LATE * arrival + k_tile.register_waits * LOAD_CYCLES
    chain = rounds * max(k_tile.chain_cycles, k_tile.address_cycles)
    cycles = max(max(busy, chain) + rounds * waited, resident * k_tile.copy_cycles)
    # The first stages' copies are in flight before the first k-tile.
    arrivals = rounds * max(0, grid.k_tiles - prefetched) * arrival
    return (
        max(grid.k_tiles * cycles, arrivals)
        + rounds * (EDGE_CYCLES + k_tile.first_cycles + grid.residual_cycles)
        + resident * grid.epilogue_cycles
    )


def min_sm_secs(gpu: Gpu, grid: Grid, k_tile: KTile) -> float:
    """Return a lower bound of `sm_secs` for at most this many resident blocks and stages, which are a power of 2.

    All of an SM's blocks share its units at once, but wait in as many rounds as there are at least.
    """
    if not grid.resident:
        return math.inf
    per_sm = -(-grid.blocks // gpu.sm_count)
    cycles = _round_cycles(grid, k_tile, per_sm, -(-per_sm // grid.resident))
    return (cycles - EDGE_CYCLES) / (gpu.clock_hz * SUSTAINED_CLOCK)


def start_secs(gpu: Gpu) -> float:
    """Return what a kernel takes besides its SMs' work: launch, the first k-tile's arrival, the last results' way."""
    return launch_secs(gpu) + EDGE_CYCLES / (gpu.clock_hz * SUSTAINED_CLOCK)


def overlapped_fraction(rows: int, columns: int, held: int) -> float:
    """Return the fraction of a warp's loads that overlaps with its multiplications, for a warp tile of so many fragments.

    One multiplication per load overlaps with half of it, four with seven eighths: GEMMs of 1024 and 8192 on an H200. With the fragments
    of two values of k held at once, half of the rest overlaps as well: GEMMs of 4096 on an H200.
    """
    return 1.0 - (rows + columns) / (4 * rows * columns * held)


def residual_cycles(results: float, *, is_through_smem: bool) -> float:
    """Return the cycles in which a thread waits for the residuals of so many results."""
    return results / RESIDUAL_VECTOR * RESIDUAL_LOAD_CYCLES * (1.0 if is_through_smem else DIRECT_RESIDUAL_SHARE)


def register_waits(copies: float, resolved_wait: float | None, *, is_divided: bool) -> float:
    """Return the latencies that a thread waits for so many copies of one operand through its registers.

    `resolved_wait` is the part of a latency that it waits where their bounds are resolved, None where they are not. They never are where
    a row in shared memory is no power of 2.
    """
    if is_divided:
        return copies / DIVIDED_LOADS_IN_FLIGHT
    return copies / BRANCHED_LOADS_IN_FLIGHT if resolved_wait is None else resolved_wait * math.ceil(copies / LOADS_IN_FLIGHT)
