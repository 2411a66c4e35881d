"""Owns which register tiles of a GEMM of int8 by int8 a CPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.cpu_features import byte_dots
from kerneldecl.analysis.cpu_params import CpuInt8Params
from kerneldecl.model import Arch, Cpu, IterSpace, Proposal
from kerneldecl.policies.cpu import time_model as model
from kerneldecl.policies.cpu_matmul import Gemm, gemm_of

TEMPLATES = ("cpu_matmul_int8",)
AUTO = {"cpu": 9}
HAS_TRACES = False

TILES_M = (1, 2, 3, 4, 6, 8)
TILES_N = (1, 2, 3, 4, 6, 8)
SUM_CYCLES = 16.0
"""Cycles in which a vector of partial sums becomes one result, and that is scaled and stored: by counting instructions."""
LOADS = 0.125
"""Share of the loads that does not overlap with arithmetic: breaks the tie of tiles that are equally fast otherwise. Assumed."""
CHAINS = 2
"""Register tiles whose chains of additions overlap: measured on a Zen 4 in November 2026, one row by 4096 x 4096 in 0.61 ms with 1 x 1."""
STEP_BYTES = {"vnni": 1, "pairs": 2}
"""Bytes of an element as an instruction takes it."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the register tiles with the least predicted time, best first; nothing for what is no such GEMM."""
    gemm = int8_gemm_of(space)
    return () if gemm is None else model.ranked(estimate(gemm, params, arch.the_cpu) for params in choices(gemm, arch))[:top_k]


def int8_gemm_of(space: IterSpace) -> Gemm | None:
    """Return the GEMM [m, k] x [n, k] of int8 that a function is, None for any other function."""
    block, gemm = model.two_operand_reduction(space), gemm_of(space)
    if block is None or gemm is None or gemm.batch > 1 or any(gemm.computed) or gemm.out_dtype != "int32":
        return None
    shapes = {read.shape for read in block.reads}
    is_int8 = {read.dtype for read in block.reads} == {"int8"} and shapes == {(gemm.m, gemm.k), (gemm.n, gemm.k)}
    return gemm if is_int8 and gemm.is_a_row_major and not gemm.is_b_row_major else None


def choices(gemm: Gemm, arch: Arch) -> Iterator[CpuInt8Params]:
    """Yield the register tiles that fit the vector registers, beside a tile's weights and a vector of A, where k is whole vectors."""
    cpu = arch.the_cpu
    for dot, tile_m, tile_n in itertools.product(byte_dots(arch), sorted({min(tile, gemm.m) for tile in TILES_M}), TILES_N):
        is_whole = gemm.k % (cpu.vector_bytes // STEP_BYTES[dot]) == 0
        if is_whole and tile_n <= gemm.n and tile_n * (tile_m + 1) + 2 <= cpu.vector_registers:
            yield CpuInt8Params(tile_m, tile_n, dot)


def estimate(gemm: Gemm, params: CpuInt8Params, cpu: Cpu) -> model.Estimate:
    """Return the predicted time: A is copied, then each tile of its rows meets all weights."""
    item, per_core = STEP_BYTES[params.dot], 1 / cpu.cores
    steps = gemm.k * item / cpu.vector_bytes
    strips, tiles = -(-gemm.m // params.tile_m), -(-gemm.n // params.tile_n)
    # vpmaddwd needs an addition besides, and weights are widened.
    operations = params.tile_m * params.tile_n * item + (params.tile_n if params.dot == "pairs" else 0)
    loads = (params.tile_m + params.tile_n) * cpu.vector_bytes / cpu.l1_bytes_per_cycle
    latency = model.FMA_LATENCY_CYCLES / CHAINS
    step = max(operations / cpu.fma_per_cycle, loads, latency) + LOADS * loads
    offsets = steps * max(params.tile_n / cpu.fma_per_cycle, latency) if params.dot == "vnni" else 0.0
    cycles = tiles * (offsets + strips * (steps * step + params.tile_m * params.tile_n * SUM_CYCLES))
    is_near = params.tile_m * gemm.k * item * strips <= cpu.l1d_bytes // 2
    operand_bytes = gemm.k * (gemm.m + gemm.n)
    # Rows of W that are far apart are no stream for the prefetcher: 0.88 ms for 2 rows at once, 0.61 for one (Zen 4, 1 row, November 2026).
    far_bytes = gemm.k * gemm.n if params.tile_n > 1 and gemm.k >= model.HALF_PAGE_BYTES else 0
    works = (
        model.Work(compute_cycles=gemm.m * steps * 2.0),
        model.Work(
            compute_cycles=cycles * per_core,
            l2_bytes=(far_bytes + (0 if is_near else tiles * gemm.m * gemm.k * item)) * per_core,
            l3_bytes=operand_bytes * per_core,
            dram_bytes=operand_bytes if operand_bytes > cpu.l3_bytes else 0.0,
            parallel_regions=1,
        ),
    )
    return model.estimate_of(cpu, params.candidate(), works, (params.tile_m, params.tile_n))
