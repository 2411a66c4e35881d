"""Owns which tiles and pipelines of a product on CUDA cores a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kerneldecl.contraction import Contraction, Factor, contraction_of
from kerneldecl.model import Arch, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies._gpu_model import Work, occupancy, predicted_secs
from kerneldecl.policies._gpu_products import MAX_GRID_Z, Estimate, block_extents, dram_bytes, ranked, raster_of

TEMPLATES = ("gpu_matmul_simt",)

BLOCKS_M = (16, 32, 64, 128, 256)
BLOCKS_N = (32, 64, 128, 256)
BLOCKS_K = (8, 16, 32)
THREAD_TILES = ((4, 4), (4, 8), (8, 4), (8, 8))
WARP_ROWS, WARP_COLUMNS = 4, 8
"""The template's: lanes of a warp."""
THREADS = range(32, 513)
STAGES = (4, 3, 2)
SAME_TILE = 4
OTHER_REGISTERS = 44
"""Of a thread, beside sums and two steps' operands; kernels compiled for sm_90 have 30 to 50."""
BARRIER_CYCLES = 60.0
PARTITIONS = 4
"""Of an SM, each with a scheduler that starts one instruction a cycle."""


@dataclass(frozen=True)
class Tiling:
    """The template's parameters."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    stages: int
    raster: int = 1

    @property
    def threads(self) -> int:
        return self.block_m // self.thread_m * (self.block_n // self.thread_n)

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_matmul_simt", {name: getattr(self, name) for name in self.__dataclass_fields__})


def propose(space: IterSpace, arch: Arch, top_k: int, measured: Sequence[object]) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what is no product."""
    product = contraction_of(space)
    if isinstance(product, str) or measured or product.extents[0] > MAX_GRID_Z:
        return ()
    gpu = arch.the_gpu
    return ranked((_estimate(product, tiling, gpu) for tiling in tilings(product, gpu)), SAME_TILE)[:top_k]


def tilings(product: Contraction, gpu: Gpu) -> Iterator[Tiling]:
    """Yield the lattice: tiles that whole warps divide, with the most stages that fit shared memory."""
    _, m, n, k = product.extents
    tiles = itertools.product(block_extents(m, BLOCKS_M), block_extents(n, BLOCKS_N), block_extents(k, BLOCKS_K), THREAD_TILES)
    for block_m, block_n, block_k, (thread_m, thread_n) in tiles:
        bare = Tiling(block_m, block_n, block_k, thread_m, thread_n, 1)
        if block_m % (thread_m * WARP_ROWS) or block_n % (thread_n * WARP_COLUMNS) or bare.threads not in THREADS:
            continue
        rows, columns = -(-m // block_m), -(-n // block_n)
        resident = max(1, occupancy(gpu, bare.threads, registers(bare), smem_bytes(product, bare)))
        raster = raster_of(rows, columns, resident * gpu.sm_count, block_m, block_n)
        for stages in _stages(product, bare, gpu):
            yield Tiling(block_m, block_n, block_k, thread_m, thread_n, stages, raster)


def _stages(product: Contraction, bare: Tiling, gpu: Gpu) -> list[int]:
    """Return numbers of stages worth trying. Copies that cp.async cannot do are not made ahead."""
    if not gpu.async_copy or min(_copied_bytes(product.left), _copied_bytes(product.right)) < 4:
        return [1]
    steps, stage_bytes = -(-product.extents[3] // bare.block_k), smem_bytes(product, bare)
    return [stages for stages in STAGES if stages <= steps and stages * stage_bytes <= gpu.smem_per_block_optin_bytes][:2] or [1]


def _copied_bytes(factor: Factor) -> int:
    """Return how much one copy takes: k comes first in shared memory, so an operand that has it last is copied by element."""
    return dtype_bytes(factor.dtype) * (1 if factor.is_k_last else factor.vector())


def smem_bytes(product: Contraction, tiling: Tiling) -> int:
    """Return the shared memory of a block, with the padding of rows whose copy transposes them."""
    total = 0
    for extent, factor in ((tiling.block_m, product.left), (tiling.block_n, product.right)):
        item_bytes = dtype_bytes(factor.dtype)
        row = -(-extent // 32) * 32 + 16 // item_bytes if factor.is_k_last else extent
        total += row * tiling.block_k * item_bytes
    return tiling.stages * total


def registers(tiling: Tiling) -> int:
    """Return the registers of a thread: its sums, the operands of two steps, and the rest."""
    return tiling.thread_m * tiling.thread_n + 2 * (tiling.thread_m + tiling.thread_n) + OTHER_REGISTERS


def _estimate(product: Contraction, tiling: Tiling, gpu: Gpu) -> Estimate:
    batch, m, n, k = product.extents
    steps = -(-k // tiling.block_k)
    blocks = batch * -(-m // tiling.block_m) * -(-n // tiling.block_n)
    resident = occupancy(gpu, tiling.threads, registers(tiling), smem_bytes(product, tiling))
    item_bytes = dtype_bytes(product.left.dtype)
    tile_bytes = (tiling.block_m + tiling.block_n) * tiling.block_k * item_bytes
    warps = tiling.threads // gpu.warp_size
    warp_items = tiling.thread_m * WARP_ROWS + tiling.thread_n * WARP_COLUMNS
    work = Work(
        blocks=blocks,
        threads=tiling.threads,
        regs_per_thread=registers(tiling),
        smem_bytes=smem_bytes(product, tiling),
        flops=2.0 * blocks * steps * tiling.block_m * tiling.block_n * tiling.block_k,
        flops_per_s=_rate(product, tiling, gpu, min(resident, -(-blocks // gpu.sm_count))),
        dram_bytes=dram_bytes(product, gpu, (tiling.block_m, tiling.block_n, tiling.raster), max(1, resident) * gpu.sm_count),
        l2_bytes=blocks * steps * tile_bytes + batch * m * n * dtype_bytes(product.sums_dtype),
        moved_smem_bytes=blocks * steps * (tile_bytes + warps * warp_items * tiling.block_k * item_bytes),
        rounds=2 + steps / max(1, tiling.stages - 1),
        barriers=steps * (2 if tiling.stages > 1 else 3),
    )
    return Estimate(tiling.candidate(), predicted_secs(gpu, work), (tiling.block_m, tiling.block_n))


def _rate(product: Contraction, tiling: Tiling, gpu: Gpu, resident: int) -> float:
    """Return the operations a second of the whole GPU, while so many blocks are on an SM.

    A scheduler starts multiply-adds and loads of four elements in turn, and waits at barriers.
    """
    rate = gpu.simt_rate(product.sums_dtype) or gpu.simt_rate("float32")
    multiplies = tiling.thread_m * tiling.thread_n
    loads = (tiling.thread_m + tiling.thread_n) / 4
    warps = max(1, resident) * tiling.threads / gpu.warp_size / PARTITIONS
    # One multiply-add of a warp keeps a partition's cores busy for this long.
    cycles = 2.0 * gpu.warp_size * PARTITIONS * gpu.sm_count * gpu.clock_hz / rate
    issued = warps * tiling.block_k * (multiplies * cycles + loads)
    return rate * min(1.0, warps) * warps * tiling.block_k * multiplies * cycles / (issued + BARRIER_CYCLES)
