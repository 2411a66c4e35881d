"""Owns which tiles, clusters and split-K of an 8-bit GEMM with scales along k on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from kerneldecl.analysis.block_scales import (
    BLOCK,
    DTYPES,
    MAX_COLUMN_BLOCKS,
    MAX_SCALED_REGISTERS,
    SCALED_CHAIN,
    column_blocks,
    scaled_registers,
)
from kerneldecl.analysis.contraction import contraction_of
from kerneldecl.analysis.hopper_limits import (
    MAX_STAGES,
    MMA_TILE_ROWS,
    RESERVED_SMEM_BYTES,
    TMA_SMEM_ALIGN_BYTES,
    WARPGROUP_THREADS,
)
from kerneldecl.analysis.tensor_cores import wgmma_instructions
from kerneldecl.model import Arch, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first
from kerneldecl.policies.gpu.tensor_core_model import SUSTAINED_CLOCK
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, p_norm
from kerneldecl.policies.hopper import time_model as model
from kerneldecl.policies.hopper.epilogue_smem import epilogue_smem_bytes
from kerneldecl.policies.hopper.split_k import split_k_choices, workspace_choices
from kerneldecl.policies.hopper.tile_widths import N_UNIT
from kerneldecl.policies.shared.traffic import moved_bytes

TEMPLATE = "wgmma_matmul_block_scaled"
TEMPLATES = (TEMPLATE,)
AUTO = {"cuda": 6}
HAS_TRACES = False

TILES = ((256, 2, 1), (128, 2, 1), (128, 2, 2), (192, 3, 1), (64, 1, 1), (64, 1, 2))
"""Values of `block_m`, `consumers` and `partials`."""
BLOCK_N = (32, 56, 64, 96, 112, 128, 160, 192)
"""Columns of a tile: the widths between powers of 2 make numbers of tiles that fill the SMs better."""
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))
"""Values of `cluster_m` and `cluster_n`."""
RASTER_GROUP = 16
"""Rows of tiles in a rasterization group: 4 and 8 took 1 to 2 % longer back to back (4096 x 7168 x 16384, H200, 2026-11)."""
SCHEDULES = ("cooperative", "staggered")
"""Values of `kernel_schedule`, the second one of two consumers whose CTAs have several tiles."""
MIN_STAGES = 3
REST_REGISTERS = 176
"""Registers of a thread at most that hold accumulators of columns with their own scales, where chains of k-tiles leave a rest: with 192
nvcc 13.0 spilled."""
LOADED_BLOCK_N = 96
"""Columns of a tile at most whose own scales threads load: with 128 nvcc 13.0 spilled."""
SHARED_SM_REGISTERS = 96
"""Registers of a thread at most that hold accumulators, whole and partial, where two CTAs share an SM: 128 in all."""
STREAMING_STAGES = 6
"""Stages beside which accumulators may have room of their own where weights come from DRAM: consumers hold two of them. Assumed."""
EARLY_BYTES = (48 * 1024, 96 * 1024)
"""Bytes of weights that a CTA may prefetch to L2 as it starts, about: what DRAM delivers in 1.4 and 2.8 us, while the preceding kernel ends
and this one's pipeline fills."""
L2_FETCHES = (128, 256)
"""Values of `l2_fetch` where weights come from DRAM."""
SAME_TILE, SAME_STREAMING_TILE = 2, 4
"""Proposals of one tile at most, and of one whose weights come from DRAM; see `gemm_tiles.best_first`."""
MMA_ELEMENTS_PER_CYCLE = 4096.0
"""Multiply-adds of 8 bits that an SM's tensor cores start in a cycle (H100 whitepaper)."""
SMEM_BYTES_PER_CYCLE = 128.0
"""Bytes that an SM's shared memory reads for wgmma or takes from TMA in a cycle. 56 kernels of four GEMMs took 0.92 to 1.3 of the
predictions, in about their order; without what TMA writes the order was worse (H200, 2026-11)."""
ADD_CYCLES = 80.0
"""Cycles of a consumer to scale 64 partial accumulators of a thread and add them. Assumed, as the next two."""
CONVERT_CYCLES, COLUMN_CYCLES, PRODUCT_CYCLES = 64.0, 16.0, 64.0
"""Cycles more where those are int32, where columns have scales of their own, and where each of these is multiplied by a row's: the
instructions that nvcc 13.0 emits. An SM's schedulers take the cycles of all its consumers one after the other, which counts where there are
such instructions."""
WAIT_CYCLES = 150.0
"""Cycles from the last MMA's end until its accumulators are read, and from there to the next one's start."""
K_TILE_CYCLES = 80.0
"""Cycles of a consumer to wait for a k-tile's barrier."""
UNEVEN_FACTOR = 1.1
"""Ratio of an SM's times where tiles' columns lie in two blocks: for 112, 160 and 192 columns, 0.9 to 1.24 of those of 128, by waves and
widths alike, in two GEMMs of 4096 rows (H200, 2026-11)."""
MULTICAST_FACTOR = 1.1
"""Ratio of DRAM's times where CTAs of a cluster wait for each other's stages: 1.05 and 1.17 for 64 rows (H200, 2026-11)."""
L2_FETCH_FACTOR = 0.99
"""Ratio of DRAM's times where L2 fetches 256 bytes at once rather than 128: fewer of its rows are opened. Assumed."""
EARLY_SECS = 3e-7
"""Seconds of DRAM's at most that an early prefetch saves. Assumed, and little: float16 GEMMs of few rows gained nothing by a prefetch of
weights that waited for barriers."""
L2_RATE_FACTOR = 1.5
"""Multiple of L2's rate at which it delivers what several SMs read."""
OVERLAP = 4.0
"""Exponent of the p-norm of times that overlap. Assumed."""


