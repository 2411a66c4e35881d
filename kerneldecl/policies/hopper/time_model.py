"""Owns how long a GPU takes for tiles that consumer warpgroups multiply by wgmma out of a pipeline of stages in shared memory.

Knows nothing of TVM, of templates or of where tiles come from: pixels of a convolution are as good as rows of a matrix.

Constants called fitted were fitted together to 500 kernels on an H200 (2026-11): GEMMs of 1024 to 8192 with 8- and 16-bit operands,
of 16 and 64 rows with wide weights, of 512 with short k, and convolutions. Those of prologue, epilogue, chunks and split-K were then
refitted to 650 kernels of 50 GEMMs and convolutions drawn at random.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import SM_PARTITIONS, VECTOR_BYTES
from kerneldecl.analysis.hopper_limits import (
    K_TILE_BYTES,
    MMA_TILE_ROWS,
    RESERVED_SMEM_BYTES,
    RESIDENT_OTHER_REGISTERS,
    WARPGROUP_THREADS,
)
from kerneldecl.model import Gpu, dtype_bytes
from kerneldecl.policies.gpu.tensor_core_model import ROUNDED_DOWN, SUSTAINED_CLOCK
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, LINE_BYTES, SM_BYTES_PER_CLOCK, p_norm

ACCUM_BYTES = 4
"""Bytes of an accumulator at most."""

# Tensor cores

SM_TENSOR_RATE_FRACTION = 0.87
"""Part of the data sheet's tensor-core rate, which NVIDIA gives at 1.83 GHz, that one SM reaches. Fitted."""
GPU_TENSOR_RATE_FRACTION = 0.70
"""Part of the data sheet's rate that all SMs sustain together under the power limit. Fitted; float16 GEMMs of 4096 to 16384 ran at 0.66
(H200, 2026-11)."""

# The mainloop

LOAD_LATENCY_SECS = 8.8e-7
"""Seconds from a stage's TMA load to its arrival, while all SMs load. Fitted."""
MIN_K_TILE_SECS = 1.41e-7
"""Least seconds of a k-tile, however narrow its tile: a barrier, and four wgmmas one after the other. Fitted."""
A_LOAD_SECS = 2.0e-7
"""Seconds in which a consumer loads its rows of A's k-tile to registers, and waits for its MMAs. Assumed."""
K_TILE_P_NORM = 7.1
"""Exponent (1 to infinity) with which the times of a k-tile overlap: 1 is not at all, infinity is perfectly. Fitted."""
KERNEL_P_NORM = 6.1
"""Exponent (1 to infinity) with which the SMs' time, the power limit, L2 and DRAM overlap. Fitted."""

# L2

L2_MISS_RATE_FRACTION = 0.83
"""Part of L2's rate at which it delivers what comes from DRAM. Fitted."""
L2_HIT_RATE_FACTOR = 2.0
"""Multiple of L2's rate at which it delivers what several SMs read. Fitted; GEMMs of 1024 read over 12 TB/s (H200, 2026-11)."""
L2_PARTITIONS = 2
"""Partitions of L2; each of them fetches what it does not hold."""

# Prologue, epilogue and clusters

