"""Owns which stages, raster and last waves a tile on wgmma may have, and how long a product takes in such tiles.

Knows nothing of TVM or of which tiles there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.model import Candidate, Gpu, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import Estimate, Group, dram_bytes, wave_items
from kerneldecl.policies.hopper import time_model as model
from kerneldecl.policies.hopper.operands import gathered_bytes, is_box, step_items, unit_of

ROWS = model.WGMMA_ROWS
MIN_STAGES, MAX_STAGES = 2, 12
STAGGERED_STAGES = 4
"""At least, some of which the second consumer keeps longer."""
FEWER_STAGES = (6, 4)
RASTERS = (1, 2, 4, 8, 16)
SOME_ROWS = 128
"""Of a product, or columns: no more are few tiles."""
ROWS_SHARED = 1.0005
"""How much longer it takes where the blocks of a cluster share the rows' operand rather than the columns'."""
SHORT_SECS, LONGER_SECS = 5e-5, 1.2e-4
"""Products that take no longer at best start before the kernel in front has ended: of few rows, where it may cost more, and of more.

Of longer ones those that fill an SM do: they gain up to 2 % at 4096 cubed on an H200, and lost nothing.
"""
FEW_WAVES = 4
DEALT = "dealt"
"""The schedule of tiles whose last waves are dealt evenly (stream-K)."""
STREAM_FILL, STREAM_WAVES = 0.8, 64
"""A last wave that is less full, of no more waves, may be worth dealing evenly over all SMs."""


class Tiling(NamedTuple):
    """The template's parameters."""

    block_m: int
    block_n: int
    consumers: int
    stages: int
    cluster_m: int = 1
    cluster_n: int = 1
    raster_group: int = 1
    split_k: int = 1
    kernel_schedule: str = "cooperative"
    swap_ab: int = 0
    pdl: int = 0
    pack: int = 0
    stream_k: int = 0

    @property
    def is_pingpong(self) -> bool:
        return self.kernel_schedule == "pingpong"

    @property
    def is_staggered(self) -> bool:
        return self.kernel_schedule == "staggered"

    @property
    def consumer_rows(self) -> int:
        return self.block_m if self.is_pingpong else self.block_m // self.consumers

    @property
    def thread_sums(self) -> int:
        return self.consumer_rows * self.block_n // model.WARPGROUP

    def candidate(self) -> Candidate:
        return Candidate.of("wgmma_matmul", self._asdict())


class Setting(NamedTuple):
    """What all tilings of a product are for."""

    gemm: Contraction
    out_dtype: str
    gpu: Gpu
    packing_secs: float
    """Of copies of operands, which come first."""
    are_boxes: bool
    are_few: bool
    """Rows, or columns."""
    is_short: bool


def setting_of(gemm: Contraction, out_dtype: str, gpu: Gpu, packing_secs: float) -> Setting:
    are_boxes, are_few = is_box(gemm.a) and is_box(gemm.b), min(gemm.extents[1:3]) <= SOME_ROWS
    # Without so much time a product cannot be made, of multiplying or of reading its operands.
    multiplying = 2.0 * math.prod(gemm.extents) / gpu.tensor_rate(gemm.a.dtype)
    reading = (gemm.a.size_bytes + gemm.b.size_bytes) / gpu.dram_bytes_per_s
    is_short = max(multiplying, reading) < (SHORT_SECS if are_few else LONGER_SECS)
    return Setting(gemm, out_dtype, gpu, packing_secs, are_boxes, are_few, is_short)


def timed(setting: Setting, bare: Tiling) -> Iterator[tuple[str, Group | Estimate]]:
    """Yield a tiling with its schedule, to be timed with its stages; and with its last waves dealt evenly, which is a schedule, too."""
    work = _work(setting, bare)
    if work.most_stages < MIN_STAGES:
        return
    yield bare.kernel_schedule, Group(_least_secs(setting, work), functools.partial(_staged, setting, work))
    for waves in _dealt(setting, work):
        tiling = work.bare._replace(stages=work.most_stages, stream_k=waves, pdl=1)
        pipeline = _pipeline(work, tiling.stages, setting.gpu)._replace(stream_k=waves)
        yield DEALT, _estimate(setting, work, tiling, model.tiles_secs(setting.gpu, work.pace, pipeline), pipeline)


