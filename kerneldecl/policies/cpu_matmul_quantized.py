"""Owns which register tiles of a GEMM of few rows with integer weights a CPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from kerneldecl.analysis.cpu_features import has_bfloat16_dots
from kerneldecl.analysis.cpu_params import CpuQuantizedParams
from kerneldecl.model import Access, Arch, Block, Candidate, Cpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.cpu import panel_gemm
from kerneldecl.policies.cpu import time_model as model

TEMPLATES = ("cpu_matmul_quantized", "cpu_matmul_quantized_bf16", "cpu_matmul_panels")
AUTO = {"cpu": 8}
HAS_TRACES = False

MOST_ROWS = 64
"""Rows of A at most: with more, weights that are dequantised once, into panels, are multiplied faster."""
ROWS = (1, 2, 3, 4, 8)
TILES = (1, 2, 4, 6, 8, 12, 16)
DEQUANTISE_CYCLES = 3.5
"""Cycles of a vector of weights: widened, masked, shifted to zero, converted, scaled (AVX-512, by counting instructions)."""
SUM_CYCLES = 40.0
"""Cycles in which a vector of partial sums becomes one result, and that is stored."""
COPY_CYCLES = 2.0
"""Cycles of an element of A on its way to float32."""
BF16_STEP = 32
"""Weights that one instruction multiplies, or looks up, in bfloat16."""
BF16_OPERATIONS = {4: 4, 8: 8}
"""Instructions for a vector of weights of so many bits: widened, shifted, combined, looked up in a table, or widened, converted and scaled
in halves, rounded. Two of them take the time of one product, which needs half of the units."""
TABLE_CYCLES = 5.0
"""Cycles of the table of a group of a row of W: a dozen instructions, of which several start in a cycle."""
BF16_SUM_CYCLES = 20.0
"""Cycles in which a vector of partial sums becomes one result beside dot products: 16 and 64 rows by 4096 x 4096 (Zen 4, November 2026)."""
LOADS = 0.125
"""Share of the loads that does not overlap with dot products in bfloat16: 3 x 8 rows take 2.9 ms, 2 x 8 3.4 (Zen 4, November 2026)."""
BF16_CHAINS = 0.75
"""Share of the latency of a fused multiply-add that vdpbf16ps does not hide behind itself: it has six cycles, and tiles overlap."""


@dataclass(frozen=True)
class Quantized:
    """A GEMM with integer weights as the model sees it."""

    m: int
    n: int
    k: int
    weight_bytes: int
    bf16_group: int = 0
    """Weights along k that share all factors, at least; 0 where `cpu_matmul_quantized_bf16` does not fit."""

    @property
    def bits(self) -> int:
        """Return the bits of a weight."""
        return 8 * self.weight_bytes // (self.n * self.k)


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the register tiles with the least predicted time, best first; nothing for what is no such GEMM, or one of many rows."""
    gemm = quantized_of(space)
    if gemm is None or gemm.m > MOST_ROWS:
        return ()
    cpu = arch.the_cpu
    found = [estimate(gemm, params, cpu) for params in choices(gemm, cpu)]
    if gemm.bf16_group and has_bfloat16_dots(arch):
        found += [bf16_estimate(gemm, params, cpu) for params in choices(gemm, cpu)]
        if gemm.n >= model.compute_lanes(cpu, "float32"):
            panels = in_panels(gemm)
            found += [panel_gemm.estimate(panels, each, cpu) for each in panel_gemm.choices(panels, cpu)]
    return model.ranked(found)[:top_k]


def quantized_of(space: IterSpace) -> Quantized | None:
    """Return the GEMM [m, k] x [n, k] whose second operand is made of integers of 4 or 8 bits, None for any other function."""
    block = model.two_operand_reduction(space)
    if block is None or [axis.kind for axis in block.axes] != ["spatial", "spatial", "reduce"]:
        return None
    m, n, k = (axis.extent for axis in block.axes)
    weights = block.reads[1]
    made = next((each for each in space.blocks if each.writes[0].operand == weights.operand), None)
    if made is None or weights.shape != (n, k) or block.reads[0].shape != (m, k):
        return None
    stored = [access for access in made.reads if _is_stored(access, n, k)]
    if len(stored) != 1:
        return None
    is_bf16 = {read.dtype for read in block.reads} == {"bfloat16"} and block.reads[0].operand in space.inputs
    return Quantized(m, n, k, stored[0].shape[1] * n, bf16_group=_group(made, stored[0], n, k) if is_bf16 else 0)