PROLOGUE_SECS = 2e-7
"""Seconds before the first wgmma: barriers, the cluster's first synchronisation, the first stage from DRAM. Fitted."""
CTA_START_SECS = 4e-9
"""Seconds for each CTA that starts while others do: GEMMs of one wave took 0.2 to 0.5 us more with 130 narrow tiles than with 65 of twice
the width (eight GEMMs of 24 to 744 k, H200, 2026-11). Fitted, as WORKSPACE_SECS, to 70 GEMMs and convolutions drawn at random."""
STAGE_FILL_SECS = 2.2e-8
"""Seconds per stage to start the loads that fill the pipeline. Fitted."""
EPILOGUE_BYTES_PER_CYCLE = 40.0
"""Bytes per SM and cycle at which results leave registers through shared memory. Fitted."""
LANES_STORED_PER_CYCLE = 6.0
"""Lanes of a consumer that store results in a cycle where rows of results are not aligned for TMA: each lane then stores a few bytes by
itself. Eight GEMMs and convolutions of odd widths took 0.42 to 0.57 us for each MB of results more than even ones (H200, 2026-11)."""
PINGPONG_CONSUMERS = 2
"""Consumers that store results at once in the ping-pong schedule, each those of its own tile."""
CHUNK_SECS = 1e-7
"""Least seconds of a chunk of results, however narrow: tiles whose chunks have 8 columns took 0.09 us more for each (H200, 2026-11)."""
RESIDUAL_CHUNK_SECS = 7e-7
"""Seconds for each chunk of 64 x 64 results whose residual threads load before they store it: between 0.5 (GEMM of 2048 x 768 x 768, three
chunks) and 1.2 (3 x 3 convolution of 320 channels, six chunks; H200, 2026-11). TMA loads whole tiles meanwhile, where they have room."""
STAGGERED_EXPOSED_EPILOGUE = 0.4
"""Part of an epilogue that is not hidden by the other consumer in the staggered schedule. Assumed."""
CLUSTER_SECS, SPLIT_K_CLUSTER_SECS = 7.5e-7, 3e-7
"""Seconds for which the CTAs of a cluster wait for each other at the start and at the end; and where they share a tile's k, but for what
its reduction takes. The former is fitted. The latter was 8e-7 of 377 kernels of 74 GEMMs whose CTAs waited at three barriers of the
cluster until all writes were seen (H200, 2026-11); the rest, without them, is assumed."""
LARGE_CLUSTERS_PER_UNPLACED, ODD_CLUSTERS_PER_UNPLACED = 11, 5
"""Clusters of more than 2 CTAs that would fill the SMs, for each one that finds no room: a cluster lies within one GPC, and those have
16 or 18 SMs. Powers of 2 first: an H200 holds 30 clusters of 4 at once; other sizes leave more of a GPC idle: 36 clusters of 3 ran at
once, but neither 40 of 3, 24 of 5, 20 of 6 nor 16 of 7 (30 GEMMs, 2026-11)."""

# Split-K and stream-K

SPLIT_K_CTA_SECS = 1e-7
"""Seconds to synchronise and to reduce, for each CTA of a split-K cluster beyond the first: float8 17 x 272 x 9232 took 7.0, 4.6 and 3.9 us
with 2, 4 and 8 (H200, 2026-11)."""
IN_PLACE_SECS = 2e-7
"""Seconds for which the CTAs of a split-K cluster wait for each other before they send accumulators to where stages were. Assumed."""
SPLIT_K_BYTES_PER_CYCLE = 20.0
"""Bytes per CTA and cycle at which accumulators go to other CTAs of a split-K cluster. Fitted to those 377 kernels; between 12 and 40 the
errors differ by 2 %."""
WORKSPACE_SECS = 5e-7
"""Seconds from the last partial accumulators of split-K with a workspace to the last results, apart from a launch and the bytes: two
passes through L2. Fitted."""
WORKSPACE_PIECE_SECS = 4e-8
"""Seconds for each piece of a tile that the kernel which reduces a workspace adds, one after the other. Fitted to 32 GEMMs with 2 to 40
pieces, and checked on nine others (H200, 2026-11)."""
STREAM_K_SECS = 5e-6
"""Seconds that stream-K takes once: the kernel that clears flags, and one more tile to begin and to end. Fitted, as the next two, to 16
GEMMs of 512 to 8192 rows with 2 to 17 pieces per tile (H200, 2026-11)."""
STREAM_K_PIECE_SECS = 6e-7
"""Seconds for each piece of a tile that the CTA which adds them waits for and finds, one after the other."""
STREAM_K_BYTES_PER_CYCLE = 70.0
"""Bytes per CTA and cycle at which accumulators go to L2 and come from there."""

# Launches

PDL_LAUNCH_FRACTION = 0.7
"""Part of a launch's time that remains with PDL. Fitted to 74 GEMMs and convolutions drawn at random, and checked on 66 others (H200,
2026-11)."""
UNEVEN_PDL_FACTOR = 1.08
"""Ratio of times where PDL distributes CTAs unevenly: only some start early, or many pile up on a part of the SMs. Measured 1.0 to 1.2 for
GEMMs of 8 to 128 rows (H200, 2026-11)."""
UNALIGNED_COPY_FACTOR = 2.0
"""Ratio of the times to copy operands whose rows are not aligned and others. Fitted, with the launch, which overlaps with the kernel
before, to 37 GEMMs and convolutions of which operands are packed (H200, 2026-11)."""
FULL_GPU_FRACTION = 0.9
"""Part of the SMs (or of all places for CTAs) that counts as all of them. Assumed."""

