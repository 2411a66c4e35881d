"""Owns which stages, rasterization groups, PDL and stream-K a tile on wgmma may have, and how long a GEMM takes with them.

Knows nothing of TVM or of which tiles there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.analysis.hopper_limits import (
    EPILOGUE_BUFFER_BYTES,
    EPILOGUE_BUFFER_CHOICES,
    MAX_STAGES,
    MIN_STAGES,
    MMA_TILE_ROWS,
    RESERVED_SMEM_BYTES,
    WARPGROUP_THREADS,
    epilogue_tile_bytes,
)
from kerneldecl.analysis.params import GEMM_ALONE, WgmmaParams
from kerneldecl.analysis.tensor_cores import accumulators_per_register
from kerneldecl.model import Candidate, Gpu, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import Estimate, Group, dram_bytes, wave_items
from kerneldecl.policies.hopper import time_model as model
from kerneldecl.policies.hopper.epilogue_smem import epilogue_smem, epilogue_smem_bytes
from kerneldecl.policies.hopper.operands import (
    are_tma_loadable,
    is_from_registers,
    k_tile_items,
    register_load_bytes,
    smem_rows_unit,
    tma_lines,
)

EPILOGUE_ITEM_BYTES = 2
"""Bytes of results that go through shared memory: stmatrix stores elements of 16 bits."""
STAGGERED_MIN_STAGES = 4
ENOUGH_STAGE_BYTES = 128 << 10
"""Bytes of stages from which on more of them hide no more latency: 110 bytes/ns, which an SM was seen to take from L2, in 0.9 us, and the
stage that is multiplied. With less, split-K may reduce in the stages' place."""
"""Least stages of the staggered schedule, whose second consumer holds some of them longer."""
FEWER_STAGES = (6, 4)
"""Stages to try besides the most that fit: fewer of them leave room for epilogue buffers and are filled earlier."""
VIA_REGISTERS_FEWER_STAGES = (4,)
"""The same where an operand is loaded through registers."""
SKINNY_PDL_STAGES = 6
"""Stages, besides the most that fit, with which skinny GEMMs are also tried with PDL."""
RASTER_GROUPS = (1, 2, 4, 8, 16)
SKINNY_EXTENT = 128
"""Rows or columns up to which a GEMM is skinny, so that it has few tiles."""
SHARED_A_FACTOR = 1.0005
"""Ratio of the times of clusters that share tiles of A and of those that share tiles of B: it breaks ties."""
SKINNY_PDL_SECS = 5e-5
"""Least time of a skinny GEMM, in seconds, below which it is short and PDL is tried: that may gain or cost."""
PDL_SECS = 1.2e-4
"""Least time of any other GEMM, in seconds, below which it is short and always uses PDL. Longer ones use PDL where a CTA fills an SM: they
gained up to 2 % at 4096 x 4096 x 4096, and none lost (H200, 2026-11)."""
PINGPONG_MANY_WAVES = 4
"""Waves of tiles above which both tiles of a ping-pong CTA are loaded at once; in fewer waves, one comes after the other."""
STREAM_K = "stream_k"
"""The name under which tilings with stream-K are ranked, as if it were a kernel schedule."""
WORKSPACE = "workspace"
"""The same for split-K through global memory."""
A_FROM_REGISTERS = "A from registers, "
"""Before the names of schedules whose operand A comes from registers, so that copies that are transposed before compete with them."""
STREAM_K_CHOICES = (1, 2)
"""Last waves that stream-K may distribute evenly over all SMs."""
STREAM_K_MAX_FILL = 0.8
"""Filled part of the last wave below which stream-K is tried."""
STREAM_K_MAX_WAVES = 64
"""Number of full waves below which stream-K is tried: among more, the last one hardly matters."""


class Tiling(WgmmaParams):
    """The parameters of template `wgmma_matmul`."""

    __slots__ = ()

    @property
    def cluster_ctas(self) -> int:
        """Return the CTAs of a cluster without split-K."""
        return self.cluster_m * self.cluster_n

    def candidate(self) -> Candidate:
        return self.candidate_of("wgmma_matmul", GEMM_ALONE)


