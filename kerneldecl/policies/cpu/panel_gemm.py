"""Owns the time model of GEMMs by panels of B on CPUs, in float32 or by pairs of bfloat16, and their search space.

Knows nothing of how a function is read or of TVM.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kerneldecl.analysis.cpu_params import SERIAL_ELEMENTS, SERIAL_FMAS, CpuPanelParams
from kerneldecl.model import Cpu
from kerneldecl.policies.cpu import time_model as model

TILES = (1, 2, 3, 4, 6, 8, 12, 14)
VECTORS = (1, 2, 3, 4)
BLOCKS_K = (128, 256, 512, 1024)
BLOCKS_M = (128, 512, 4096)
PAIRS_CHAIN_CYCLES = 6
"""Cycles from a vdpbf16ps to the next one that uses its result (Agner Fog, instruction tables: Zen 4)."""
WEIGHT_CYCLES = {0: 0.0, 4: 2.0, 8: 6.5}
"""Cycles of a vector of weights of so many bits, 0 for bfloat16, on its way to a panel: by counting instructions."""
ELEMENT_CYCLES = 1.5
"""Cycles of an element that is copied by itself: of A where rows are contiguous, of a last step along k."""
STORE_CYCLES = 6.0
"""Cycles of a vector of results, with its epilogue, about."""
STRIP_CYCLES = 60.0
"""Cycles of a register tile of a block besides its fused multiply-adds: accumulators are loaded and stored."""
LOADS = 0.125
"""Share of the loads that does not overlap with arithmetic, as in `cpu_matmul_quantized`."""


@dataclass(frozen=True)
class PanelGemm:
    """A GEMM as the model sees it."""

    batch: int
    m: int
    n: int
    k: int
    a_bytes: int
    """Bytes of one element of A."""
    weight_bytes: int
    """Bytes of all of B as it is stored."""
    is_a_row_major: bool
    """True where k is the last index of A."""
    is_b_row_major: bool
    """True where n is the last index of B."""
    pairs: bool
    """Whether pairs of bfloat16 are multiplied."""
    bits: int = 0
    """Bits of a weight that is dequantised; 0 where none is."""

    def lanes(self, cpu: Cpu) -> int:
        """Return the sums of a vector."""
        return min(model.compute_lanes(cpu, "float32"), 1 << (self.n.bit_length() - 1))

    def step(self, cpu: Cpu) -> int:
        """Return the neighbours along k of a vector of elements."""
        return self.lanes(cpu) * (2 if self.pairs else 1)


def choices(gemm: PanelGemm, cpu: Cpu) -> Iterator[CpuPanelParams]:
    """Yield the register tiles that fit the vector registers, beside a row of a panel and an element of A, with blocks of both operands."""
    lanes, step = gemm.lanes(cpu), gemm.step(cpu)
    tiles = sorted({min(tile, gemm.m) for tile in TILES})
    blocks_k = sorted({min(block, -(-gemm.k // step) * step) for block in BLOCKS_K})
    blocks_m = sorted({min(block, gemm.m) for block in BLOCKS_M})
    for tile_m, vectors, block_k, block_m in itertools.product(tiles, VECTORS, blocks_k, blocks_m):
        if vectors * lanes <= gemm.n and vectors * (tile_m + 1) + 1 <= cpu.vector_registers and tile_m <= block_m:
            yield CpuPanelParams(tile_m, vectors, block_k, block_m)


def estimate(gemm: PanelGemm, params: CpuPanelParams, cpu: Cpu) -> model.Estimate:
    """Return the predicted time: A is copied, then each task copies panels of B and multiplies its rows by them."""
    lanes, step, nbytes = gemm.lanes(cpu), gemm.step(cpu), 2.0 if gemm.pairs else 4.0
    rows_of_panel, width = -(-gemm.k // step) * lanes, params.vectors * lanes
    panels, strips = -(-gemm.n // width), -(-gemm.m // params.tile_m)
    rows = -(-strips // max(1, params.block_m // params.tile_m))
    blocks = -(-gemm.k // params.block_k)
    fmas = params.tile_m * params.vectors / cpu.fma_per_cycle
    loads = (params.vectors + params.tile_m / 2) * cpu.vector_bytes / cpu.l1_bytes_per_cycle
    cycles = max(fmas, loads, PAIRS_CHAIN_CYCLES if gemm.pairs else model.FMA_LATENCY_CYCLES) + LOADS * loads
    tiles = strips * (rows_of_panel * cycles + blocks * STRIP_CYCLES + params.tile_m * params.vectors * STORE_CYCLES)
    panel_bytes = min(params.block_k, gemm.k) * width * nbytes
    is_near = panel_bytes <= cpu.l1d_bytes / 2
    packs = rows * (rows_of_panel * params.vectors * _copy_cycles(gemm, lanes) + width * (gemm.k % step) * ELEMENT_CYCLES)
    if not is_near:
        packs += rows * blocks * 2 * panel_bytes / cpu.l2_bytes_per_cycle
    tasks = gemm.batch * panels * rows
    is_parallel = tasks > 1 and gemm.batch * gemm.m * gemm.n * gemm.k > SERIAL_FMAS
    busiest = model.busiest_share(tasks, cpu.cores) if is_parallel else 1.0
    share = busiest * gemm.batch * panels
    near_bytes = strips * (gemm.k * params.tile_m * nbytes + (0.0 if is_near else blocks * panel_bytes))
    works = (
        _copy_of_a(gemm, strips, nbytes, cpu),
        model.Work(
            compute_cycles=share * (packs + tiles),
            l2_bytes=share * near_bytes,
            l3_bytes=busiest * rows * gemm.weight_bytes,
            dram_bytes=gemm.weight_bytes if gemm.weight_bytes > cpu.l3_bytes else 0.0,
            parallel_regions=int(is_parallel),
        ),
    )
    return model.estimate_of(cpu, params.candidate(), works, (params.tile_m, params.vectors))


def _copy_cycles(gemm: PanelGemm, lanes: int) -> float:
    """Return the cycles of a vector of a panel: two shuffles for each doubling of a square where k is contiguous, a load and a store."""
    if gemm.is_b_row_major:
        return 5.0 if gemm.pairs else 2.0
    return 2.0 + math.log2(lanes) + WEIGHT_CYCLES[gemm.bits]


def _copy_of_a(gemm: PanelGemm, strips: int, nbytes: float, cpu: Cpu) -> model.Work:
    """Return the work of copying A: in vectors where k is contiguous, else an element after the other."""
    count = gemm.batch * gemm.m * gemm.k
    single = count if not gemm.is_a_row_major else gemm.batch * gemm.m * (gemm.k % gemm.step(cpu))
    cycles = 2 * (count - single) * nbytes / cpu.vector_bytes + single * ELEMENT_CYCLES
    regions = int(gemm.batch * strips > 1 and count > SERIAL_ELEMENTS)
    cores = cpu.cores if regions else 1
    return model.Work(compute_cycles=cycles / cores, l3_bytes=count * (gemm.a_bytes + nbytes) / cores, parallel_regions=regions)