# Operands that TMA cannot load

REGISTER_LOAD_LATENCY_SECS = 1.2e-6
"""Seconds from a thread's load to where it has left it in shared memory, bounds of each vector included. Twenty-one kernels of six GEMMs of
odd sizes took 0.95 to 1.47 times as long as 7e-7 predicts (seed 43, H200, 2026-11); the next two are assumed."""
REGISTER_LOAD_BYTES_IN_FLIGHT = 64
"""Bytes that each thread of the producer warpgroup loads at once."""
REGISTER_LOAD_INSTRUCTIONS = 60.0
"""Instructions for each `VECTOR_BYTES` that go through registers."""


class CtaTile(NamedTuple):
    """The tile that one CTA computes at a time; its stages hold `K_TILE_BYTES` of each row of both operands."""

    block_m: int
    block_n: int
    is_pingpong: bool = False
    """Whether each consumer has a tile of its own, so that one's epilogue is hidden by the other's mainloop."""
    register_load_bytes: float = 0.0
    """Bytes of a k-tile that threads load through registers; see `operands.register_load_bytes`."""
    is_staggered: bool = False
    """Whether the second of two consumers is some k-tiles behind the first."""
    a_consumers: int = 0
    """Consumers that load A's k-tiles to registers for wgmma; 0 where it reads them in shared memory."""
    tma_lines: tuple[float, float] = (0.0, 0.0)
    """Lines of the caches that TMA reads for a k-tile of A and of B; 0 where none is known to begin or end amid a line."""
    consumers: int = 1
    """Consumer warpgroups that share the tile."""
    store_chunks: int = 0
    """Chunks in which each consumer stores a tile's results through shared memory, one after the other; 0 where they do not go there."""


class TileGrid(NamedTuple):
    """All tiles of a kernel."""

    tiles: int
    """Tiles of all batches; those outside the result that fill clusters are included."""
    k_tiles: int
    """K-tiles of each tile and split-K part."""
    cluster_m: int
    cluster_n: int
    split_k: int
    """CTAs that share a tile's k."""
    out_bytes: int
    """Bytes of one result."""
    dram_bytes: float
    operand_bytes: tuple[float, float] = (0.0, 0.0)
    """Bytes of A and of B; 0 where nothing is known of what L2 misses."""
    has_workspace: bool = False
    """Whether those that share a tile's k meet in global memory, not in a cluster."""
    store_bytes: int = VECTOR_BYTES
    """Bytes to which rows of results are aligned, at most those of a vector."""
    a_filled: float = 1.0
    """Share of the rows of A's tiles that A has: TMA reads no others, which few rows of tokens leave to the tile's 64."""

    @property
    def cluster_split_k(self) -> int:
        """Return how many CTAs of a cluster share a tile's k."""
        return 1 if self.has_workspace else self.split_k

    @property
    def cluster_ctas(self) -> int:
        return self.cluster_m * self.cluster_n * self.cluster_split_k


class Pipeline(NamedTuple):
    """How CTAs go through their tiles."""

    stages: int
    epilogue_buffers: int
    """Buffers of 64 x 64 results of each consumer."""
    resident_ctas: int = 1
    """CTAs on an SM at once."""
    stream_k: int = 0
    """Last waves whose k-tiles stream-K distributes evenly over all SMs."""
    residual_chunks: int = 0
    """Chunks of each tile whose residual threads load one after the other; 0 where TMA loads it."""


class TileCost(NamedTuple):
    """What tiles cost, whatever their pipeline."""

    grid: TileGrid
    cta: CtaTile
    sm_tiles: int
    """Tiles of the busiest SM, one after the other."""
    k_tile_secs: tuple[float, float, float, float]
    """Seconds of one k-tile: wgmma, its reads of shared memory, TMA loads, loads through registers."""
    kernel_secs: tuple[float, float, float]
    """Least seconds of all tiles: by the power limit, by L2, by DRAM."""
    epilogue_secs: float
    """Seconds to store one tile."""
    split_k_secs: float
    """Seconds to reduce one tile over its CTAs."""