def _staged(setting: Setting, work: _Work) -> Iterator[Estimate]:
    """Yield a tiling with the most stages that fit, and with less, which leave room for results and are filled earlier."""
    gpu, bare, most = setting.gpu, work.bare, work.most_stages
    are_few, is_short = setting.are_few, setting.is_short
    fewer = (most,) if is_short and not are_few else (most - 1, *FEWER_STAGES)
    for stages in sorted({most, *fewer} if setting.are_boxes else {most, FEWER_STAGES[-1]}):
        if (STAGGERED_STAGES if bare.is_staggered else MIN_STAGES) <= stages <= min(most, work.pace.tiles.steps + 1 - bare.is_staggered):
            pipeline = _pipeline(work, stages, gpu)
            secs = model.tiles_secs(gpu, work.pace, pipeline)
            if are_few or not is_short:
                fills = 2 * (stages * work.stage_bytes + work.beside_bytes) > gpu.smem_per_block_optin_bytes
                yield _estimate(setting, work, bare._replace(stages=stages, pdl=int(fills and not are_few)), secs, pipeline)
            if is_short and (not are_few or stages in (most, FEWER_STAGES[0])):
                yield _estimate(setting, work, bare._replace(stages=stages, pdl=1), secs, pipeline)


def _dealt(setting: Setting, work: _Work) -> list[int]:
    """Return how many last waves may be dealt evenly (stream-K): one, and two, where the very last would leave SMs idle.

    Neighbours' pieces begin at different steps, so that what they share must stay in L2: of a product that does not, not all is dealt.
    """
    gemm, gpu, tiles = setting.gemm, setting.gpu, work.pace.tiles
    if (
        work.bare.kernel_schedule != "cooperative"
        or tiles.split_k > 1
        or work.bare.consumers == 1
        or model.sums_a_register(gemm.accum_dtype) > 1
    ):
        return []
    cluster = tiles.cluster_m * tiles.cluster_n
    clusters, at_once = tiles.total // cluster, model.workers(gpu, cluster)
    full, rest = divmod(clusters, at_once)
    most = full + int(gemm.a.size_bytes + gemm.b.size_bytes <= gpu.l2_bytes)
    return [waves for waves in (1, 2) if waves <= most] if 0 < rest < STREAM_FILL * at_once and full < STREAM_WAVES else []


