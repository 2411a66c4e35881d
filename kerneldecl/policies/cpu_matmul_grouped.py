"""Owns which register tiles of a grouped GEMM a CPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.matmul_grouped import CpuGroupedParams, GroupedSizes, grouped_of
from kerneldecl.model import Arch, Cpu, IterSpace, Proposal
from kerneldecl.policies.cpu import time_model as model

TEMPLATES = ("cpu_matmul_grouped",)
AUTO = {"cpu": 12}
HAS_TRACES = False

MOST = 8
"""Proposals at most."""
ROWS = (1, 2, 4, 6, 8, 12)
VECTORS = (4, 3, 2, 1)
COPY_CYCLES = 1.0
"""Cycles of one core to copy an element of weights, or of A, to float32, about: half of it are shuffles. Assumed."""
TILE_CYCLES = 30.0
"""Cycles of a register tile besides its multiplications, as for attention."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no grouped GEMM."""
    sizes = grouped_of(space)
    if sizes is None:
        return ()
    return model.ranked([estimate(sizes, params, arch.the_cpu) for params in choices(arch.the_cpu)])[: min(top_k, MOST)]


def choices(cpu: Cpu) -> Iterator[CpuGroupedParams]:
    """Yield the register tiles that fit the vector registers, beside a row of vectors and a number that is spread."""
    for tile_m, vectors in itertools.product(ROWS, VECTORS):
        if vectors * (tile_m + 1) + 1 <= cpu.vector_registers:
            yield CpuGroupedParams(tile_m, vectors)


def estimate(sizes: GroupedSizes, params: CpuGroupedParams, cpu: Cpu) -> model.Estimate:
    """Return the predicted time: copies of weights and rows, register tiles of groups of equal size, and memory."""
    lanes = model.compute_lanes(cpu, "float32")
    rows = sizes.places / (2 if sizes.is_masked else 1)
    groups = min(sizes.groups, rows)
    tiles = groups * -(-rows // (groups * params.tile_m))
    panels = -(-sizes.n // (params.vectors * lanes))
    loads = (params.vectors + params.tile_m / 2) * cpu.vector_bytes / cpu.l1_bytes_per_cycle
    step = max(params.tile_m * params.vectors / cpu.fma_per_cycle, loads, model.FMA_LATENCY_CYCLES)
    tile_cycles = sizes.k * (step + COPY_CYCLES * params.tile_m / lanes) + TILE_CYCLES
    copied = groups * panels * params.vectors * sizes.k * COPY_CYCLES
    share = model.busiest_share(round(groups) * panels, cpu.cores)
    work = model.Work(
        compute_cycles=share * (tiles * panels * tile_cycles + copied),
        l2_bytes=share * tiles * panels * sizes.k * params.vectors * cpu.vector_bytes,
        dram_bytes=sizes.bytes_moved,
        parallel_regions=1,
    )
    return model.estimate_of(cpu, params.candidate(), [work], (params.tile_m, params.vectors * lanes))