def resident_clusters(gpu: Gpu, cluster_ctas: int) -> int:
    """Return how many clusters the GPU holds at once, one CTA on each SM."""
    clusters = gpu.sm_count // cluster_ctas
    if cluster_ctas <= 2:
        return clusters
    return clusters - clusters // (LARGE_CLUSTERS_PER_UNPLACED if cluster_ctas.bit_count() == 1 else ODD_CLUSTERS_PER_UNPLACED)


def resident_ctas(gpu: Gpu, smem_bytes: int, accum_registers: int) -> int:
    """Return how many CTAs of one consumer an SM holds at once."""
    threads = 2 * WARPGROUP_THREADS
    by_smem = gpu.smem_per_sm_bytes // (smem_bytes + gpu.smem_reserved_per_block_bytes)
    return max(1, min(by_smem, gpu.registers_per_sm // (threads * (RESIDENT_OTHER_REGISTERS + accum_registers))))


def pdl_factor(gpu: Gpu, ctas: int, resident: int) -> float:
    """Return the ratio by which PDL slows down so many CTAs, of which an SM holds `resident`; 1 where they are evenly distributed.

    That is so where all CTAs find room beside those of the preceding kernel, or none.
    """
    places, full = resident * gpu.sm_count, FULL_GPU_FRACTION * gpu.sm_count
    running = min(places, ctas)
    if running < full:
        is_even = resident == 1 and full <= 2 * running <= places
    else:
        is_even = 2 * running <= places or running >= FULL_GPU_FRACTION * places or running <= gpu.sm_count
    return 1.0 if is_even else UNEVEN_PDL_FACTOR


def stage_bytes(rows: int, columns: int) -> int:
    return (rows + columns) * K_TILE_BYTES


def tile_cost(gpu: Gpu, dtype: str, grid: TileGrid, cta: CtaTile) -> TileCost:
    """Return what tiles cost. Each wgmma reads its 64 rows of A and all columns of B, so that narrow tiles wait for shared memory.

    CTAs are persistent, but for split-K, where each cluster computes one tile.
    """
    cycles_per_s = gpu.clock_hz * SUSTAINED_CLOCK
    results = cta.block_m * cta.block_n
    return TileCost(
        grid=grid,
        cta=cta,
        sm_tiles=-(-grid.tiles * grid.split_k // (grid.cluster_ctas * resident_clusters(gpu, grid.cluster_ctas))),
        k_tile_secs=_k_tile_costs(gpu, dtype, grid, cta),
        kernel_secs=_kernel_costs(gpu, dtype, grid, cta),
        epilogue_secs=max(results * grid.out_bytes / (_stored_per_cycle(grid, cta) * cycles_per_s), cta.store_chunks * CHUNK_SECS),
        split_k_secs=_split_k_secs(gpu, grid, results) if grid.split_k > 1 else 0.0,
    )


def _stored_per_cycle(grid: TileGrid, cta: CtaTile) -> float:
    """Return the bytes of a tile's results that leave an SM in a cycle."""
    if grid.store_bytes == VECTOR_BYTES or grid.split_k > 1:
        return EPILOGUE_BYTES_PER_CYCLE
    storing = PINGPONG_CONSUMERS if cta.is_pingpong else cta.consumers
    return min(EPILOGUE_BYTES_PER_CYCLE, LANES_STORED_PER_CYCLE * storing * grid.store_bytes)


def _split_k_secs(gpu: Gpu, grid: TileGrid, results: int) -> float:
    """Return the seconds to reduce one tile over the CTAs of its cluster; with a workspace, those of the kernel that reduces all tiles."""
    if grid.has_workspace:
        moved = 2 * grid.tiles * grid.split_k * results * ACCUM_BYTES
        return launch_secs(gpu, has_pdl=True) + WORKSPACE_SECS + grid.split_k * WORKSPACE_PIECE_SECS + moved / gpu.l2_bytes_per_s
    cycles_per_s = gpu.clock_hz * SUSTAINED_CLOCK
    sent = results * ACCUM_BYTES * (grid.split_k - 1) / grid.split_k
    return SPLIT_K_CTA_SECS * (grid.split_k - 1) + sent / (SPLIT_K_BYTES_PER_CYCLE * cycles_per_s)


def _k_tile_costs(gpu: Gpu, dtype: str, grid: TileGrid, cta: CtaTile) -> tuple[float, float, float, float]:
    """Return the seconds of one k-tile on one SM: wgmma, its reads of shared memory, TMA loads, loads through registers.

    Each CTA of a cluster reads its part of the lines that they share, and receives all of them.
    """
    cycles_per_s = gpu.clock_hz * SUSTAINED_CLOCK
    multiply_adds = cta.block_m * cta.block_n * K_TILE_BYTES / dtype_bytes(dtype)
    smem_bytes = cta.block_m / MMA_TILE_ROWS * (MMA_TILE_ROWS + cta.block_n) * K_TILE_BYTES
    if cta.a_consumers:
        smem_bytes += cta.block_m * K_TILE_BYTES  # two lanes of four meet in a bank
    via_registers = cta.register_load_bytes * REGISTER_LOAD_LATENCY_SECS / (WARPGROUP_THREADS * REGISTER_LOAD_BYTES_IN_FLIGHT)
    instructions = cta.register_load_bytes / VECTOR_BYTES * REGISTER_LOAD_INSTRUCTIONS
    via_registers += instructions / (gpu.warp_size * SM_PARTITIONS * cycles_per_s)
    read_bytes = LINE_BYTES * (cta.tma_lines[0] * grid.a_filled / grid.cluster_n + cta.tma_lines[1] / grid.cluster_m)
    return (
        multiply_adds * 2 * gpu.sm_count / (gpu.tensor_rate(dtype) * SM_TENSOR_RATE_FRACTION),
        smem_bytes / (gpu.smem_bytes_per_clock_per_sm * cycles_per_s),
        max(stage_bytes(cta.block_m, cta.block_n), read_bytes) / (SM_BYTES_PER_CLOCK * cycles_per_s),
        via_registers,
    )


def _kernel_costs(gpu: Gpu, dtype: str, grid: TileGrid, cta: CtaTile) -> tuple[float, float, float]:
    """Return the least seconds of all tiles: by the power limit, by L2, by DRAM."""
    k_tiles = grid.tiles * grid.split_k * grid.k_tiles
    results = cta.block_m * cta.block_n
    multiply_adds = results * K_TILE_BYTES / dtype_bytes(dtype)
    loaded = (k_tiles * K_TILE_BYTES * cta.block_m / grid.cluster_n, k_tiles * K_TILE_BYTES * cta.block_n / grid.cluster_m)
    missed = sum(min(each, L2_PARTITIONS * once) for each, once in zip(loaded, grid.operand_bytes, strict=True))
    stored = grid.tiles * results * grid.out_bytes
    return (
        2 * k_tiles * multiply_adds / (gpu.tensor_rate(dtype) * GPU_TENSOR_RATE_FRACTION),
        (missed / L2_MISS_RATE_FRACTION + (sum(loaded) - missed) / L2_HIT_RATE_FACTOR + stored) / gpu.l2_bytes_per_s,
        grid.dram_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE),
    )


def tiles_secs(gpu: Gpu, cost: TileCost, pipeline: Pipeline) -> float:
    """Return the time from the first CTA's start to the last one's end: the busiest SM decides, unless power, L2 or DRAM are slower."""
    ctas = min(pipeline.resident_ctas, cost.sm_tiles)
    started = min(cost.grid.tiles * cost.grid.split_k, ctas * gpu.sm_count)
    return _secs(gpu, cost, pipeline, ctas, -(-cost.sm_tiles // ctas)) + started * CTA_START_SECS


def least_secs(gpu: Gpu, cost: TileCost, pipeline: Pipeline) -> float:
    """Return a lower bound of `tiles_secs` for all pipelines with at most as many stages, buffers and CTAs as this one."""
    ctas = min(pipeline.resident_ctas, cost.sm_tiles)
    return ROUNDED_DOWN * (_secs(gpu, cost, pipeline, ctas, cost.sm_tiles / ctas) - pipeline.stages * STAGE_FILL_SECS)


def _secs(gpu: Gpu, cost: TileCost, pipeline: Pipeline, ctas: int, cta_tiles: float) -> float:
    """Return the time in which each of an SM's `ctas` CTAs computes `cta_tiles` tiles."""
    grid, cta = cost.grid, cost.cta
    epilogue = cost.epilogue_secs * (1 + 1 / max(1, pipeline.epilogue_buffers)) + pipeline.residual_chunks * RESIDUAL_CHUNK_SECS
    # Stores by lanes take a consumer's own time.
    is_hidden = cta.is_staggered and grid.store_bytes == VECTOR_BYTES
    between_tiles = 0.0 if cta.is_pingpong else epilogue * (STAGGERED_EXPOSED_EPILOGUE if is_hidden else 1.0)
    if grid.split_k > 1:
        epilogue += cost.split_k_secs
        between_tiles = epilogue + PROLOGUE_SECS
    k_tiles, tile_ends, reduction = cta_tiles * grid.k_tiles, cta_tiles - 1, 0.0
    if pipeline.stream_k > 0:
        k_tiles, tile_ends, reduction = _stream_k(gpu, grid, cta, pipeline.stream_k)
    sm_secs = k_tiles * _k_tile_secs(cost, pipeline, ctas) + tile_ends * between_tiles
    steady_secs = p_norm(sm_secs, *cost.kernel_secs, exponent=KERNEL_P_NORM)
    cluster = 0.0 if grid.cluster_ctas == 1 else SPLIT_K_CLUSTER_SECS if grid.cluster_split_k > 1 else CLUSTER_SECS
    return PROLOGUE_SECS + pipeline.stages * STAGE_FILL_SECS + steady_secs + epilogue + reduction + cluster


def _k_tile_secs(cost: TileCost, pipeline: Pipeline, ctas: int) -> float:
    """Return how long an SM is busy with one k-tile of each of its CTAs, which wait for loads at the same time."""
    busy = [secs * ctas for secs in cost.k_tile_secs]
    if cost.cta.a_consumers:
        # A consumer loads A while it multiplies nothing.
        busy.append(cost.k_tile_secs[0] / cost.cta.a_consumers + A_LOAD_SECS)
    return p_norm(*busy, LOAD_LATENCY_SECS / (pipeline.stages - 1), MIN_K_TILE_SECS, exponent=K_TILE_P_NORM)


def _stream_k(gpu: Gpu, grid: TileGrid, cta: CtaTile, stream_k: int) -> tuple[int, int, float]:
    """Return what each CTA does where stream-K distributes the last waves: its k-tiles, its whole tiles, its seconds to add pieces.

    A CTA leaves the accumulators of at most one piece in L2, and reads those of all pieces of the tile that it began.
    """
    clusters = resident_clusters(gpu, grid.cluster_ctas)
    full_waves, rest = divmod(-(-grid.tiles // grid.cluster_ctas), clusters)
    whole_tiles = max(0, full_waves - (stream_k - 1))
    k_tiles = -(-((full_waves - whole_tiles) * clusters + rest) * grid.k_tiles // clusters)
    pieces = 1 + -(-grid.k_tiles // k_tiles)
    piece_bytes = cta.block_m * cta.block_n * ACCUM_BYTES
    moving = pieces * piece_bytes / (STREAM_K_BYTES_PER_CYCLE * gpu.clock_hz * SUSTAINED_CLOCK)
    return whole_tiles * grid.k_tiles + k_tiles, whole_tiles, STREAM_K_SECS + pieces * STREAM_K_PIECE_SECS + moving


def launch_secs(gpu: Gpu, *, has_pdl: bool) -> float:
    return gpu.launch_secs * (PDL_LAUNCH_FRACTION if has_pdl else 1.0)


def packing_secs(gpu: Gpu, size_bytes: float) -> float:
    """Return how long the kernel takes that copies operands of so many bytes: from DRAM, and to L2."""
    moved = size_bytes * (1 / (gpu.dram_bytes_per_s * DRAM_SHARE) + 1 / gpu.l2_bytes_per_s)
    return launch_secs(gpu, has_pdl=True) + UNALIGNED_COPY_FACTOR * moved


def fitting_stages(limit_bytes: int, rows: int, columns: int, epilogue_bytes: int) -> int:
    """Return how many stages shared memory holds besides the epilogue's bytes."""
    return (limit_bytes - RESERVED_SMEM_BYTES - epilogue_bytes) // stage_bytes(rows, columns)
