"""Owns among how many threads and thread blocks a GPU should share a GEMV whose matrix has rows of no whole vectors, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.unaligned_gemv import ADDING_WARPS, GemvParams, GemvSizes, block_columns, gemv_sizes_of, takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies import gpu_gemv
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, WARP_CYCLES, Timed, Work, load_rounds, ranked

TEMPLATES = ("gpu_gemv_unaligned", "gpu_gemv")
AUTO = {"cuda": 28}
HAS_TRACES = False

THREADS = (128, 256, 512)
LANES = (32, 16, 64, 128, 8, 256, 512)
TILES = (4, 2, 1, 8)
UNROLL = (2, 1, 4)
ROWS_UNROLL = (8, 4, 16)
"""Rows that run along y which a thread loads together."""
MOST_VECTORS = 16
"""Vectors of the matrix that a thread loads together at most: of more, it has too many registers."""
RIVAL_OPTIMISM = 1.5
"""Ratio of `gpu_gemv`'s times to those predicted, where rows run along y: 2.0 and 1.3 (8691 x 1017, 333 x 25001; H200, 2026-11)."""
FEW_PARTS = (1, 2, 4, 8, 16)
MOST_WAVES = 8
"""Thread blocks of the columns' parts for each SM at most."""
OTHER_REGISTERS = 32
START_CYCLES = 3500.0
"""Cycles of a thread for its row's place, its first windows and what is left at both ends, one after another: 45 kernels of three GEMVs
took 2.1, 1.4 and 1.1 times as long as predicted without (seed 43, H200, 2026-11)."""
WINDOW_FLOPS = 60.0
"""Operations for each window of x: it is cut out of two vectors, each chosen among what x has."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return how to share rows, and the best of gpu_gemv in turns; nothing where rows are whole vectors, or for what is no GEMV."""
    sizes = gemv_sizes_of(space)
    if sizes is None or not takes(sizes):
        return ()
    own = ranked("gpu_gemv_unaligned", arch.the_gpu, _timed(sizes, arch.the_gpu), top_k)
    rivals = gpu_gemv.propose(space, arch, top_k)
    if not own or not rivals:
        return own
    is_behind = own[0].predicted_secs > RIVAL_OPTIMISM * rivals[0].predicted_secs
    return tuple(interleaved(rivals, own) if is_behind else interleaved(own, rivals))[:top_k]


def _timed(sizes: GemvSizes, gpu: Gpu) -> Iterator[Timed]:
    for params in _across(sizes, gpu) if sizes.is_across else _along(sizes, gpu):
        if params.fits(sizes, gpu):
            yield params._asdict(), _works(sizes, params, gpu)


def _along(sizes: GemvSizes, gpu: Gpu) -> Iterator[GemvParams]:
    vectors = -(-sizes.k // sizes.width)
    for threads, lanes, tile, unroll in itertools.product(THREADS, LANES, TILES, UNROLL):
        is_idle = lanes * unroll >= 2 * vectors and (lanes, unroll) != (min(LANES), 1)
        if lanes <= threads and tile * unroll <= MOST_VECTORS and not is_idle and (tile == 1 or sizes.n >= gpu.sm_count * tile):
            yield GemvParams(threads, lanes, tile, unroll, 1)


def _across(sizes: GemvSizes, gpu: Gpu) -> Iterator[GemvParams]:
    strips = -(-sizes.n // block_columns(sizes))
    for threads, unroll in itertools.product((256, 512), ROWS_UNROLL):
        rows = -(-sizes.k * WARP_LANES // threads)
        filling = {*FEW_PARTS, *(-(-gpu.sm_count * waves // strips) for waves in (1, 2, 4, MOST_WAVES))}
        for parts in sorted(filling):
            params = GemvParams(threads, WARP_LANES, 1, unroll, parts)
            if parts == 1 or rows // parts >= unroll // 2:
                # Parts that are rounded up to whole rows of all warps may be fewer.
                yield params._replace(parts=-(-sizes.k // params.part_rows(sizes)))


def _works(sizes: GemvSizes, params: GemvParams, gpu: Gpu) -> tuple[Work, ...]:
    """Return the work of the kernel that reads the matrix, and of the one that adds the sums of parts."""
    item, points = dtype_bytes(sizes.dtype), sizes.n * sizes.k
    if sizes.is_across:
        steps = math.ceil(params.part_rows(sizes) * WARP_LANES / params.threads)
        loads, vectors = math.ceil(steps / params.unroll) * params.unroll * 2, params.unroll
        waste = math.ceil(steps / params.unroll) * params.unroll / steps * (1 + 1 / WARP_LANES)
        windows, smem = 0.0, params.threads * (sizes.width + 1) * 4
    else:
        steps = math.ceil((sizes.k / sizes.width + 1) / (params.lanes * params.unroll)) * params.unroll
        loads, vectors = steps * (params.tile + 2), params.tile * params.unroll
        waste = steps * params.lanes * sizes.width / sizes.k
        windows, smem = points / (sizes.width * params.tile) * WINDOW_FLOPS, 0
    reading = Work(
        blocks=params.blocks(sizes),
        threads=params.threads,
        regs_per_thread=OTHER_REGISTERS + 4 * vectors + (8 * params.unroll if smem == 0 else sizes.width),
        smem_bytes=smem,
        flops=(4 * points + ACCESS_FLOPS * points / sizes.width + windows) * waste,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=points * item,
        l2_bytes=points * item * (waste if smem == 0 else 1.0),
        moved_smem_bytes=points * item * (1 + 2 / params.tile),
        rounds=load_rounds(loads, 4 * item if loads > steps * 2 else 16, -(-steps // params.unroll)),
        barriers=int(params.lanes > WARP_LANES or smem > 0),
        serial_cycles=START_CYCLES,
        warp_cycles=WARP_CYCLES,
    )
    if params.parts == 1:
        return (reading,)
    adding = Work(
        blocks=-(-sizes.n // WARP_LANES),
        threads=ADDING_WARPS * WARP_LANES,
        l2_bytes=sizes.n * params.parts * 4,
        rounds=load_rounds(-(-params.parts // ADDING_WARPS), 4),
        barriers=1,
    )
    return reading, adding