def in_panels(gemm: Quantized) -> panel_gemm.PanelGemm:
    """Return the GEMM whose weights are dequantised into panels of pairs of bfloat16."""
    return panel_gemm.PanelGemm(
        batch=1,
        m=gemm.m,
        n=gemm.n,
        k=gemm.k,
        a_bytes=2,
        weight_bytes=gemm.weight_bytes,
        is_a_row_major=True,
        is_b_row_major=False,
        pairs=True,
        bits=gemm.bits,
    )


def _group(made: Block, stored: Access, n: int, k: int) -> int:
    """Return a lower bound of the weights along k that share all factors; 0 where they fill no vectors of bfloat16."""
    factors = [access.shape for access in made.reads if access.operand != stored.operand and len(access.shape) == 2]
    along_k = [shape[:1] if shape[1] == n else shape[1:] if shape[0] == n else shape for shape in factors]
    found = min((k // extent for extents in along_k for extent in extents), default=k)
    return found if found % BF16_STEP == 0 else 0


def _is_stored(access: Access, n: int, k: int) -> bool:
    """Say whether an access is to W: a weight a byte, or two."""
    return access.dtype in {"uint8", "int8"} and access.shape in {(n, k), (n, k // 2)} and dtype_bytes(access.dtype) == 1


def choices(gemm: Quantized, cpu: Cpu) -> Iterator[CpuQuantizedParams]:
    """Yield the register tiles that fit the vector registers, beside a tile's weights and a vector of A."""
    for rows, tile_m in itertools.product(ROWS, sorted({min(tile, gemm.m) for tile in TILES})):
        if rows <= gemm.n and rows * (tile_m + 1) + 3 <= cpu.vector_registers:
            yield CpuQuantizedParams(rows, tile_m)


def estimate(gemm: Quantized, params: CpuQuantizedParams, cpu: Cpu) -> model.Estimate:
    """Return the predicted time: A is copied, then each tile of its rows meets all weights, which are dequantised again."""
    lanes = model.compute_lanes(cpu, "float32")
    strips, tiles = -(-gemm.m // params.tile_m), -(-gemm.n // params.rows)
    multiply = max(params.rows * params.tile_m / cpu.fma_per_cycle, params.tile_m * cpu.vector_bytes / cpu.l1_bytes_per_cycle)
    step = max(params.rows * DEQUANTISE_CYCLES + multiply, model.FMA_LATENCY_CYCLES)
    cycles = strips * tiles * (gemm.k / lanes * step + params.rows * params.tile_m * SUM_CYCLES)
    near = strips * tiles * params.tile_m * gemm.k * 4.0
    works = (
        model.Work(compute_cycles=gemm.m * gemm.k * COPY_CYCLES),
        model.Work(
            compute_cycles=cycles / cpu.cores,
            l2_bytes=near / cpu.cores if params.tile_m * gemm.k * 4 > cpu.l1d_bytes else 0.0,
            dram_bytes=gemm.weight_bytes if gemm.weight_bytes > cpu.l3_bytes else 0.0,
            parallel_regions=1,
        ),
    )
    return model.estimate_of(cpu, params.candidate(), works, (params.rows, params.tile_m))


def bf16_estimate(gemm: Quantized, params: CpuQuantizedParams, cpu: Cpu) -> model.Estimate:
    """Return the predicted time in bfloat16: conversions of weights, and half as many multiplications, which share the vector units."""
    strips, tiles = -(-gemm.m // params.tile_m), -(-gemm.n // params.rows)
    products = params.rows * params.tile_m / cpu.fma_per_cycle
    issued = (products + params.rows * BF16_OPERATIONS[gemm.bits]) / 2
    loads = (params.tile_m + params.rows / 4) * cpu.vector_bytes / cpu.l1_bytes_per_cycle
    step = max(products, issued, loads, BF16_CHAINS * model.FMA_LATENCY_CYCLES) + LOADS * loads
    tables = gemm.k / gemm.bf16_group * params.rows * TABLE_CYCLES if gemm.bits < 8 else 0.0
    cycles = strips * tiles * (gemm.k / BF16_STEP * step + tables + params.rows * params.tile_m * BF16_SUM_CYCLES)
    strip_bytes = params.tile_m * gemm.k * 2.0
    work = model.Work(
        compute_cycles=cycles / cpu.cores,
        l2_bytes=strips * tiles * strip_bytes / cpu.cores if strip_bytes > cpu.l1d_bytes / 2 else 0.0,
        dram_bytes=gemm.weight_bytes if gemm.weight_bytes > cpu.l3_bytes else 0.0,
        parallel_regions=1,
    )
    return model.estimate_of(cpu, Candidate.of(TEMPLATES[1], params._asdict()), [work], (params.rows, params.tile_m))
