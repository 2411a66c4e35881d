"""Owns which tiles, kernel schedules and clusters of a GEMM on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kerneldecl.analysis.contraction import IS_GEMV, Contraction, contraction_of, stored
from kerneldecl.analysis.gpu_limits import MAX_GRID_Z
from kerneldecl.analysis.hopper_limits import (
    K_TILE_BYTES,
    MAX_ACCUM_REGISTERS,
    MAX_TMA_RANK,
    MIN_STAGES,
    MMA_TILE_ROWS,
    PREFERRED_ACCUM_REGISTERS,
)
from kerneldecl.analysis.tensor_cores import accumulators_per_register
from kerneldecl.model import Access, Arch, Block, Gpu, IterSpace, Proposal
from kerneldecl.policies.gpu.gemm_tiles import Estimate, Group, best_first
from kerneldecl.policies.hopper import time_model as model
from kerneldecl.policies.hopper.operands import (
    TRANSPOSE_FACTOR,
    are_tma_loadable,
    first_reason,
    has_residual,
    is_from_registers,
    is_k_last_in_smem,
    is_tma_loadable,
    k_tile_items,
    needs_transpose,
    smem_rows_unit,
)
from kerneldecl.policies.hopper.ranking import diversified, in_turns
from kerneldecl.policies.hopper.split_k import split_k_choices, workspace_choices
from kerneldecl.policies.hopper.tile_widths import block_n_choices, can_multicast, filling_block_n
from kerneldecl.policies.hopper.tilings import SKINNY_EXTENT, WORKSPACE, Result, Tiling, problem_of, timed

TEMPLATES = ("wgmma_matmul",)
KINDS = ("cuda",)
HAS_TRACES = False

MAX_BATCH_AXES = MAX_TMA_RANK - 2
"""Axes of a batch that a tensor map has room for besides a matrix's two."""
CLUSTERS = ((1, 1), (2, 1), (1, 2))
"""Values of `cluster_m` and `cluster_n`."""
ALWAYS_SWAP_MAX_M = 32
"""Rows up to which A and B are always swapped: n of a tile is cut finer than its m. Up to `SKINNY_EXTENT` both ways are tried."""
UNEVEN_SWAP_MAX_M = 512
"""Rows up to which both ways are tried where tiles of `SKINNY_EXTENT` rows do not divide them."""
SAME_TILE = 2
"""Proposals of one tile at most; see `gemm_tiles.ranked`."""


class Consumers(NamedTuple):
    """The rows of a tile, and how consumer warpgroups compute it."""

    block_m: int
    consumers: int
    kernel_schedule: str


CONSUMERS = (
    Consumers(64, 1, "cooperative"),
    Consumers(128, 1, "cooperative"),
    Consumers(128, 2, "cooperative"),
    Consumers(256, 2, "cooperative"),
    Consumers(192, 3, "cooperative"),
    Consumers(128, 2, "staggered"),
    Consumers(256, 2, "staggered"),
    Consumers(64, 2, "pingpong"),
    Consumers(128, 2, "pingpong"),
)


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what wgmma does not take."""
    return tuple(itertools.islice(proposals(space, arch), top_k))


def proposals(space: IterSpace, arch: Arch) -> Iterator[Proposal]:
    """Yield what `propose` returns, and time no more tilings than that takes."""
    gemm = contraction_of(space)
    if isinstance(gemm, str) or why_not(space, arch):
        return iter(())
    return of_gemm(gemm, Result(space.blocks[-1].writes[0].dtype, has_residual(space)), arch.the_gpu, _swap_choices(gemm))


def of_gemm(gemm: Contraction, result: Result, gpu: Gpu, swaps: Sequence[int]) -> Iterator[Proposal]:
    """Yield the proposals for a GEMM that wgmma takes, with these choices of `swap_ab`."""
    return _in_order(_by_schedule(gemm, result, gpu, swaps))


def _in_order(by_schedule: Mapping[str, list[Group | Estimate]]) -> Iterator[Proposal]:
    """Yield the proposals of all kernel schedules."""
    proposals = diversified(best_first(found, SAME_TILE) for found in by_schedule.values())
    return in_turns(proposals) if any(WORKSPACE in name for name in by_schedule) else proposals


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why the template does not take a computation, as a sentence; empty where it does."""
    gemm = contraction_of(space)
    if isinstance(gemm, str):
        return gemm
    before = list(itertools.takewhile(lambda block: not block.is_reduction, space.blocks))
    block = space.blocks[len(before)]
    reasons = (
        (not all(map(_is_copy, before)), "an operand is computed by the same function, and TMA loads only what is in memory"),
        (not _are_matrices(space, block, gemm), "an operand is not a matrix (or a batch of them) with constant strides"),
        (max(gemm.extents[1:3]) == 1, IS_GEMV),
        (gemm.extents[0] > MAX_GRID_Z, f"its batch is longer than a grid: {MAX_GRID_Z}"),
    )
    return first_reason(gemm, arch.the_gpu, reasons)


