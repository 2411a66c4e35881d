"""Owns which tiles, warps and pipelines of a product on tensor cores a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kerneldecl.contraction import FRAGMENT, Contraction, contraction_of, tensor_cores_refuse
from kerneldecl.model import Arch, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies._gpu_model import Work, occupancy, predicted_secs
from kerneldecl.policies._gpu_products import MAX_GRID_Z, Estimate, block_extents, dram_bytes, ranked, raster_of
from kerneldecl.policies._gpu_windows import estimates, windows_of

TEMPLATES = ("gpu_matmul_tc", "gpu_conv2d_tc")

BLOCKS = (16, 32, 64, 96, 128, 192, 256)
STAGES = (5, 4, 3, 2)
WARPS = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (2, 4), (4, 2))
GATHERED_STEPS = 256
"""Products with longer sums spend too little on their results for it to matter how these are stored."""
SAME_TILE = 4
NARROW = 32
"""Tiles up to this many rows or columns wait more than they compute, and take longer steps."""
OTHER_REGISTERS = 48
"""Of a thread, beside sums and fragments: addresses and counters. Kernels compiled for sm_90 have 40 to 60."""
MMA_SYNC_SHARE = 0.62
"""What mma.sync reaches of the tensor cores' rate on a GPU that also has wgmma, which alone feeds them in full
(Luo et al., Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking, 2024, section on tensor cores)."""
LOAD_CYCLES = 33.0
"""From an ldmatrix to what uses it, which only other warps can fill (same source)."""
BARRIER_CYCLES = 60.0
PARTITIONS = 4
"""Of an SM, each with a tensor core and a scheduler of its own."""


@dataclass(frozen=True)
class Tiling:
    """The template's parameters."""

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    stages: int
    raster: int = 1
    gather: int = 0
    parts: int = 1

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def warp_tile(self) -> tuple[int, int]:
        return self.block_m // self.warps_m, self.block_n // self.warps_n

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_matmul_tc", {name: getattr(self, name) for name in self.__dataclass_fields__})


def propose(space: IterSpace, arch: Arch, top_k: int, measured: Sequence[object]) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what tensor cores do not take."""
    product = contraction_of(space)
    if isinstance(product, str) or measured or why_not(space, arch):
        return ()
    gpu = arch.the_gpu
    windows = windows_of(space, product)
    found = [estimates(windows, product, gpu)] if windows else []
    found.append(_estimate(product, tiling, gpu) for tiling in tilings(product, gpu))
    return ranked(itertools.chain(*found), SAME_TILE)[:top_k]


def with_stages(space: IterSpace, arch: Arch, top_k: int, stages: int) -> tuple[Proposal, ...]:
    """Return the tilings with so many stages, best first; nothing for what tensor cores do not take."""
    product, gpu = contraction_of(space), arch.the_gpu
    if isinstance(product, str) or why_not(space, arch):
        return ()
    return ranked((_estimate(product, tiling, gpu) for tiling in tilings(product, gpu, (stages,))), SAME_TILE)[:top_k]


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why tensor cores do not take a computation, as a sentence; empty where they do."""
    product = contraction_of(space)
    if isinstance(product, str):
        return product
    is_long = product.extents[0] > MAX_GRID_Z
    return tensor_cores_refuse(product, arch.the_gpu) or f"its batch is longer than a launch takes: {MAX_GRID_Z}" * is_long


def tensor_cores(space: IterSpace, arch: Arch, template: str) -> str:
    """Return "used" or why a winner with this template does without tensor cores; empty for what multiplies no two operands."""
    reductions = [block for block in space.blocks if block.is_reduction]
    if len(reductions) != 1 or len(reductions[0].reads) < 2:
        return ""
    return "used" if template in TEMPLATES else why_not(space, arch) or "no schedule for them that was tried is right"