class Result(NamedTuple):
    """The result of a GEMM."""

    dtype: str
    has_residual: bool
    accumulator_secs: float = 0.0
    """Seconds of a thread for each of its last tile's accumulators, besides stores."""


class Problem(NamedTuple):
    """What all tilings of a GEMM have in common."""

    gemm: Contraction
    out_dtype: str
    gpu: Gpu
    packing_secs: float
    """Seconds of the kernel that copies operands before the GEMM; 0 where none does."""
    uses_tma: bool
    """Whether TMA loads both operands."""
    is_skinny: bool
    """Whether m or n is at most `SKINNY_EXTENT`."""
    accumulator_secs: float
    loads_residual: bool
    """Whether the epilogue reads a residual of which TMA may load tiles."""
    is_short: bool
    """Whether the least time that multiplying and reading can take is below `SKINNY_PDL_SECS` or `PDL_SECS`."""


def problem_of(gemm: Contraction, result: Result, gpu: Gpu, packing_secs: float) -> Problem:
    is_skinny = min(gemm.extents[1:3]) <= SKINNY_EXTENT
    multiplying = 2.0 * math.prod(gemm.extents) / gpu.tensor_rate(gemm.a.dtype)
    reading = (gemm.a.size_bytes + gemm.b.size_bytes) / gpu.dram_bytes_per_s
    return Problem(
        gemm=gemm,
        out_dtype=result.dtype,
        accumulator_secs=result.accumulator_secs,
        loads_residual=result.has_residual,
        gpu=gpu,
        packing_secs=packing_secs,
        uses_tma=are_tma_loadable(gemm),
        is_skinny=is_skinny,
        is_short=max(multiplying, reading) < (SKINNY_PDL_SECS if is_skinny else PDL_SECS),
    )


class _TileWork(NamedTuple):
    """What a tiling does, whatever its stages."""

    tiling: Tiling
    """The tiling with its rasterization group, its stages still to be chosen."""
    cost: model.TileCost
    accum_registers: int
    """Registers of a thread that hold accumulators."""
    stage_bytes: int
    other_smem_bytes: int
    """Least shared memory besides the stages; where more is free, the epilogue has more buffers."""
    max_stages: int
    """Most stages that fit shared memory and have a k-tile to hold."""
    max_stages_beside: int
    """The same beside what split-K reduces; with more, it does so in their place."""

    def smem_bytes(self, stages: int) -> int:
        """Return the least shared memory of a CTA."""
        return stages * self.stage_bytes + (self.other_smem_bytes if stages <= self.max_stages_beside else RESERVED_SMEM_BYTES)


def timed(problem: Problem, tiling: Tiling) -> Iterator[tuple[str, Group | Estimate]]:
    """Yield the tilings that differ from one in stages, PDL and stream-K, each under the name by which it is ranked.

    Those without stream-K are yielded as one group with a lower bound of their times.
    """
    work = _tile_work(problem, tiling)
    if work.max_stages < MIN_STAGES:
        return
    yield (
        _ranked_as(problem, tiling),
        Group(_least_secs(problem, work), functools.partial(_by_stages, problem, work)),
    )
    for stream_k in _stream_k_choices(problem, work):
        pipeline = _pipeline(problem, work, work.max_stages, is_divided=True)._replace(stream_k=stream_k)
        chosen = work.tiling._replace(stages=work.max_stages, stream_k=stream_k, pdl=1)
        yield STREAM_K, _estimate(problem, work, chosen, pipeline, model.tiles_secs(problem.gpu, work.cost, pipeline))


def _ranked_as(problem: Problem, tiling: Tiling) -> str:
    """Return the name under which a tiling without stream-K is ranked."""
    kind = A_FROM_REGISTERS if is_from_registers(problem.gemm.a) else ""
    return kind + (WORKSPACE if tiling.workspace else tiling.kernel_schedule)