def _raster(gemm: Contraction, tiling: Tiling, gpu: Gpu) -> int:
    _, m, n, _ = gemm.extents
    rows = -(-m // (tiling.block_m * tiling.cluster_m))
    columns = -(-n // (tiling.block_n * tiling.cluster_n))
    tile = (tiling.block_m * tiling.cluster_m, tiling.block_n * tiling.cluster_n)
    # Of ping-pong's two tiles one is multiplied after the other; of many, both are asked for at once.
    is_double = tiling.is_pingpong and rows * columns * tiling.cluster_m * tiling.cluster_n > FEW_WAVES * gpu.sm_count
    at_work = gpu.sm_count * (tiling.consumers if is_double else 1)
    return _best_raster(rows, columns, at_work // (tiling.cluster_m * tiling.cluster_n), *tile)


@functools.cache
def _best_raster(rows: int, columns: int, resident: int, block_m: int, block_n: int) -> int:
    """Return after how many rows of tiles the walk goes on with the next column, so that the tiles at work need least."""
    groups = [group for group in RASTERS if group <= rows] or [1]
    return min(groups, key=lambda group: (wave_items(group, columns, resident, block_m, block_n), group))


class _Work(NamedTuple):
    """What a tiling does, whatever its stages."""

    bare: Tiling
    pace: model.Pace
    sums_registers: int
    """Of a thread."""
    stage_bytes: int
    beside_bytes: int
    """Of shared memory, at least, beside the stages: where there is more, results have more buffers."""
    most_stages: int
    """That fit, and find something to do."""


def _work(setting: Setting, bare: Tiling) -> _Work:
    gemm, out_dtype, gpu, *_ = setting
    batch, m, n, k = gemm.extents
    bare = bare._replace(raster_group=_raster(gemm, bare, gpu))
    across, down = bare.block_n * bare.cluster_n, bare.block_m * bare.cluster_m
    steps = -(-k // (step_items(gemm) * bare.split_k))
    tiles = model.Tiles(
        batch * -(-m // down) * -(-n // across) * bare.cluster_m * bare.cluster_n,
        steps,
        bare.cluster_m,
        bare.cluster_n,
        bare.split_k,
        dtype_bytes(out_dtype),
        dram_bytes(gemm, gpu, (bare.block_m, bare.block_n, bare.raster_group * bare.cluster_m), gpu.sm_count),
        (gemm.a.size_bytes, gemm.b.size_bytes),
    )
    gathered = gathered_bytes(gemm.a, bare.block_m) + gathered_bytes(gemm.b, bare.block_n)
    ring = model.Ring(bare.block_m, bare.block_n, bare.is_pingpong, gathered, bare.is_staggered)
    unit = unit_of(gemm.b)
    stored = bare.block_m, -(-bare.block_n // unit) * unit
    beside_bytes = model.beside_bytes(bare.block_m * bare.block_n, bare.consumers, bare.split_k, tiles.out_bytes)
    return _Work(
        bare,
        model.pace_of(gpu, gemm.a.dtype, tiles, ring),
        bare.thread_sums // model.sums_a_register(gemm.accum_dtype),
        model.stage_bytes(*stored),
        beside_bytes + model.RESERVED_BYTES,
        min(MAX_STAGES, steps + 1, model.most_stages(gpu.smem_per_block_optin_bytes, *stored, beside_bytes)),
    )


def _pipeline(work: _Work, stages: int, gpu: Gpu) -> model.Pipeline:
    """Return so many stages with as many buffers of results as there is room for."""
    bare, used = work.bare, stages * work.stage_bytes + work.beside_bytes
    buffers = model.buffers_of(gpu.smem_per_block_optin_bytes - used, bare.consumers, bare.thread_sums)
    held = used + (max(1, buffers) - 1) * model.BUFFER_BYTES
    return model.Pipeline(stages, buffers, model.resident(gpu, held, work.sums_registers) if bare.consumers == 1 else 1)


def _least_secs(setting: Setting, work: _Work) -> float:
    """Return a time that no number of stages is below."""
    smem_bytes = MIN_STAGES * work.stage_bytes + work.beside_bytes
    resident = model.resident(setting.gpu, smem_bytes, work.sums_registers) if work.bare.consumers == 1 else 1
    secs = model.least_secs(setting.gpu, work.pace, model.Pipeline(work.most_stages, model.MOST_BUFFERS, resident))
    return secs + model.launch_secs(setting.gpu, is_early=True) + setting.packing_secs


def _estimate(setting: Setting, work: _Work, tiling: Tiling, secs: float, pipeline: model.Pipeline) -> Estimate:
    """Return the time of a tiling that takes so long from its first block's start to its last one's end."""
    if tiling.pdl and not tiling.stream_k:
        secs *= model.early_share(setting.gpu, work.pace.tiles.total * tiling.split_k, pipeline.resident)
    secs += model.launch_secs(setting.gpu, is_early=bool(tiling.pdl))
    secs *= ROWS_SHARED if tiling.cluster_n > 1 else 1.0
    # With waves that are dealt evenly all clusters are alike.
    clusters = (0, 0) if tiling.stream_k > 0 else (tiling.cluster_m, tiling.cluster_n)
    form = (*clusters, tiling.consumers, tiling.is_pingpong, tiling.is_staggered, tiling.swap_ab, tiling.pack, tiling.pdl)
    return Estimate(tiling, secs + setting.packing_secs, (tiling.block_m, tiling.block_n, tiling.split_k, *form))
