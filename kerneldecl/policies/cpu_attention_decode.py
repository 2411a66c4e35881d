"""Owns into which tasks and register tiles attention against a KV cache should be cut on a CPU, and what to try first.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kerneldecl.analysis.attention_decode import DecodeSizes, decode_of
from kerneldecl.analysis.cpu_params import CpuDecodeParams
from kerneldecl.model import Arch, Cpu, IterSpace, Proposal
from kerneldecl.policies.cpu import time_model as model

TEMPLATES = ("cpu_attention_decode",)
AUTO = {"cpu": 24}
HAS_TRACES = False

TILES_M = (4, 2, 1)
TILES_N = (4, 2, 1)
POWER_CYCLES = 24.0
"""Cycles of a vector of powers, with the loads and maxima of its scores, about."""
SUM_CYCLES = 10.0
"""Cycles in which a vector of partial sums becomes a score, about."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no attention against a cache."""
    sizes = decode_of(space)
    if sizes is None or not sizes.has_lengths or math.gcd(_lanes(arch.the_cpu), sizes.head_dim, sizes.value_dim) < 2:
        return ()
    return model.ranked(estimate(sizes, params, arch.the_cpu) for params in choices(sizes, arch.the_cpu))[:top_k]


def choices(sizes: DecodeSizes, cpu: Cpu) -> Iterator[CpuDecodeParams]:
    """Yield the tiles that fit the vector registers; heads of keys are divided among tasks where they are too few for all cores."""
    rows = sizes.group_rows
    heads = sizes.batch * sizes.kv_heads
    for part in {rows, *(each for each in model.divisors(rows) if heads * (rows // each) >= cpu.cores > heads)}:
        for tile_m in TILES_M:
            for tile_n in TILES_N:
                if part % tile_m == 0 and tile_m * tile_n + tile_m + 1 <= cpu.vector_registers:
                    yield CpuDecodeParams(part, tile_m, tile_n)


def estimate(sizes: DecodeSizes, params: CpuDecodeParams, cpu: Cpu) -> model.Estimate:
    """Return the predicted time of sequences of full length."""
    lanes = math.gcd(_lanes(cpu), sizes.head_dim, sizes.value_dim)
    tasks = sizes.batch * sizes.kv_heads * (sizes.group_rows // params.rows)
    parts, tiles = sizes.head_dim / lanes, params.rows / params.tile_m
    loads = (params.tile_m + params.tile_n) * cpu.vector_bytes / cpu.l1_bytes_per_cycle
    step = max(params.tile_m * params.tile_n / cpu.fma_per_cycle, loads, model.FMA_LATENCY_CYCLES)
    scores = tiles / params.tile_n * (parts * step + params.tile_m * params.tile_n * SUM_CYCLES)
    values = tiles * sizes.value_dim / lanes * max(params.tile_m / cpu.fma_per_cycle, 1 + params.tile_m / 2)
    cycles = tasks * sizes.keys * (scores + values + params.rows * POWER_CYCLES / lanes)
    share = model.busiest_share(tasks, cpu.cores)
    cache_bytes = sizes.cache_bytes * (sizes.group_rows // params.rows)
    work = model.Work(
        compute_cycles=share * cycles,
        l3_bytes=share * cache_bytes,
        dram_bytes=cache_bytes if sizes.cache_bytes > cpu.l3_bytes else 0.0,
        parallel_regions=int(tasks > 1),
    )
    return model.estimate_of(cpu, params.candidate(), [work], (params.tile_m, params.tile_n))


def _lanes(cpu: Cpu) -> int:
    return model.compute_lanes(cpu, "float32")