def _is_copy(block: Block) -> bool:
    """Say whether a block moves elements and computes nothing, so that its result is its argument in another shape."""
    (write,) = block.writes
    same = [(read.dtype, math.prod(read.shape)) == (write.dtype, math.prod(write.shape)) for read in block.reads]
    return same == [True] and block.flops_per_point == 0


def _are_matrices(space: IterSpace, block: Block, gemm: Contraction) -> bool:
    """Say whether both operands are batches of matrices in memory: m, n and k have one stride each, also of several axes."""
    sides = ((gemm.a, gemm.m), (gemm.b, gemm.n))
    joined = (
        _has_one_stride(block, stored(space, block.reads[operand.position]), group) for operand, axes in sides for group in (axes, gemm.k)
    )
    return all(joined) and len(gemm.batch) <= MAX_BATCH_AXES


def _has_one_stride(block: Block, access: Access, group: Sequence[int]) -> bool:
    """Say whether a group of axes is like one axis: each of them continues where the next inner one ends."""
    strides: Counter[int] = Counter()
    for dim, index in enumerate(access.index):
        for axis, coefficient in index or ():
            strides[axis] += coefficient * math.prod(access.shape[dim + 1 :])
    axes = [axis for axis in group if block.axes[axis].extent > 1]
    return all(strides[outer] == block.axes[inner].extent * strides[inner] for outer, inner in itertools.pairwise(axes))


def _by_schedule(gemm: Contraction, result: Result, gpu: Gpu, swaps: Sequence[int]) -> Mapping[str, list[Group | Estimate]]:
    """Return all tilings by kernel schedule, of the operands as they are and of copies that TMA can load."""
    found = [each for is_packed in (False, True) for swap_ab in swaps for each in _timed_tilings(gemm, result, gpu, (swap_ab, is_packed))]
    by_schedule = defaultdict(list)
    for schedule, tilings in found:
        by_schedule[schedule].append(tilings)
    return by_schedule


def _packed(gemm: Contraction) -> tuple[Contraction, int]:
    """Return the GEMM with copies of those operands that TMA cannot load, and the bytes to copy; transposed ones count more often.

    A is wgmma's.
    """
    operands = {name: operand for name in ("a", "b") if not is_tma_loadable(operand := getattr(gemm, name))}
    if is_from_registers(gemm.a):
        del operands["a"]
    copies = {name: replace(operand, contiguous=K_TILE_BYTES, is_k_last=is_k_last_in_smem(operand)) for name, operand in operands.items()}
    copied = (operand.size_bytes * (TRANSPOSE_FACTOR if needs_transpose(operand) else 1) for operand in operands.values())
    return replace(gemm, **copies), sum(copied)


def _timed_tilings(gemm: Contraction, result: Result, gpu: Gpu, choice: tuple[int, bool]) -> Iterator[tuple[str, Group | Estimate]]:
    """Yield groups of tilings with the schedule under which they are ranked: `choice` is `swap_ab`, and whether copies are multiplied."""
    swap_ab, is_packed = choice
    read = _swapped(gemm) if swap_ab else gemm
    packed, packed_bytes = _packed(read)
    if is_packed and not packed_bytes:
        return
    secs = model.packing_secs(gpu, packed_bytes) if is_packed else 0.0
    problem = problem_of(packed if is_packed else read, result, gpu, secs)
    for tiling in _tilings(problem.gemm, gpu, swap_ab):
        yield from timed(problem, tiling._replace(pack=int(is_packed)))


def _swap_choices(gemm: Contraction) -> tuple[int, ...]:
    m = gemm.extents[1]
    is_uneven = m <= UNEVEN_SWAP_MAX_M and m % SKINNY_EXTENT > 0
    # As operand A, TF32 with k first needs no transpose.
    may_be_a = is_from_registers(gemm.a) or is_from_registers(gemm.b)
    if m <= SKINNY_EXTENT or is_uneven or may_be_a:
        return (0, 1) if m > ALWAYS_SWAP_MAX_M or is_from_registers(gemm.a) else (1,)
    return (0,)


def _swapped(gemm: Contraction) -> Contraction:
    """Return the GEMM of the transposed operands, whose result is transposed."""
    batch, m, n, k = gemm.extents
    return replace(gemm, m=gemm.n, n=gemm.m, a=gemm.b, b=gemm.a, extents=(batch, n, m, k))


