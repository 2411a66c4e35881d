"""Owns how rows added at indices are shared among thread blocks, by tiles of the result or lists of updates, and what to try first.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.scatter import GpuScatterParams, GpuScatterRowsParams, ScatterSizes, scatter_of, smem_sums, sum_bytes, takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, DRAM_LATENCY_SECS, Work, access_widths, ranked

TEMPLATES = ("gpu_scatter_rows", "gpu_scatter_add")
AUTO = {"cuda": 54}
HAS_TRACES = False

TILE_ROWS = (1, 4, 8, 16, 32, 64, 128)
LANES = (128, 64, 32, 16, 8, 256)
WARPS = (8, 4, 16)
REGISTERS = 40
LOOK_CYCLES = 45.0
"""Cycles in which a thread block looks at as many indices as it has threads: a load, a barrier that counts."""
ROW_LANES = (64, 16, 8)
ROW_THREADS = (256, 128)
THREAD_ROWS = (2, 4, 1)
MAX_PART_ROWS = 8192
LIST_CYCLES, PLACE_CYCLES = 200.0, 300.0
"""Cycles in which a thread block that lists updates looks at as many indices as it has threads, twice, and places those of 32. Assumed."""
HOT_SHARE = 0.125
"""Part of the updates that go to one row, as the rule's inputs have it: frequent tokens, nodes with many edges. Where a tile's block adds
one after another, 1024 of 8192 updates took 495 us, a latency each (H200, 2026-11)."""
OTHER_REGISTERS = 90
"""Registers of a thread that adds up, besides its rows: many updates are in flight where a row has many."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time; nothing for what does not add rows at indices."""
    sizes, gpu = scatter_of(space), arch.the_gpu
    if sizes is None or not takes(sizes):
        return ()
    fitting = (params for params in _choices(sizes) if params.fits(sizes, gpu))
    tiles = ranked("gpu_scatter_add", gpu, ((params._asdict(), _tile_works(sizes, params, gpu)) for params in fitting), top_k)
    listing = (params for params in _row_choices(sizes, gpu) if params.fits(sizes, gpu))
    rows = ranked("gpu_scatter_rows", gpu, ((params._asdict(), _row_works(sizes, params, gpu)) for params in listing), top_k)
    first, second = sorted(filter(None, (rows, tiles)), key=lambda found: found[0].predicted_secs) if rows and tiles else (rows, tiles)
    return tuple(interleaved(first, second))[:top_k]


def _choices(sizes: ScatterSizes) -> Iterator[GpuScatterParams]:
    """Yield the search space; some of it may not fit."""
    for width in access_widths(sizes.columns, dtype_bytes(sizes.dtype)):
        for tile_rows, lanes, warps in itertools.product(TILE_ROWS, LANES, WARPS):
            if tile_rows < 2 * sizes.rows and lanes * width < 2 * sizes.columns + 8 * width:
                yield GpuScatterParams(tile_rows, lanes, width, warps)


def _hot_row(threads: int, latencies: float, gpu: Gpu) -> Work:
    """Return the work of the block that has the row with the most updates: it waits for so many loads in turn."""
    return Work(blocks=1, threads=threads, rounds=0, serial_cycles=latencies * DRAM_LATENCY_SECS * gpu.clock_hz)


def _tile_works(sizes: ScatterSizes, params: GpuScatterParams, gpu: Gpu) -> tuple[Work, ...]:
    """Return the work of the kernel, and of the row with the most updates."""
    item, blocks = dtype_bytes(sizes.dtype), params.blocks(sizes)
    out = sizes.rows * sizes.columns * item
    looked = blocks * sizes.updates * dtype_bytes(sizes.index_dtype)
    turns = -(-sizes.updates // params.threads)
    # Updates of one tile are added one after another, as many at once as there are rows of threads.
    found = sizes.updates * min(1.0, params.tile_rows / sizes.rows) / max(1, min(params.tile_rows, params.threads // params.lanes))
    whole = Work(
        blocks=blocks,
        threads=params.threads,
        regs_per_thread=REGISTERS,
        smem_bytes=smem_sums(sizes, params) * sum_bytes(sizes),
        flops=blocks * sizes.updates * 4.0,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=out * (2 if sizes.has_base else 1) + sizes.updates * sizes.columns * item,
        l2_bytes=2 * out + looked + sizes.updates * sizes.columns * item,
        rounds=2,
        serial_cycles=turns * LOOK_CYCLES + found * DRAM_LATENCY_SECS * gpu.clock_hz,
    )
    return whole, _hot_row(params.threads, sizes.updates * HOT_SHARE, gpu)


def _row_choices(sizes: ScatterSizes, gpu: Gpu) -> Iterator[GpuScatterRowsParams]:
    """Yield the search space of lists; some of it may not fit."""
    part_rows = min(MAX_PART_ROWS, -(-sizes.rows // gpu.sm_count))
    item = dtype_bytes(sizes.dtype)
    # Odd rows have no vectors: a thread has several elements that lie apart.
    widths = (*access_widths(VECTOR_BYTES // item, item), 1) if sizes.columns % 2 else access_widths(sizes.columns, item)
    for width in widths:
        for threads, lanes, rows in itertools.product(ROW_THREADS, ROW_LANES, THREAD_ROWS):
            # Lanes of a warp have one row, unless that is short.
            is_right = lanes >= WARP_LANES or lanes * width >= sizes.columns
            if is_right and lanes <= threads and lanes * width < 2 * sizes.columns + 8 * width and rows < 2 * sizes.rows:
                yield GpuScatterRowsParams(threads, lanes, width, rows, part_rows)


def _row_works(sizes: ScatterSizes, params: GpuScatterRowsParams, gpu: Gpu) -> tuple[Work, ...]:
    """Return the work of the kernel that lists updates, of the one that adds them, and of its row with the most."""
    item, index, parts = dtype_bytes(sizes.dtype), dtype_bytes(sizes.index_dtype), params.parts(sizes)
    turns, placed = -(-sizes.updates // params.list_threads), -(-sizes.updates // (parts * WARP_LANES))
    listing = Work(
        blocks=parts,
        threads=params.list_threads,
        regs_per_thread=REGISTERS,
        smem_bytes=params.list_words * 4,
        flops=parts * sizes.updates * 8.0,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=sizes.updates * (index + 4) + sizes.rows * 4,
        l2_bytes=2.0 * parts * sizes.updates * index,
        rounds=2,
        serial_cycles=turns * LIST_CYCLES + placed * PLACE_CYCLES,
    )
    out, added = sizes.rows * sizes.columns * item, sizes.updates * sizes.columns * item
    # A thread's waits: what its rows have before, then a few updates of each row that has some, after their numbers.
    busy_rows = min(1.0, sizes.updates / sizes.rows) * params.rows
    moved = out * (2 if sizes.has_base else 1) + added
    is_apart = params.is_apart(sizes)
    access = 1 if is_apart else params.width
    adding = Work(
        blocks=params.blocks(sizes),
        threads=params.threads,
        regs_per_thread=OTHER_REGISTERS + params.rows * (2 + (params.width if is_apart else -(-params.width * item // 4))),
        flops=(added + 2 * out) / item * (2 + ACCESS_FLOPS / access),
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=moved,
        l2_bytes=moved * (VECTOR_BYTES / min(VECTOR_BYTES, access * item)) ** 0.5,
        rounds=1 + busy_rows * max(1.0, sizes.updates / sizes.rows / params.in_flight(sizes)),
    )
    # L2 has the updates of a long list already.
    return listing, adding, _hot_row(params.threads, sizes.updates * HOT_SHARE / params.in_flight(sizes) / 2, gpu)