def _tile_work(problem: Problem, tiling: Tiling) -> _TileWork:
    gemm, gpu = problem.gemm, problem.gpu
    tiling = tiling._replace(raster_group=_raster_group(gemm, tiling, gpu))
    cta = model.CtaTile(
        block_m=tiling.block_m,
        block_n=tiling.block_n,
        is_pingpong=tiling.is_pingpong,
        register_load_bytes=register_load_bytes(gemm.a, tiling.block_m, is_a=True) + register_load_bytes(gemm.b, tiling.block_n),
        is_staggered=tiling.is_staggered,
        a_consumers=tiling.consumers if is_from_registers(gemm.a) else 0,
        tma_lines=(tma_lines(gemm.a, tiling.block_m), tma_lines(gemm.b, tiling.block_n)),
        consumers=1 if tiling.is_pingpong else tiling.consumers,
        store_chunks=store_chunks(tiling, problem.out_dtype),
    )
    grid, unit = _grid(problem, tiling), smem_rows_unit(gemm.b)
    stored_columns = -(-tiling.block_n // unit) * unit
    epilogue_bytes = epilogue_smem_bytes(tiling.thread_accumulators, tiling.consumers, grid.cluster_split_k, _buffered_bytes(grid))
    limit = gpu.smem_per_block_optin_bytes
    beside = min(MAX_STAGES, grid.k_tiles + 1, model.fitting_stages(limit, tiling.block_m, stored_columns, epilogue_bytes))
    in_place = min(MAX_STAGES, grid.k_tiles + 1, model.fitting_stages(limit, tiling.block_m, stored_columns, 0))
    reduced_bytes = epilogue_smem_bytes(tiling.thread_accumulators, tiling.consumers, grid.cluster_split_k, model.ACCUM_BYTES)
    stage_bytes = model.stage_bytes(tiling.block_m, stored_columns)
    is_starved = grid.cluster_split_k > 1 and beside * stage_bytes < ENOUGH_STAGE_BYTES
    is_in_place = is_starved and in_place > beside and in_place * stage_bytes >= reduced_bytes
    return _TileWork(
        tiling=tiling,
        cost=model.tile_cost(gpu, gemm.a.dtype, grid, cta),
        accum_registers=tiling.thread_accumulators // accumulators_per_register(gemm.accum_dtype),
        stage_bytes=stage_bytes,
        other_smem_bytes=epilogue_bytes + RESERVED_SMEM_BYTES,
        max_stages=in_place if is_in_place else beside,
        max_stages_beside=beside,
    )


def _grid(problem: Problem, tiling: Tiling) -> model.TileGrid:
    gemm, gpu = problem.gemm, problem.gpu
    batch, m, _, k = gemm.extents
    rows, columns = _clusters(gemm, tiling)
    return model.TileGrid(
        tiles=batch * rows * columns * tiling.cluster_ctas,
        k_tiles=-(-k // (k_tile_items(gemm) * tiling.split_k)),
        cluster_m=tiling.cluster_m,
        cluster_n=tiling.cluster_n,
        split_k=tiling.split_k,
        has_workspace=bool(tiling.workspace),
        out_bytes=dtype_bytes(problem.out_dtype),
        dram_bytes=dram_bytes(gemm, gpu, (tiling.block_m, tiling.block_n, tiling.raster_group * tiling.cluster_m), gpu.sm_count),
        operand_bytes=(gemm.a.size_bytes, gemm.b.size_bytes),
        a_filled=m / (rows * tiling.cluster_m * tiling.block_m),
        store_bytes=math.gcd(gemm.extents[1 if tiling.swap_ab else 2] * dtype_bytes(problem.out_dtype), VECTOR_BYTES),
    )


def _buffered_bytes(grid: model.TileGrid) -> int:
    """Return the bytes of what leaves through epilogue buffers: a result, or an accumulator where split-K needs none of them."""
    return grid.out_bytes if grid.split_k == 1 else model.ACCUM_BYTES


def store_chunks(tiling: WgmmaParams, out_dtype: str) -> int:
    """Return in how many chunks a consumer stores a tile's results, 0 where they do not go through shared memory.

    A chunk has up to 64 columns, as many as divide the tile's.
    """
    if dtype_bytes(out_dtype) != EPILOGUE_ITEM_BYTES or tiling.split_k > 1:
        return 0
    is_whole = bool(tiling.swap_ab) and tiling.block_n <= MMA_TILE_ROWS
    width = tiling.block_n if is_whole else math.gcd(tiling.block_n, MMA_TILE_ROWS)
    return tiling.thread_accumulators * WARPGROUP_THREADS // (MMA_TILE_ROWS * width)


def _clusters(gemm: Contraction, tiling: Tiling) -> tuple[int, int]:
    """Return the rows and columns of clusters that cover one batch's result."""
    _, m, n, _ = gemm.extents
    return -(-m // (tiling.block_m * tiling.cluster_m)), -(-n // (tiling.block_n * tiling.cluster_n))


# Rasterization


def _raster_group(gemm: Contraction, tiling: Tiling, gpu: Gpu) -> int:
    rows, columns = _clusters(gemm, tiling)
    has_many_waves = rows * columns * tiling.cluster_ctas > PINGPONG_MANY_WAVES * gpu.sm_count
    sm_tiles = tiling.consumers if tiling.is_pingpong and has_many_waves else 1
    resident = gpu.sm_count * sm_tiles // tiling.cluster_ctas
    return _best_raster_group(rows, columns, resident, tiling.block_m * tiling.cluster_m, tiling.block_n * tiling.cluster_n)


@functools.cache
def _best_raster_group(rows: int, columns: int, resident: int, rows_each: int, columns_each: int) -> int:
    """Return the rasterization group with which the resident clusters read least of the operands, the smallest of equal ones."""
    groups = [group for group in RASTER_GROUPS if group <= rows] or [1]
    return min(groups, key=lambda group: (wave_items(group, columns, resident, rows_each, columns_each), group))


# Stages and PDL


def _by_stages(problem: Problem, work: _TileWork) -> Iterator[Estimate]:
    """Yield a tiling with each sensible number of stages, with and without PDL."""
    for stages in _stage_choices(problem, work):
        pipeline = _pipeline(problem, work, stages, is_divided=work.tiling.split_k > 1)
        secs = model.tiles_secs(problem.gpu, work.cost, pipeline)
        secs += model.IN_PLACE_SECS if stages > work.max_stages_beside else 0.0
        for pdl in _pdl_choices(problem, work, stages):
            yield _estimate(problem, work, work.tiling._replace(stages=stages, pdl=pdl), pipeline, secs)


def _stage_choices(problem: Problem, work: _TileWork) -> list[int]:
    """Return the stages to try, in ascending order: the most that fit and, but for short GEMMs with many tiles, fewer."""
    most, staggered = work.max_stages, work.tiling.is_staggered
    if not problem.uses_tma:
        fewer: tuple[int, ...] = VIA_REGISTERS_FEWER_STAGES
    elif problem.is_short and not problem.is_skinny:
        fewer = ()
    else:
        fewer = (most - 1, *FEWER_STAGES)
    if problem.loads_residual:
        fewer = (*fewer, _roomy_stages(problem, work))
    fewer = (*fewer, work.max_stages_beside)
    # The second staggered consumer is behind by some stages, all of one tile.
    least, limit = (STAGGERED_MIN_STAGES, work.cost.grid.k_tiles) if staggered else (MIN_STAGES, work.cost.grid.k_tiles + 1)
    return [stages for stages in sorted({most, *fewer}) if least <= stages <= min(most, limit)]


def _pdl_choices(problem: Problem, work: _TileWork, stages: int) -> tuple[int, ...]:
    """Return the values of `pdl` to try. A GEMM that is not short uses PDL where no second CTA fits an SM."""
    if problem.is_skinny:
        is_tried = problem.is_short and stages in (work.max_stages, SKINNY_PDL_STAGES)
        return (0, 1) if is_tried else (0,)
    if problem.is_short:
        return (1,)
    return (int(2 * work.smem_bytes(stages) > problem.gpu.smem_per_block_optin_bytes),)


def _pipeline(problem: Problem, work: _TileWork, stages: int, *, is_divided: bool) -> model.Pipeline:
    """Return a pipeline with so many stages and as many epilogue buffers as there is room for; `is_divided` tiles have several CTAs.

    With split-K threads store results themselves and wait for no buffer.
    """
    gpu, tiling, used = problem.gpu, work.tiling, work.smem_bytes(stages)
    loads = ("threads" if is_divided else "tma") if problem.loads_residual else ""
    smem = epilogue_smem(gpu.smem_per_block_optin_bytes - used, tiling.consumers, tiling.thread_accumulators, loads=loads)
    if tiling.split_k > 1:
        smem = smem._replace(buffers=max(EPILOGUE_BUFFER_CHOICES), extra_bytes=0)
    return model.Pipeline(stages, smem.buffers, _resident_ctas(gpu, work, used + smem.extra_bytes), residual_chunks=smem.residual_chunks)


def _roomy_stages(problem: Problem, work: _TileWork) -> int:
    """Return the most stages beside which all results of a tile have room, so that TMA loads the residual's."""
    tiling = work.tiling
    tile_bytes = tiling.consumers * (epilogue_tile_bytes(tiling.thread_accumulators * WARPGROUP_THREADS) - EPILOGUE_BUFFER_BYTES)
    return (problem.gpu.smem_per_block_optin_bytes - work.other_smem_bytes - max(0, tile_bytes)) // work.stage_bytes


def _resident_ctas(gpu: Gpu, work: _TileWork, smem_bytes: int) -> int:
    return model.resident_ctas(gpu, smem_bytes, work.accum_registers) if work.tiling.consumers == 1 else 1


# Stream-K


def _stream_k_choices(problem: Problem, work: _TileWork) -> tuple[int, ...]:
    """Return how many last waves stream-K may distribute: one or two, where the very last one would leave SMs idle."""
    if not _allows_stream_k(problem, work.tiling):
        return ()
    resident = model.resident_clusters(problem.gpu, work.tiling.cluster_ctas)
    full_waves, rest = divmod(work.cost.grid.tiles // work.tiling.cluster_ctas, resident)
    is_last_wave_short = 0 < rest < STREAM_K_MAX_FILL * resident and full_waves < STREAM_K_MAX_WAVES
    if not is_last_wave_short:
        return ()
    # Neighbouring CTAs begin at different k-tiles, so that they share operands only through L2: larger ones keep a wave of whole tiles.
    fits_l2 = problem.gemm.a.size_bytes + problem.gemm.b.size_bytes <= problem.gpu.l2_bytes
    return tuple(waves for waves in STREAM_K_CHOICES if waves <= full_waves + int(fits_l2))


def _allows_stream_k(problem: Problem, tiling: Tiling) -> bool:
    """Say whether the template has stream-K for a tiling: several consumers share each tile, without split-K, with 32-bit accumulators."""
    is_shared = tiling.is_cooperative and tiling.consumers > 1
    return is_shared and tiling.split_k == 1 and accumulators_per_register(problem.gemm.accum_dtype) == 1


# Times


def _least_secs(problem: Problem, work: _TileWork) -> float:
    """Return a lower bound of a tiling's time for all numbers of stages, with or without PDL."""
    resident = _resident_ctas(problem.gpu, work, work.smem_bytes(MIN_STAGES))
    secs = model.least_secs(problem.gpu, work.cost, model.Pipeline(work.max_stages, max(EPILOGUE_BUFFER_CHOICES), resident))
    return secs + model.launch_secs(problem.gpu, has_pdl=True) + problem.packing_secs


def _estimate(problem: Problem, work: _TileWork, tiling: Tiling, pipeline: model.Pipeline, secs: float) -> Estimate:
    """Return a tiling with its predicted time, given the seconds from its first CTA's start to its last one's end."""
    if tiling.pdl and not tiling.stream_k:
        secs *= model.pdl_factor(problem.gpu, work.cost.grid.tiles * tiling.split_k, pipeline.resident_ctas)
    secs += model.launch_secs(problem.gpu, has_pdl=bool(tiling.pdl))
    secs *= SHARED_A_FACTOR if tiling.cluster_n > 1 else 1.0
    secs += problem.packing_secs + problem.accumulator_secs * tiling.thread_accumulators
    return Estimate(tiling, secs, _same_tile_key(tiling))


def _same_tile_key(tiling: Tiling) -> tuple[int, ...]:
    """Return what tilings have in common that count as one tile, of which few are proposed. With stream-K all clusters count as one."""
    return (
        tiling.block_m,
        tiling.block_n,
        tiling.split_k,
        tiling.workspace,
        *((0, 0) if tiling.stream_k > 0 else (tiling.cluster_m, tiling.cluster_n)),
        tiling.consumers,
        tiling.is_pingpong,
        tiling.is_staggered,
        tiling.swap_ab,
        tiling.pack,
        tiling.pdl,
    )
