"""Owns which tiles, split-K and stages of a GEMM of packed int4 by int8 on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from kerneldecl.analysis.block_scales import BLOCK, MAX_SCALED_REGISTERS, SCALED_CHAIN, scaled_registers, unpacked_registers
from kerneldecl.analysis.contraction import contraction_of
from kerneldecl.analysis.hopper_limits import MAX_STAGES, MMA_TILE_ROWS, RESERVED_SMEM_BYTES, TMA_SMEM_ALIGN_BYTES, WARPGROUP_THREADS
from kerneldecl.analysis.packed_weights import packed_shape
from kerneldecl.model import Arch, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first
from kerneldecl.policies.gpu.tensor_core_model import SUSTAINED_CLOCK
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, p_norm
from kerneldecl.policies.hopper import time_model as model
from kerneldecl.policies.hopper.epilogue_smem import epilogue_smem_bytes
from kerneldecl.policies.hopper.split_k import split_k_choices, workspace_choices
from kerneldecl.policies.hopper.tile_widths import N_UNIT, block_n_choices
from kerneldecl.policies.shared.traffic import moved_bytes

TEMPLATE = "wgmma_matmul_quantized_int8"
TEMPLATES = (TEMPLATE,)
AUTO = {"cuda": 7}
HAS_TRACES = False

TILES = ((64, 1, 1), (64, 1, 2), (128, 2, 1), (128, 2, 2), (256, 2, 1), (192, 3, 1))
"""Values of `block_m`, `consumers` and `partials`."""
MORE_BLOCK_N = (80, 112)
"""Columns of a tile besides `block_n_choices`, where those are many: the most with which consumers' registers do."""
MAX_BLOCK_N = {1: 128, 2: 64}
"""Columns of a tile at most, by `partials`: with two sets wider ones spilled (nvcc 13.0)."""
CLUSTERS = (1, 2, 4)
"""CTAs of a cluster that share activations by TMA multicast, without split-K of a cluster."""
MIN_STAGES = 3
RESIDENT = (1, 2, 3)
"""CTAs of one consumer that share an SM, for which stages are chosen so that they fit."""
RASTER_GROUP = 8
SAME_TILE = 3
"""Proposals of one tile at most; see `gemm_tiles.best_first`."""
OTHER_REGISTERS = 64
"""Registers of a thread besides accumulators, products and unpacked weights, without setmaxnreg. Assumed."""
UNPACK_CYCLES = 48.0
"""Instructions of a warp to unpack its 16 rows of a k-tile: 32 of them make registers, the others load words (nvcc 13.0)."""
ADD_CYCLES = 144.0
"""Cycles of a consumer to convert 64 int32 accumulators of a thread, and to scale and add them: as of int8 with blocks. Assumed."""
GROUP_CYCLES = 80.0
"""Cycles more where activations have groups: scales of columns are loaded, and multiplied by those of rows. Assumed."""
WAIT_CYCLES, K_TILE_CYCLES = 150.0, 80.0
"""Cycles from the last MMA's end to the next one's start, and to wait for a k-tile's barrier: as with scales of blocks."""
FRAGMENT_CYCLES = 28.0
"""Cycles of tensor cores for an MMA of 64 rows besides its multiply-adds, where operand A comes from registers: as of 16 bits. Assumed."""
MMA_K = 32
"""Elements along k of an MMA."""
MMA_ELEMENTS_PER_CYCLE = 4096.0
"""Multiply-adds of 8 bits that an SM's tensor cores start in a cycle (H100 whitepaper)."""
OVERLAP = 4.0
"""Exponent of the p-norm of times that overlap. Assumed."""


class Tiling(NamedTuple):
    """The parameters of template `wgmma_matmul_quantized_int8`."""

    block_m: int
    block_n: int
    consumers: int
    partials: int
    stages: int = MIN_STAGES
    cluster_m: int = 1
    raster_group: int = RASTER_GROUP
    split_k: int = 1
    workspace: int = 0
    pdl: int = 0

    @property
    def mma_tiles(self) -> int:
        """MMA tiles of a consumer."""
        return self.block_m // (self.consumers * MMA_TILE_ROWS)

    @property
    def thread_accumulators(self) -> int:
        return self.mma_tiles * MMA_TILE_ROWS * self.block_n // WARPGROUP_THREADS

    @property
    def registers(self) -> int:
        """Registers of a thread for accumulators, the partial ones of a k-tile and unpacked weights."""
        return scaled_registers(self.thread_accumulators, self.mma_tiles, self.partials) + unpacked_registers(self.mma_tiles, self.partials)

    def candidate(self) -> Candidate:
        return Candidate.of(TEMPLATE, self._asdict())


