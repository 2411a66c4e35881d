"""Owns which rows and columns of the result a thread block should own where rows are added at indices, and what to try first.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.scatter import GpuScatterParams, ScatterSizes, scatter_of, smem_sums, sum_bytes, takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.time_model import DRAM_LATENCY_SECS, Work, access_widths, ranked

TEMPLATES = ("gpu_scatter_add",)
AUTO = {"cuda": 54}
HAS_TRACES = False

TILE_ROWS = (1, 4, 8, 16, 32, 64, 128)
LANES = (128, 64, 32, 16, 8, 256)
WARPS = (8, 4, 16)
REGISTERS = 40
LOOK_CYCLES = 45.0
"""Cycles in which a thread block looks at as many indices as it has threads: a load, a barrier that counts."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time; nothing for what does not add rows at indices."""
    sizes, gpu = scatter_of(space), arch.the_gpu
    if sizes is None or not takes(sizes):
        return ()
    fitting = (params for params in _choices(sizes) if params.fits(sizes, gpu))
    return ranked("gpu_scatter_add", gpu, ((params._asdict(), (_work(sizes, params, gpu),)) for params in fitting), top_k)


def _choices(sizes: ScatterSizes) -> Iterator[GpuScatterParams]:
    """Yield the search space; some of it may not fit."""
    for width in access_widths(sizes.columns, dtype_bytes(sizes.dtype)):
        for tile_rows, lanes, warps in itertools.product(TILE_ROWS, LANES, WARPS):
            if tile_rows < 2 * sizes.rows and lanes * width < 2 * sizes.columns + 8 * width:
                yield GpuScatterParams(tile_rows, lanes, width, warps)


def _work(sizes: ScatterSizes, params: GpuScatterParams, gpu: Gpu) -> Work:
    item, blocks = dtype_bytes(sizes.dtype), params.blocks(sizes)
    out = sizes.rows * sizes.columns * item
    looked = blocks * sizes.updates * dtype_bytes(sizes.index_dtype)
    turns = -(-sizes.updates // params.threads)
    # Updates of one tile are added one after another, as many at once as there are rows of threads.
    found = sizes.updates * min(1.0, params.tile_rows / sizes.rows) / max(1, min(params.tile_rows, params.threads // params.lanes))
    return Work(
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