def _tilings(gemm: Contraction, gpu: Gpu, swap_ab: int) -> Iterator[Tiling]:
    """Yield tiles with their consumers, and with clusters or split-K; their stages are still to be chosen."""
    for tile, is_filling in _tiles(gemm, gpu, swap_ab):
        if not _is_sensible(gemm, gpu, tile, is_filling=is_filling):
            continue
        yield from _clustered(gemm, tile)
        if tile.is_cooperative:
            yield from _split(gemm, gpu, tile)


def _tiles(gemm: Contraction, gpu: Gpu, swap_ab: int) -> Iterator[tuple[Tiling, bool]]:
    """Yield tiles with their consumers, and whether their width is chosen to fill the SMs."""
    batch, m, n, _ = gemm.extents
    dtype, unit = gemm.a.dtype, smem_rows_unit(gemm.b)
    is_skinny = bool(swap_ab) and n <= SKINNY_EXTENT
    widths = block_n_choices(n, dtype, is_skinny=is_skinny) if is_skinny or not swap_ab or is_from_registers(gemm.a) else []
    for block_m, consumers, kernel_schedule in CONSUMERS:
        filling = [] if is_skinny else filling_block_n(batch * -(-m // block_m), n, dtype, unit, gpu)
        for block_n in (*(width for width in widths if width not in filling), *filling):
            tile = Tiling(
                block_m=block_m, block_n=block_n, consumers=consumers, stages=MIN_STAGES, kernel_schedule=kernel_schedule, swap_ab=swap_ab
            )
            yield tile, block_n in filling


def _is_sensible(gemm: Contraction, gpu: Gpu, tile: Tiling, *, is_filling: bool) -> bool:
    """Say whether a tile's accumulators fit the registers, and no simpler tile is as good."""
    registers = (MAX_ACCUM_REGISTERS if is_filling else PREFERRED_ACCUM_REGISTERS)[tile.consumers]
    if tile.thread_accumulators > registers * accumulators_per_register(gemm.accum_dtype):
        return False
    # Ping-pong of other widths than powers of 2 was never the fastest.
    is_odd_pingpong = tile.is_pingpong and tile.block_n.bit_count() > 1 and not is_filling
    is_too_tall = tile.block_m > MMA_TILE_ROWS and tile.block_m - MMA_TILE_ROWS >= gemm.extents[1]
    # The other schedules overlap an epilogue with the next tile's mainloop, which takes a next tile.
    is_one_wave = _tile_count(gemm, tile) <= gpu.sm_count
    return not (is_odd_pingpong or is_too_tall or _is_too_narrow(tile) or (is_one_wave and not tile.is_cooperative))


def _is_too_narrow(tile: Tiling) -> bool:
    """Say whether a tile leaves its consumers too little to do, so that a single one is as good."""
    if tile.consumers == 1:
        return False
    if tile.consumers == 3 or tile.is_staggered:
        return tile.block_n < 2 * MMA_TILE_ROWS
    return tile.block_m == MMA_TILE_ROWS * tile.consumers and tile.block_n < MMA_TILE_ROWS


def _tile_count(gemm: Contraction, tile: Tiling) -> int:
    """Return how many tiles there are, with those that fill clusters."""
    batch, m, n, _ = gemm.extents
    rows, columns = -(-m // (tile.block_m * tile.cluster_m)), -(-n // (tile.block_n * tile.cluster_n))
    return batch * rows * columns * tile.cluster_ctas


def _clustered(gemm: Contraction, tile: Tiling) -> Iterator[Tiling]:
    """Yield a tile with the clusters that can share operands by TMA multicast, a single CTA first."""
    _, m, n, _ = gemm.extents
    for cluster_m, cluster_n in CLUSTERS if are_tma_loadable(gemm) else CLUSTERS[:1]:
        is_covered = cluster_m <= -(-m // tile.block_m) and cluster_n <= -(-n // tile.block_n)
        # CTAs along m share a tile of B, those along n a tile of A.
        if (
            is_covered
            and can_multicast(tile.block_n, smem_rows_unit(gemm.b), cluster_m)
            and can_multicast(tile.block_m, smem_rows_unit(gemm.a), cluster_n)
        ):
            yield tile._replace(cluster_m=cluster_m, cluster_n=cluster_n)


def _split(gemm: Contraction, gpu: Gpu, tile: Tiling) -> Iterator[Tiling]:
    """Yield a tile with split-K, where tiles leave SMs idle; clusters that share operands do not share k."""
    k_tiles = -(-gemm.extents[3] // k_tile_items(gemm))
    for split_k in split_k_choices(gpu, _tile_count(gemm, tile), k_tiles):
        yield tile._replace(split_k=split_k)
    for clustered in _clustered(gemm, tile):
        for split_k in workspace_choices(gpu, _tile_count(gemm, clustered), k_tiles):
            yield clustered._replace(split_k=split_k, workspace=1)