class Problem(NamedTuple):
    """What all tilings of one GEMM share."""

    m: int
    n: int
    k: int
    out_bytes: int
    moved_bytes: int
    has_groups: bool
    """Whether scales of activations vary along k."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for other computations than int4 by int8."""
    problem, gpu = problem_of(space, arch.the_gpu), arch.the_gpu
    if problem is None:
        return ()
    return tuple(itertools.islice(best_first((_estimate(problem, tiling, gpu) for tiling in tilings(problem, gpu)), SAME_TILE), top_k))


def problem_of(space: IterSpace, gpu: Gpu) -> Problem | None:
    """Return the sizes of what looks like the template's computation, None where it does not; the template reads it in full."""
    gemm = contraction_of(space)
    if isinstance(gemm, str) or not gpu.wgmma_arch or not gemm.is_plain or gemm.accum_dtype != "float32" or len(space.blocks) < len("awc"):
        return None
    _, m, n, k = gemm.extents
    read = {(access.dtype, access.shape) for block in space.blocks[:2] if not block.is_reduction for access in block.reads}
    scales = {shape for dtype, shape in read if dtype == "float32"}
    if k % BLOCK or read - {("float32", shape) for shape in scales} != {("uint8", packed_shape(n, k)), ("int8", (m, k))}:
        return None
    of_weights = [(n,), *(shape for shape in scales if shape[1:] == (n,) and k % (shape[0] * BLOCK) == 0)]
    of_rows = next((rows for rows in ((m,), (k // BLOCK, m)) if any({rows, own} == scales for own in of_weights)), None)
    if of_rows is None:
        return None
    return Problem(m, n, k, dtype_bytes(space.blocks[-1].writes[0].dtype), moved_bytes(space), has_groups=len(of_rows) > 1)


def tilings(problem: Problem, gpu: Gpu) -> Iterator[Tiling]:
    """Yield the search space: tiles with split-K, and stages with which so many CTAs share an SM."""
    is_skinny = problem.m <= 2 * MMA_TILE_ROWS
    widths = {*block_n_choices(problem.m, "int8", is_skinny=is_skinny), *(() if is_skinny else MORE_BLOCK_N)}
    k_tiles = problem.k // BLOCK
    for (block_m, consumers, partials), block_n in itertools.product(TILES, sorted(widths)):
        tile = Tiling(block_m=block_m, block_n=block_n, consumers=consumers, partials=partials)
        is_wide = block_n > MAX_BLOCK_N[partials] or tile.registers > MAX_SCALED_REGISTERS[consumers]
        if is_wide or block_m - MMA_TILE_ROWS >= problem.n:
            continue
        tiles = _tile_count(problem, tile)
        divided = [
            tile._replace(cluster_m=ctas) for ctas in CLUSTERS if ctas <= -(-problem.n // block_m) and block_n % (N_UNIT * ctas) == 0
        ]
        divided += [tile._replace(split_k=parts) for parts in split_k_choices(gpu, tiles, k_tiles)]
        divided += [tile._replace(split_k=parts, workspace=1) for parts in workspace_choices(gpu, tiles, k_tiles)]
        for each in divided:
            yield from _with_stages(problem, each._replace(pdl=1), gpu)


def _with_stages(problem: Problem, tiling: Tiling, gpu: Gpu) -> Iterator[Tiling]:
    """Yield a tiling with each number of stages with which as many CTAs as an SM has to take share it, or fewer."""
    other, stage, found = _other_smem_bytes(problem, tiling), _stage_bytes(problem, tiling), set()
    needed = -(-_tile_count(problem, tiling) * tiling.split_k // gpu.sm_count)
    for resident in RESIDENT[: min(needed, _resident_by_registers(tiling, gpu))]:
        limit = min(gpu.smem_per_block_optin_bytes, gpu.smem_per_sm_bytes // resident - gpu.smem_reserved_per_block_bytes)
        found.add(min(MAX_STAGES, _cta_k_tiles(problem, tiling) + 1, (limit - other) // stage))
    yield from (tiling._replace(stages=stages) for stages in sorted(found) if stages >= MIN_STAGES)


def _stage_bytes(problem: Problem, tiling: Tiling) -> int:
    of_columns = -(-tiling.block_n * 4 // TMA_SMEM_ALIGN_BYTES) * TMA_SMEM_ALIGN_BYTES if problem.has_groups else 0
    return _weight_bytes(tiling) + tiling.block_n * BLOCK + of_columns


def _weight_bytes(tiling: Tiling) -> int:
    """Return the bytes of a k-tile's weights with their scales."""
    return tiling.block_m * (BLOCK // 2 + 4)


def _other_smem_bytes(problem: Problem, tiling: Tiling) -> int:
    split_k = 1 if tiling.workspace else tiling.split_k
    out_bytes = problem.out_bytes if tiling.split_k == 1 else 4
    return RESERVED_SMEM_BYTES + epilogue_smem_bytes(tiling.thread_accumulators, tiling.consumers, split_k, out_bytes)


def _resident_by_registers(tiling: Tiling, gpu: Gpu) -> int:
    """Return how many CTAs an SM's registers hold: one of several consumers, since it takes all of them."""
    if tiling.consumers > 1:
        return 1
    return max(1, gpu.registers_per_sm // (2 * WARPGROUP_THREADS * (OTHER_REGISTERS + tiling.registers)))


def _tile_count(problem: Problem, tiling: Tiling) -> int:
    return -(-problem.n // tiling.block_m) * -(-problem.m // tiling.block_n)


def _cta_k_tiles(problem: Problem, tiling: Tiling) -> int:
    return -(-problem.k // (BLOCK * tiling.split_k))


def _estimate(problem: Problem, tiling: Tiling, gpu: Gpu) -> Estimate:
    tile = (tiling.block_m, tiling.block_n, tiling.consumers, tiling.partials, tiling.cluster_m, tiling.split_k, tiling.workspace)
    return Estimate(tiling, _secs(problem, tiling, gpu), tile)


def _secs(problem: Problem, tiling: Tiling, gpu: Gpu) -> float:
    """Return a p-norm of the times of DRAM, of L2, of an SM's tensor cores and schedulers, of consumers' latency and of loads' latency."""
    tiles, k_tiles = _tile_count(problem, tiling), _cta_k_tiles(problem, tiling)
    smem_bytes = _other_smem_bytes(problem, tiling) + tiling.stages * _stage_bytes(problem, tiling)
    fitting = gpu.smem_per_sm_bytes // (smem_bytes + gpu.smem_reserved_per_block_bytes)
    resident = max(1, min(fitting, _resident_by_registers(tiling, gpu)))
    cluster, ctas = tiling.cluster_m * (1 if tiling.workspace else tiling.split_k), tiles * tiling.split_k
    waves = -(-ctas // (cluster * resident * model.resident_clusters(gpu, cluster)))
    sm_ctas = waves * resident if waves > 1 else min(resident, -(-ctas // gpu.sm_count))
    cycle, turns = 1 / (gpu.clock_hz * SUSTAINED_CLOCK), waves * k_tiles
    mma_cycles, warp_cycles = _mma_tile_cycles(problem, tiling)
    add_cycles = warp_cycles - UNPACK_CYCLES
    serial_cycles = (WAIT_CYCLES + warp_cycles) / (1 if tiling.partials == 1 else SCALED_CHAIN)
    consumer_cycles = K_TILE_CYCLES + tiling.mma_tiles * (UNPACK_CYCLES + max(mma_cycles, add_cycles) + serial_cycles)
    loaded = ctas * k_tiles * (_weight_bytes(tiling) + tiling.block_n * BLOCK / tiling.cluster_m)
    times = (
        problem.moved_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE),
        loaded / gpu.l2_bytes_per_s,
        sm_ctas * k_tiles * tiling.block_m / MMA_TILE_ROWS * mma_cycles * cycle,
        sm_ctas * k_tiles * tiling.block_m / MMA_TILE_ROWS * warp_cycles * cycle,
        turns * consumer_cycles * cycle,
        turns * model.LOAD_LATENCY_SECS / (tiling.stages - tiling.partials),
    )
    epilogue = waves * tiling.block_m * tiling.block_n * problem.out_bytes / model.EPILOGUE_BYTES_PER_CYCLE * cycle
    return p_norm(*times, exponent=OVERLAP) + (epilogue if tiling.split_k == 1 else 0) + _once_secs(tiling, gpu, tiles)


def _mma_tile_cycles(problem: Problem, tiling: Tiling) -> tuple[float, float]:
    """Return the cycles of an MMA tile and a k-tile: of tensor cores, and of a warp's instructions."""
    mma_cycles = BLOCK / MMA_K * (FRAGMENT_CYCLES + MMA_TILE_ROWS * tiling.block_n * MMA_K / MMA_ELEMENTS_PER_CYCLE)
    add_cycles = (ADD_CYCLES + (GROUP_CYCLES if problem.has_groups else 0.0)) * tiling.block_n / BLOCK
    return mma_cycles, UNPACK_CYCLES + add_cycles


def _once_secs(tiling: Tiling, gpu: Gpu, tiles: int) -> float:
    """Return the seconds that a kernel takes once: its launch, the first loads, the reduction of split-K."""
    secs = model.launch_secs(gpu, has_pdl=bool(tiling.pdl)) + model.PROLOGUE_SECS + tiling.stages * model.STAGE_FILL_SECS
    if tiling.cluster_m > 1:
        secs += model.CLUSTER_SECS
    if tiling.workspace:
        moved = 2 * tiles * tiling.split_k * tiling.block_m * tiling.block_n * 4
        return secs + model.launch_secs(gpu, has_pdl=True) + model.WORKSPACE_SECS + moved / gpu.l2_bytes_per_s
    if tiling.split_k > 1:
        return secs + model.SPLIT_K_CLUSTER_SECS + model.SPLIT_K_CTA_SECS * (tiling.split_k - 1)
    return secs