class Tiling(NamedTuple):
    """The parameters of template `wgmma_matmul_block_scaled`."""

    block_m: int
    block_n: int
    consumers: int
    partials: int
    stages: int = MIN_STAGES
    cluster_m: int = 1
    cluster_n: int = 1
    raster_group: int = RASTER_GROUP
    split_k: int = 1
    workspace: int = 0
    pdl: int = 0
    kernel_schedule: str = SCHEDULES[0]
    prefetch: int = 0
    l2_fetch: int = L2_FETCHES[0]

    def candidate(self) -> Candidate:
        """Return the candidate; those that take the defaults of the last two parameters do not name them."""
        left_out = {name for name in ("prefetch", "l2_fetch") if getattr(self, name) == Tiling._field_defaults[name]}
        return Candidate.of(TEMPLATE, {name: value for name, value in self._asdict().items() if name not in left_out})


class Problem(NamedTuple):
    """What all tilings of one GEMM share."""

    m: int
    n: int
    k: int
    out_bytes: int
    moved_bytes: int
    dtype: str
    """Of the operands."""
    has_row_groups: bool
    """Whether scales of A's rows vary along k."""
    has_blocks: bool
    """Whether B has scales of blocks, not of each column."""
    has_column_groups: bool
    """Whether each column has a scale of its own, which varies along k."""

    @property
    def threads_load_scales(self) -> bool:
        """Say whether consumers' threads load the scales of columns, since TMA takes rows of 16 bytes."""
        return self.has_column_groups and self.n % 4 > 0

    @property
    def added_cycles(self) -> float:
        """Return the cycles of a consumer to convert and scale 64 int32 accumulators of a thread, beyond those of float8 with blocks."""
        own = COLUMN_CYCLES + (PRODUCT_CYCLES if self.has_row_groups else 0.0) if self.has_column_groups else 0.0
        return own + (CONVERT_CYCLES if self.dtype == "int8" else 0.0)

    def streams_weights(self, gpu: Gpu) -> bool:
        """Say whether weights come from DRAM whenever the kernel runs, since L2 does not hold them."""
        return self.n * self.k > gpu.l2_bytes


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for other computations than a GEMM with scales along k."""
    problem, gpu = problem_of(space, arch.the_gpu), arch.the_gpu
    if problem is None:
        return ()
    estimates = (_estimate(problem, tiling, gpu) for tiling in tilings(problem, gpu))
    same_tile = SAME_STREAMING_TILE if problem.streams_weights(gpu) else SAME_TILE
    return tuple(itertools.islice(best_first(estimates, same_tile), top_k))


def problem_of(space: IterSpace, gpu: Gpu) -> Problem | None:
    """Return the sizes of what looks like the template's computation, None where it does not; the template reads it in full."""
    gemm = contraction_of(space)
    if isinstance(gemm, str) or not gpu.wgmma_arch or not gemm.is_plain or len(space.blocks) < len(("values", "scales", "sums")):
        return None
    _, m, n, k = gemm.extents
    read = {(access.dtype, access.shape) for block in space.blocks[:2] if not block.is_reduction for access in block.reads}
    scales = {shape for dtype, shape in read if dtype == "float32"}
    values = {(dtype, shape) for dtype, shape in read if dtype != "float32"}
    [dtype, *others] = {dtype for dtype, _ in values} or {""}
    if k % BLOCK or others or dtype not in DTYPES or {shape for _, shape in values} != {(m, k), (n, k)}:
        return None
    rows, blocks = ((k // BLOCK, m), (m,)), (-(-n // BLOCK), k // BLOCK)
    columns = [blocks, (n,), *(shape for shape in sorted(scales, key=len) if shape[1:] == (n,) and k % (shape[0] * BLOCK) == 0)]
    found = next(((of_rows, own) for own, of_rows in itertools.product(columns, rows) if {of_rows, own} == scales), None)
    if found is None or max(len(found[0]), len(found[1])) == 1:
        return None
    of_rows, own = found
    out_bytes = dtype_bytes(space.blocks[-1].writes[0].dtype)
    has_groups = own != blocks and len(own) > 1
    return Problem(m, n, k, out_bytes, moved_bytes(space), dtype, len(of_rows) > 1, own == blocks, has_groups)


def tilings(problem: Problem, gpu: Gpu) -> Iterator[Tiling]:
    """Yield the search space: tiles in clusters or with split-K, with as many stages as fit."""
    k_tiles = problem.k // BLOCK
    for (block_m, consumers, partials), block_n in itertools.product(TILES, BLOCK_N):
        if block_m - MMA_TILE_ROWS >= problem.m and block_m > MMA_TILE_ROWS:
            continue
        tile = Tiling(block_m=block_m, block_n=block_n, consumers=consumers, partials=partials)
        if not _fits(problem, tile) or block_n >= 2 * max(problem.n, BLOCK_N[0]):
            continue
        # One set of registers took 1.07 and 1.12 of the time of two (64 and 4096 rows, H200, 2026-11).
        if partials == 1 and (block_m, consumers, 2) in TILES and _fits(problem, tile._replace(partials=2)):
            continue
        rows, columns = -(-problem.m // block_m), -(-problem.n // block_n)
        has_waves = rows * columns > gpu.sm_count
        schedules = SCHEDULES if consumers == 2 and has_waves else SCHEDULES[:1]
        divided = [
            tile._replace(cluster_m=cluster_m, cluster_n=cluster_n, kernel_schedule=schedule)
            for (cluster_m, cluster_n), schedule in itertools.product(CLUSTERS, schedules)
            if cluster_m <= rows and cluster_n <= columns and block_n % (N_UNIT * cluster_m) == 0 and block_m % (N_UNIT * cluster_n) == 0
        ]
        divided += [tile._replace(split_k=parts) for parts in split_k_choices(gpu, rows * columns, k_tiles)]
        divided += [tile._replace(split_k=parts, workspace=1) for parts in workspace_choices(gpu, rows * columns, k_tiles)]
        for staged in itertools.chain.from_iterable(_staged(problem, each, gpu) for each in divided):
            is_deep = staged.stages >= MIN_STAGES and (staged.kernel_schedule == SCHEDULES[0] or staged.stages <= k_tiles)
            if is_deep and not _spills_rest(problem, staged):
                yield from _launched(problem, staged, gpu, has_waves=has_waves)


def _launched(problem: Problem, tiling: Tiling, gpu: Gpu, *, has_waves: bool) -> Iterator[Tiling]:
    """Yield a tiling with the ways in which its kernel may start, and its weights come from DRAM."""
    # PDL may distribute CTAs unevenly, which only matters where each has one tile.
    yield from (tiling._replace(pdl=pdl) for pdl in ((1,) if has_waves else (0, 1)))
    if has_waves or not problem.streams_weights(gpu):
        return
    most = min(MAX_STAGES, -(-problem.k // (BLOCK * tiling.split_k)))
    less, more = (min(most, max(1, round(size / (tiling.block_n * BLOCK)))) for size in EARLY_BYTES)
    for prefetch in sorted({0, less, more}):
        yield tiling._replace(pdl=1, prefetch=prefetch, l2_fetch=L2_FETCHES[-1])


def _staged(problem: Problem, tiling: Tiling, gpu: Gpu) -> Iterator[Tiling]:
    """Yield a tiling with as many stages as fit, and as fit without the accumulators that a cluster reduces."""
    most = min(MAX_STAGES, -(-problem.k // (BLOCK * tiling.split_k)) + 1)
    beside = min(most, _fitting_stages(problem, tiling, gpu))
    in_place = min(most, (gpu.smem_per_block_optin_bytes - RESERVED_SMEM_BYTES) // _stage_bytes(problem, tiling))
    has_both = in_place > beside and tiling.split_k > 1 and not tiling.workspace and problem.streams_weights(gpu)
    if not has_both or beside >= STREAMING_STAGES:
        yield tiling._replace(stages=beside)
    if has_both:
        yield tiling._replace(stages=in_place)
    shared = tiling._replace(stages=min(most, _fitting_stages(problem, tiling, gpu, 2)))
    if shared.stages >= MIN_STAGES and tiling.split_k > 1 and _resident(problem, shared, gpu) > 1:
        yield shared


def _mma_tiles(tiling: Tiling) -> int:
    return tiling.block_m // (tiling.consumers * MMA_TILE_ROWS)


def _accumulators(tiling: Tiling) -> int:
    return _mma_tiles(tiling) * MMA_TILE_ROWS * tiling.block_n // WARPGROUP_THREADS


def _registers(tiling: Tiling) -> int:
    return scaled_registers(_accumulators(tiling), _mma_tiles(tiling), tiling.partials)


def _fits(problem: Problem, tiling: Tiling) -> bool:
    """Say whether wgmma multiplies tiles of this shape, and threads have registers for them and the scales of their columns."""
    if not wgmma_instructions(problem.dtype, tiling.block_n) or _registers(tiling) > MAX_SCALED_REGISTERS[tiling.consumers]:
        return False
    if problem.has_blocks:
        return column_blocks(tiling.block_n) <= MAX_COLUMN_BLOCKS
    return tiling.block_n <= LOADED_BLOCK_N or not problem.threads_load_scales


def _spills_rest(problem: Problem, tiling: Tiling) -> bool:
    has_rest = tiling.partials == 2 and -(-problem.k // (BLOCK * tiling.split_k)) % SCALED_CHAIN > 0
    return has_rest and problem.has_column_groups and _registers(tiling) > REST_REGISTERS


def _fitting_stages(problem: Problem, tiling: Tiling, gpu: Gpu, resident: int = 1) -> int:
    """Return how many stages fit where so many CTAs share an SM."""
    split_k, out_bytes = (1 if tiling.workspace else tiling.split_k), problem.out_bytes if tiling.split_k == 1 else 4
    other = RESERVED_SMEM_BYTES + epilogue_smem_bytes(_accumulators(tiling), tiling.consumers, split_k, out_bytes)
    limit = gpu.smem_per_sm_bytes // resident - gpu.smem_reserved_per_block_bytes
    return (min(limit, gpu.smem_per_block_optin_bytes) - other) // _stage_bytes(problem, tiling)


def _resident(problem: Problem, tiling: Tiling, gpu: Gpu) -> int:
    """Return how many CTAs an SM has at once, one or two: two share it where weights come from DRAM and there are more CTAs than SMs."""
    ctas = -(-problem.m // tiling.block_m) * -(-problem.n // tiling.block_n) * tiling.split_k
    is_small = (
        tiling.consumers == 1 and _registers(tiling) <= SHARED_SM_REGISTERS and tiling.stages <= _fitting_stages(problem, tiling, gpu, 2)
    )
    return 2 if is_small and ctas > gpu.sm_count and problem.streams_weights(gpu) else 1


def _stage_bytes(problem: Problem, tiling: Tiling) -> int:
    """Return the bytes of a stage; the scales of a tile's columns take whole 128 bytes. Those of rows count wherever they are."""
    of_columns = -(-tiling.block_n * 4 // TMA_SMEM_ALIGN_BYTES) * TMA_SMEM_ALIGN_BYTES if problem.has_column_groups else 0
    return (tiling.block_m + tiling.block_n) * BLOCK + tiling.block_m * 4 + of_columns


def _is_in_place(problem: Problem, tiling: Tiling, gpu: Gpu) -> bool:
    """Say whether a cluster reduces accumulators where stages were."""
    return tiling.stages > _fitting_stages(problem, tiling, gpu)


def _estimate(problem: Problem, tiling: Tiling, gpu: Gpu) -> Estimate:
    cluster, parts = (tiling.cluster_m, tiling.cluster_n), (tiling.split_k, tiling.workspace)
    kind = (tiling.block_m, tiling.block_n, tiling.partials, tiling.stages, *cluster, *parts, int(tiling.kernel_schedule == SCHEDULES[0]))
    return Estimate(tiling, _secs(problem, tiling, gpu), kind)


def _secs(problem: Problem, tiling: Tiling, gpu: Gpu) -> float:
    """Return a p-norm of the times of DRAM, of L2, of the SMs and of loads' latency.

    A consumer gives a stage back once it multiplies the next one: with two sets of registers it holds two stages.
    """
    tiles = -(-problem.m // tiling.block_m) * -(-problem.n // tiling.block_n)
    k_tiles, cycle = -(-problem.k // (BLOCK * tiling.split_k)), 1 / (gpu.clock_hz * SUSTAINED_CLOCK)
    resident = _resident(problem, tiling, gpu)
    ctas, at_once = tiles * tiling.split_k, resident * _ctas_at_once(tiling, gpu)
    waves = math.ceil(ctas / at_once)
    turns = waves * k_tiles
    loaded = ctas * k_tiles * BLOCK * (tiling.block_m / tiling.cluster_n + tiling.block_n / tiling.cluster_m)
    tensor_cycles, smem_cycles, consumer_cycles = _k_tile_cycles(problem, tiling)
    added_cycles = problem.added_cycles and tiling.block_m // MMA_TILE_ROWS * _add_cycles(problem, tiling)
    # The last of several waves has too few CTAs to keep DRAM busy.
    dram_factor = (waves * at_once / ctas if waves > 1 else 1) * (MULTICAST_FACTOR if tiling.cluster_m * tiling.cluster_n > 1 else 1)
    dram_factor *= L2_FETCH_FACTOR if tiling.l2_fetch > L2_FETCHES[0] else 1
    times = (
        problem.moved_bytes * dram_factor / (gpu.dram_bytes_per_s * DRAM_SHARE),
        loaded / (gpu.l2_bytes_per_s * L2_RATE_FACTOR),
        turns * resident * tensor_cycles * cycle,
        turns * resident * smem_cycles * cycle,
        turns * consumer_cycles * cycle,
        turns * resident * added_cycles * cycle,
        turns * model.LOAD_LATENCY_SECS / (tiling.stages - tiling.partials),
    )
    epilogue = waves * _epilogue_cycles(problem, tiling) * cycle if tiling.split_k == 1 else 0
    early = min(EARLY_SECS, ctas * tiling.prefetch * tiling.block_n * BLOCK / (gpu.dram_bytes_per_s * DRAM_SHARE))
    # CTAs that share an SM hide each other's reduction.
    once = _once_secs(tiling if resident == 1 else tiling._replace(split_k=1), gpu, tiles)
    once += model.IN_PLACE_SECS if _is_in_place(problem, tiling, gpu) else 0
    return p_norm(*times, exponent=OVERLAP) + epilogue + once - early


def _epilogue_cycles(problem: Problem, tiling: Tiling) -> float:
    """Return the cycles for which a tile's epilogue is not overlapped by the other consumer."""
    cycles = tiling.block_m * tiling.block_n * problem.out_bytes / model.EPILOGUE_BYTES_PER_CYCLE
    return cycles * (1 if tiling.kernel_schedule == SCHEDULES[0] else model.STAGGERED_EXPOSED_EPILOGUE)


def _ctas_at_once(tiling: Tiling, gpu: Gpu) -> int:
    """Return how many CTAs run at once, one on each SM: clusters of more than two leave some SMs idle."""
    ctas = tiling.cluster_m * tiling.cluster_n * (1 if tiling.workspace else tiling.split_k)
    return model.resident_clusters(gpu, ctas) * ctas


def _add_cycles(problem: Problem, tiling: Tiling) -> float:
    """Return the cycles of a consumer to scale and add the partial accumulators of an MMA tile and a k-tile."""
    return (ADD_CYCLES + problem.added_cycles) * tiling.block_n / BLOCK


def _k_tile_cycles(problem: Problem, tiling: Tiling) -> tuple[float, float, float]:
    """Return the cycles that a k-tile of a CTA takes of tensor cores, of shared memory and of a consumer by itself."""
    mma_cycles = MMA_TILE_ROWS * tiling.block_n * BLOCK / MMA_ELEMENTS_PER_CYCLE
    read = tiling.block_m // MMA_TILE_ROWS * (MMA_TILE_ROWS + tiling.block_n) * BLOCK
    written = (tiling.block_m + tiling.block_n) * BLOCK
    add_cycles = _add_cycles(problem, tiling)
    # Each of four warps reads the scales of its columns, eight of them at once.
    scale_cycles = tiling.block_m // MMA_TILE_ROWS * tiling.block_n / 2 if problem.has_column_groups else 0
    # With two sets of registers a consumer adds while its next k-tile is multiplied, but for the last one of a chain.
    serial_cycles = (WAIT_CYCLES + add_cycles) / (1 if tiling.partials == 1 else SCALED_CHAIN)
    consumer_cycles = K_TILE_CYCLES + _mma_tiles(tiling) * (max(mma_cycles, add_cycles) + serial_cycles)
    factor = UNEVEN_FACTOR if BLOCK % tiling.block_n and problem.has_blocks else 1
    tensor_cycles = tiling.block_m // MMA_TILE_ROWS * mma_cycles
    smem_cycles = (read + written) / SMEM_BYTES_PER_CYCLE + scale_cycles
    return factor * tensor_cycles, factor * smem_cycles, factor * consumer_cycles


def _once_secs(tiling: Tiling, gpu: Gpu, tiles: int) -> float:
    """Return the seconds that a kernel takes once: its launch, the first loads, the reduction of split-K."""
    secs = model.launch_secs(gpu, has_pdl=bool(tiling.pdl)) + model.PROLOGUE_SECS + tiling.stages * model.STAGE_FILL_SECS
    if tiling.workspace:
        moved = 2 * tiles * tiling.split_k * tiling.block_m * tiling.block_n * 4
        return secs + model.launch_secs(gpu, has_pdl=True) + model.WORKSPACE_SECS + moved / gpu.l2_bytes_per_s
    if tiling.split_k > 1:
        sent_bytes = tiling.block_m * tiling.block_n * 4 * (tiling.split_k - 1) / tiling.split_k
        secs += sent_bytes / (model.SPLIT_K_BYTES_PER_CYCLE * gpu.clock_hz)
        return secs + model.SPLIT_K_CLUSTER_SECS + model.SPLIT_K_CTA_SECS * (tiling.split_k - 1)
    return secs + (model.CLUSTER_SECS if tiling.cluster_m * tiling.cluster_n > 1 else 0.0)
