"""Owns among how many threads a row of a norm with a residual or a quantised output should be shared on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.fused_norm import FusedNormParams, NormSizes, norm_sizes_of, takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, LINE_BYTES, WARP_CYCLES, Timed, Work, access_widths, load_rounds, ranked
from kerneldecl.policies.gpu_rowwise import INSTRUCTION_CYCLES, INSTRUCTION_FLOPS, OTHER_REGISTERS, SHUFFLE_CYCLES, WEIGHTS_SHARE

TEMPLATES = ("gpu_fused_norm",)
AUTO = {"cuda": 57}
HAS_TRACES = False

ROW_THREADS = (32, 64, 128, 256, 512, 1024)
BLOCK_THREADS = (128, 256, 512, 1024)
ELEMENT_INSTRUCTIONS = 8.0
"""Instructions for an element: converted and added, squared, scaled twice, compared, scaled and converted."""
SHUFFLES = 10
"""Shuffles for a statistic: five before the exchange and up to five after it."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time; nothing for what is no such norm, or whose rows no thread block keeps."""
    sizes, gpu = norm_sizes_of(space), arch.the_gpu
    if sizes is None or not takes(sizes):
        return ()
    return ranked("gpu_fused_norm", gpu, (_timed(sizes, params, gpu) for params in choices(sizes, gpu)), top_k)


def choices(sizes: NormSizes, gpu: Gpu) -> Iterator[FusedNormParams]:
    """Yield the search space: few rows share one thread block, however few threads it has then."""
    shapes = itertools.product(access_widths(sizes.columns, dtype_bytes(sizes.dtype)), ROW_THREADS, BLOCK_THREADS)
    all_params = (FusedNormParams(width, threads, max(1, min(sizes.rows, block // threads))) for width, threads, block in shapes)
    for params in dict.fromkeys(all_params):
        # Threads of a row should not be mostly idle.
        is_filled = params.threads == min(ROW_THREADS) or params.threads < 2 * sizes.columns // params.width
        if is_filled and params.fits(sizes, gpu):
            yield params


def _timed(sizes: NormSizes, params: FusedNormParams, gpu: Gpu) -> Timed:
    return params._asdict(), (_work(sizes, params, gpu),)


def _work(sizes: NormSizes, params: FusedNormParams, gpu: Gpu) -> Work:
    element, elements = dtype_bytes(sizes.dtype), sizes.rows * sizes.columns
    steps, vector_bytes = params.steps(sizes), params.width * element
    kept = steps * params.width
    waste = params.threads * kept / sizes.columns
    lines = max(1.0, LINE_BYTES / (min(params.threads, sizes.columns // params.width) * params.width * element))
    exchanges = sizes.exchanges if params.threads > gpu.warp_size else 0
    # Large thread blocks wait for some loads before they start others: 32 elements of a row a thread have room in 64 registers (nvcc 13.0).
    most = max(OTHER_REGISTERS + kept, gpu.registers_per_sm // (params.threads * params.rows))
    return Work(
        blocks=-(-sizes.rows // params.rows),
        threads=params.threads * params.rows,
        regs_per_thread=min(most, OTHER_REGISTERS + kept * (1 + math.ceil(element * (2 + sizes.has_residual) / 4))),
        smem_bytes=params.smem_bytes(sizes),
        flops=elements * (INSTRUCTION_FLOPS * ELEMENT_INSTRUCTIONS + 4 * ACCESS_FLOPS / params.width) * waste,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=sizes.moved_bytes,
        l2_bytes=sizes.moved_bytes * waste * lines,
        # Weights are read behind the statistics.
        rounds=load_rounds(steps * (1 + sizes.has_residual), vector_bytes)
        + WEIGHTS_SHARE * load_rounds(steps * (2 if sizes.kind == "layer_norm" else 1), vector_bytes),
        barriers=exchanges,
        serial_cycles=INSTRUCTION_CYCLES * ELEMENT_INSTRUCTIONS * kept + sizes.exchanges * SHUFFLES * SHUFFLE_CYCLES,
        warp_cycles=WARP_CYCLES,
    )