def tilings(product: Contraction, gpu: Gpu, all_stages: Sequence[int] = STAGES) -> Iterator[Tiling]:
    """Yield the lattice: tiles whose sums fit registers and whose stages fit shared memory, the first two of `all_stages` that do."""
    _, m, n, k = product.extents
    item_bytes = dtype_bytes(product.left.dtype)
    steps = 32 // item_bytes
    tiles = itertools.product(block_extents(m, BLOCKS), block_extents(n, BLOCKS), (2 * steps, 4 * steps, 8 * steps), WARPS)
    for block_m, block_n, block_k, (warps_m, warps_n) in tiles:
        if block_k > 4 * steps and min(block_m, block_n) > NARROW:
            continue
        if block_m % (FRAGMENT * warps_m) or block_n % (FRAGMENT * warps_n) or not _is_sensible(block_m // warps_m, block_n // warps_n):
            continue
        fitting = [
            stages
            for stages in all_stages
            if stages <= -(-k // block_k) + 1
            and smem_bytes(product, Tiling(block_m, block_n, block_k, warps_m, warps_n, stages)) <= _limit(gpu)
        ]
        for stages, gather in itertools.product(fitting[:2], (0, 1) if k <= GATHERED_STEPS else (0,)):
            bare = Tiling(block_m, block_n, block_k, warps_m, warps_n, stages, gather=gather)
            if registers(product, bare) > gpu.max_registers_per_thread or smem_bytes(product, bare) > _limit(gpu):
                continue
            rows, columns = -(-m // block_m), -(-n // block_n)
            resident = _resident(product, bare, gpu) * gpu.sm_count
            yield dataclasses.replace(bare, raster=raster_of(rows, columns, max(1, resident), block_m, block_n))


def _is_sensible(warp_m: int, warp_n: int) -> bool:
    """Say whether a warp's tile is neither too large for registers nor much longer than wide."""
    return warp_m * warp_n <= 128 * 64 and max(warp_m, warp_n) <= 8 * min(warp_m, warp_n)


def _limit(gpu: Gpu) -> int:
    return gpu.smem_per_block_optin_bytes


def smem_bytes(product: Contraction, tiling: Tiling) -> int:
    """Return the shared memory of a block: all stages of both operands, with the padding of rows that cannot be permuted.

    Results that are gathered come where the operands were.
    """
    operands = tiling.stages * sum(
        _tile_bytes(extent, tiling.block_k, dtype_bytes(factor.dtype), is_k_last=factor.is_k_last)
        for extent, factor in ((tiling.block_m, product.left), (tiling.block_n, product.right))
    )
    gathered = tiling.block_m * (-(-tiling.block_n // 32) * 32 + 8) * dtype_bytes(product.sums_dtype)
    return max(operands, tiling.gather * gathered)


def _tile_bytes(extent: int, block_k: int, item_bytes: int, *, is_k_last: bool) -> int:
    rows, columns = (extent, block_k) if is_k_last else (block_k, extent)
    # As the template has it: 16-bit rows that can be permuted are, others end 16 bytes past a multiple of 32 elements.
    if item_bytes != 2 or columns not in {32, 64, 128, 256}:
        columns = -(-columns // 32) * 32 + 16 // item_bytes
    return rows * columns * item_bytes


def registers(product: Contraction, tiling: Tiling) -> int:
    """Return the registers of a thread: its sums, the fragments of one step, and the rest."""
    warp_m, warp_n = tiling.warp_tile
    sums = warp_m * warp_n * dtype_bytes(product.sums_dtype) // (32 * 4)
    return sums + (warp_m + warp_n) * 32 // (32 * 4) + OTHER_REGISTERS


def _resident(product: Contraction, tiling: Tiling, gpu: Gpu) -> int:
    return occupancy(gpu, tiling.warps * gpu.warp_size, registers(product, tiling), smem_bytes(product, tiling))


def _estimate(product: Contraction, tiling: Tiling, gpu: Gpu) -> Estimate:
    batch, m, n, k = product.extents
    rows, columns, steps = -(-m // tiling.block_m), -(-n // tiling.block_n), -(-k // tiling.block_k)
    blocks = batch * rows * columns
    resident = _resident(product, tiling, gpu)
    item_bytes = dtype_bytes(product.left.dtype)
    block_flops = 2.0 * tiling.block_m * tiling.block_n * tiling.block_k
    tile_bytes = (tiling.block_m + tiling.block_n) * tiling.block_k * item_bytes
    warp_m, warp_n = tiling.warp_tile
    work = Work(
        blocks=blocks,
        threads=tiling.warps * gpu.warp_size,
        regs_per_thread=registers(product, tiling),
        smem_bytes=smem_bytes(product, tiling),
        flops=blocks * steps * block_flops,
        flops_per_s=_rate(product, tiling, gpu, min(resident, -(-blocks // gpu.sm_count))),
        dram_bytes=dram_bytes(product, gpu, (tiling.block_m, tiling.block_n, tiling.raster), max(1, resident) * gpu.sm_count),
        l2_bytes=blocks * steps * tile_bytes + batch * m * n * dtype_bytes(product.sums_dtype),
        moved_smem_bytes=blocks * steps * (tile_bytes + tiling.warps * (warp_m + warp_n) * tiling.block_k * item_bytes),
        rounds=2 + steps / max(1, tiling.stages - 1),
        barriers=steps * (2 if tiling.stages > 1 else 3),
    )
    return Estimate(tiling.candidate(), predicted_secs(gpu, work), (tiling.block_m, tiling.block_n))


def _rate(product: Contraction, tiling: Tiling, gpu: Gpu, resident: int) -> float:
    """Return the operations a second of the whole GPU, while so many blocks are on an SM.

    Between two barriers, a partition's warps multiply for so long and wait once for each step's fragments and once for
    the barrier; the more they multiply, the less the waiting counts.
    """
    rate = gpu.tensor_rate(product.left.dtype) * (MMA_SYNC_SHARE if gpu.wgmma_arch else 1.0)
    rate *= gpu.float16_sums_speedup if product.sums_dtype == "float16" else 1.0
    cycle_flops = rate / (gpu.sm_count * PARTITIONS * gpu.clock_hz)
    warp_m, warp_n = tiling.warp_tile
    steps = tiling.block_k * dtype_bytes(product.left.dtype) // 32
    warps = max(1, resident) * tiling.warps / PARTITIONS
    multiply_cycles = warps * 2.0 * warp_m * warp_n * tiling.block_k / cycle_flops
    return rate * min(1.0, warps) * multiply_cycles / (multiply_cycles + steps * LOAD_CYCLES + BARRIER_CYCLES)
