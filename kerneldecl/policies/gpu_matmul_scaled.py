"""Owns which tiles of a GEMM of scaled values of 8 bits or less a GPU should try on mma.sync in float16 or int8, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kerneldecl.analysis.contraction import why_no_tensor_cores
from kerneldecl.analysis.gpu_limits import WARP_LANES, launched_smem_bytes
from kerneldecl.analysis.params import ROW_MULTIPLE, GemmTcParams, row_padding
from kerneldecl.analysis.scaled_gemm import INTEGER_DTYPE, ScaledSizes, scaled_of
from kerneldecl.analysis.tensor_cores import FRAGMENT, K_BYTES
from kerneldecl.model import Arch, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import (
    Estimate,
    best_first,
    block_extents,
    epilogue_smem_bytes,
    interleaved,
    raster_group_of,
    split_k_choices,
)
from kerneldecl.policies.gpu.tensor_core_model import LOAD_CYCLES, RESOLVED_WAIT, SUSTAINED_CLOCK, multiplies_per_cycle
from kerneldecl.policies.gpu.time_model import CHAIN_CYCLES, DRAM_SHARE, INTEGERS_PER_CYCLE, launch_secs, occupancy, p_norm

TEMPLATE = "gpu_matmul_scaled"
TEMPLATES = (TEMPLATE,)
AUTO = {"cuda": 42}
HAS_TRACES = False

BLOCKS_M = (16, 32, 64, 128)
BLOCKS_N = (32, 64, 128)
BLOCKS_K = (64, 128)
WARPS = ((1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (2, 4))
STAGES = (2, 3, 4)
MIN_K_TILES = 2
"""K-tiles of a thread block at least, where split-K divides the reduction."""
SAME_TILE = 3
"""Candidates of one tile that are proposed."""
OTHER_REGISTERS = 48
"""Registers of a thread besides accumulators and fragments, as of `gpu_matmul_tc`."""
CONVERT_INSTRUCTIONS = 4.5
"""Instructions of a lane for a value to become float16 in shared memory, counted in SASS of nvcc 13.0 for sm_90: 3.9 to 5.3 for int4,
4.4 for float8, 6 for int8 and codes of 4-bit floats."""
INTEGER_CONVERT_INSTRUCTIONS = 4.2
"""The same for a value of 4 bits to become int8: 4.2 packed, 4.8 in rows."""
WORD_CONVERT_INSTRUCTIONS = 2.0
"""The same where four are made at once: 1.7 to 2.1 packed, 1.9 to 2.4 in rows. No kernel of it has been timed yet."""
COPY_INSTRUCTIONS = 0.25
"""The same for int8 that stays int8: eight values are loaded at once, and stored at once."""
OTHER_LOADS_FACTOR = 1.5
"""Ratio of instructions for packed values where the rows that a thread converts do not follow each other by PACKED_ROWS: a byte holds two
rows so far apart, and is loaded for each of them otherwise (counted: 6.3 for 4.2)."""
PACKED_ROWS = 8
VALUE_VECTOR = 8
"""Values of a row that a thread converts at once."""
SCALE_INSTRUCTIONS = 2.0
"""Instructions of a lane for each sum of a k-tile: it is scaled and added. One of int32 becomes float32 before."""
K_TILE_INSTRUCTIONS = 70.0
"""Instructions of a lane for a k-tile besides: copies, addresses, barriers. Counted as the ones above."""
OVERLAPPED = 0.75
"""Part of the shorter one of instructions and of tensor cores with shared memory that overlaps where an SM has several blocks. Fitted to
the same tilings, of which blocks alone on an SM took 1.1 to 1.3 times as long as predicted without."""
FACTOR_BYTES = 5
"""Bytes of a scale and a zero point."""
K_TILE_CYCLES = 160.0
"""Cycles of a k-tile that no other block's work overlaps, as of `gpu_matmul_tc`."""
OVERLAP = 4.0
"""Exponent of the p-norm of times that overlap."""


class Tiling(NamedTuple):
    """A tiling of `gpu_matmul_scaled`."""

    tiles: GemmTcParams
    is_integer: bool
    """Whether values are multiplied in int8."""
    has_words: bool = False
    """Whether four weights of 4 bits become int8 at once."""

    def candidate(self) -> Candidate:
        params = {name: value for name, value in self.tiles._asdict().items() if name != "double_buffer"}
        kind = {"integers": self.is_integer, "words": self.has_words}
        return Candidate.of(TEMPLATE, {**params, **{name: 1 for name, is_so in kind.items() if is_so}})


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for other computations, and where there is no mma.sync.

    Where values may be multiplied in float16 and in int8, those of the dtype that is predicted slower come in every fourth place, and so do
    those whose weights become int8 one by one.
    """
    gpu = arch.the_gpu
    sizes = scaled_of(space, gpu)
    if sizes is None:
        return ()
    kinds = [(each, False) for each in (sizes, *[sizes.integers] * sizes.are_integers) if not why_no_tensor_cores(each.gemm, gpu)]
    kinds += [(each, True) for each, _ in kinds if _makes_words(each)]
    ranked = (_ranked(each, gpu, top_k, has_words=has_words) for each, has_words in kinds)
    found: Iterable[Proposal] = ()
    for proposals in sorted(filter(None, ranked), key=lambda proposals: -proposals[0].predicted_secs):
        found = interleaved(proposals, found)
    return tuple(itertools.islice(found, top_k))


def _makes_words(sizes: ScaledSizes) -> bool:
    """Say whether weights of 4 bits become int8."""
    _, _, n, k = sizes.gemm.extents
    return sizes.gemm.a.dtype == INTEGER_DTYPE and sizes.value_bytes[1] < n * k


def _ranked(sizes: ScaledSizes, gpu: Gpu, top_k: int, *, has_words: bool) -> tuple[Proposal, ...]:
    """Return the tilings of one kind, the fastest first."""
    found = (tiles for tiles in tilings(sizes, gpu) if not has_words or is_staged(sizes, tiles, gpu))
    estimates = (_estimate(sizes, tiles, gpu, has_words=has_words) for tiles in found)
    return tuple(itertools.islice(best_first(estimates, SAME_TILE), top_k))


def tilings(sizes: ScaledSizes, gpu: Gpu) -> Iterator[GemmTcParams]:
    """Yield the search space: tiles of whole fragments whose elements of a row share scales, and that registers and shared memory hold."""
    _, m, n, k = sizes.gemm.extents
    depths = [block_k for block_k in BLOCKS_K if sizes.unit % block_k == 0 or sizes.unit == k] or [math.gcd(sizes.unit, max(BLOCKS_K))]
    tiles = itertools.product(block_extents(m, BLOCKS_M), block_extents(n, BLOCKS_N), depths, WARPS)
    for block_m, block_n, block_k, (warps_m, warps_n) in tiles:
        if block_k % (K_BYTES // dtype_bytes(sizes.gemm.a.dtype)) or block_m % (FRAGMENT * warps_m) or block_n % (FRAGMENT * warps_n):
            continue
        rows, columns, k_tiles = -(-m // block_m), -(-n // block_n), -(-k // block_k)
        wanted = split_k_choices(rows * columns, k_tiles, MIN_K_TILES, gpu, 2)
        # Parts of whole k-tiles alone are staged.
        parts = dict.fromkeys(next(part for part in range(each, 0, -1) if k_tiles % part == 0) for each in wanted)
        for split_k, stages in itertools.product(parts, STAGES):
            bare = GemmTcParams(block_m, block_n, block_k, warps_m, warps_n, stages, split_k=split_k)
            resident = _resident(sizes, bare, gpu)
            if not resident or -(-k_tiles // split_k) < stages:
                continue
            group = raster_group_of(rows, columns, resident * gpu.sm_count, block_m, block_n)
            for smem_epilogue in (0, 1):
                tiling = bare._replace(raster_group=group, smem_epilogue=smem_epilogue)
                is_small = not is_staged(sizes, tiling, gpu) or static_bytes(sizes, tiling) <= gpu.smem_per_block_bytes
                if is_small and smem_bytes(sizes, tiling, gpu) <= gpu.smem_per_block_optin_bytes:
                    yield tiling


def is_staged(sizes: ScaledSizes, tiling: GemmTcParams, gpu: Gpu) -> bool:
    """Say whether values come to shared memory as they are: in several stages, of whole tiles."""
    _, _, n, k = sizes.gemm.extents
    return gpu.async_copy and tiling.stages > 1 and not n % tiling.block_n and not k % (tiling.block_k * tiling.split_k)


def static_bytes(sizes: ScaledSizes, tiling: GemmTcParams) -> int:
    """Return the static shared memory of a block: values of all stages as they are, and scales and zero points beside them."""
    _, m, n, k = sizes.gemm.extents
    rows = (tiling.block_m, m, sizes.value_bytes[0]), (tiling.block_n, n, sizes.value_bytes[1])
    return tiling.stages * sum(round(block * tiling.block_k * stored / (size * k)) + FACTOR_BYTES * block for block, size, stored in rows)


def smem_bytes(sizes: ScaledSizes, tiling: GemmTcParams, gpu: Gpu) -> int:
    """Return the shared memory of a block: values as they are, if they are staged, and as multiplied, or in their place its results."""
    staged, item_bytes = is_staged(sizes, tiling, gpu), dtype_bytes(sizes.gemm.a.dtype)
    columns = -(-tiling.block_k // ROW_MULTIPLE) * ROW_MULTIPLE + row_padding(item_bytes)
    values = (1 if staged else tiling.stages) * (tiling.block_m + tiling.block_n) * columns * item_bytes
    results = tiling.smem_epilogue * epilogue_smem_bytes(sizes.gemm, tiling.block_m, tiling.block_n)
    static = staged * static_bytes(sizes, tiling)
    return launched_smem_bytes(static, max(values, results)) + static


def registers(tiling: GemmTcParams) -> int:
    """Return the registers of a thread: accumulators of all k-tiles and of one, fragments, and the rest."""
    warp_m, warp_n = tiling.warp_tile
    return 2 * warp_m * warp_n // WARP_LANES + (warp_m + warp_n) * K_BYTES // (WARP_LANES * 4) + OTHER_REGISTERS


def _resident(sizes: ScaledSizes, tiling: GemmTcParams, gpu: Gpu) -> int:
    return occupancy(gpu, tiling.warps * WARP_LANES, registers(tiling), smem_bytes(sizes, tiling, gpu))


def _convert_instructions(sizes: ScaledSizes, tiling: GemmTcParams, *, has_words: bool) -> float:
    """Return the instructions of all lanes in which a block's values of a k-tile get to shared memory as they are multiplied."""
    _, _, n, k = sizes.gemm.extents
    is_integer = sizes.gemm.a.dtype == INTEGER_DTYPE
    each = INTEGER_CONVERT_INSTRUCTIONS if is_integer else CONVERT_INSTRUCTIONS
    each = WORD_CONVERT_INSTRUCTIONS if has_words else each
    is_narrow = sizes.value_bytes[1] < n * k
    turn = tiling.warps * (WARP_LANES // min(WARP_LANES, max(1, tiling.block_k // VALUE_VECTOR)))
    of_a = COPY_INSTRUCTIONS if is_integer else each
    of_b = COPY_INSTRUCTIONS if is_integer and not is_narrow else each
    of_b *= OTHER_LOADS_FACTOR if sizes.is_packed and turn != PACKED_ROWS else 1.0
    return tiling.block_k * (tiling.block_m * of_a + tiling.block_n * of_b)


def _moved_bytes(sizes: ScaledSizes, tiling: GemmTcParams) -> float:
    """Return the bytes that a block's k-tile moves in shared memory: as stored there and back, as multiplied, and all warps' fragments."""
    _, m, n, k = sizes.gemm.extents
    warp_m, warp_n = tiling.warp_tile
    rows = tiling.block_m + tiling.block_n + tiling.warps * (warp_m + warp_n)
    stored = sum(
        block * value_bytes / (extent * k)
        for block, value_bytes, extent in zip((tiling.block_m, tiling.block_n), sizes.value_bytes, (m, n), strict=True)
    )
    return tiling.block_k * (rows * dtype_bytes(sizes.gemm.a.dtype) + 2 * stored)


def _turn_cycles(sizes: ScaledSizes, tiling: GemmTcParams, resident: int, gpu: Gpu, *, has_words: bool) -> float:
    """Return the cycles in which an SM's resident blocks each get through one k-tile.

    All of them share its units: those for integers and float32, and tensor cores with shared memory, which feeds them. Barriers part what a
    block does with either. A warp alone waits for each of its instructions, and a block for its k-tile: for barriers, for scales that
    come through registers, and for copies.
    """
    block_m, block_n, block_k = tiling.block_m, tiling.block_n, tiling.block_k
    is_integer, threads = sizes.gemm.a.dtype == INTEGER_DTYPE, tiling.warps * WARP_LANES
    convert, scaled = _convert_instructions(sizes, tiling, has_words=has_words), block_m * block_n
    integer = convert + scaled * is_integer + K_TILE_INSTRUCTIONS * threads
    multiply = scaled * block_k / multiplies_per_cycle(gpu, sizes.gemm.a.dtype, sizes.gemm.accum_dtype)
    issued = integer / INTEGERS_PER_CYCLE + scaled * SCALE_INSTRUCTIONS / (2 * INTEGERS_PER_CYCLE)
    fed = multiply + _moved_bytes(sizes, tiling) / gpu.smem_bytes_per_clock_per_sm
    busy = issued + fed - OVERLAPPED * min(issued, fed) * (resident > 1)
    mma = scaled * block_k * dtype_bytes(sizes.gemm.a.dtype) / (FRAGMENT * FRAGMENT // 2 * K_BYTES)
    chain = CHAIN_CYCLES * ((integer + scaled * SCALE_INSTRUCTIONS) / threads + mma / tiling.warps)
    waiting = K_TILE_CYCLES + RESOLVED_WAIT * LOAD_CYCLES * sizes.has_narrow_scales
    latency = LOAD_CYCLES / (tiling.stages - 1 if is_staged(sizes, tiling, gpu) else 1)
    return max(max(resident * busy, chain) + waiting, latency)


def _estimate(sizes: ScaledSizes, tiling: GemmTcParams, gpu: Gpu, *, has_words: bool = False) -> Estimate:
    """Return a p-norm of the times of the SMs, of L2 and of DRAM, besides a launch.

    An SM converts, multiplies and scales the k-tiles of its blocks in turn.
    """
    _, m, n, k = sizes.gemm.extents
    block_m, block_n = tiling.block_m, tiling.block_n
    blocks = -(-m // block_m) * -(-n // block_n) * tiling.split_k
    k_tiles, cycle = -(-k // (tiling.block_k * tiling.split_k)), 1 / (gpu.clock_hz * SUSTAINED_CLOCK)
    resident = _resident(sizes, tiling, gpu)
    rounds, rest = divmod(-(-blocks // gpu.sm_count), resident)
    turns = rounds * _turn_cycles(sizes, tiling, resident, gpu, has_words=has_words)
    turns += _turn_cycles(sizes, tiling, rest, gpu, has_words=has_words) if rest else 0.0
    loaded = sum(rows * extent / size for rows, extent, size in zip((block_m, block_n), sizes.value_bytes, (m, n), strict=True))
    results = m * n * (4 * (tiling.split_k + 1) if tiling.split_k > 1 else 2)
    times = (
        k_tiles * turns * cycle,
        (blocks * loaded / tiling.split_k + results) / gpu.l2_bytes_per_s,
        (sum(sizes.value_bytes) + m * n * 2) / (gpu.dram_bytes_per_s * DRAM_SHARE),
    )
    is_integer = sizes.gemm.a.dtype == INTEGER_DTYPE
    secs = p_norm(*times, exponent=OVERLAP) + launch_secs(gpu) * (1 if tiling.split_k == 1 else 2)
    return Estimate(Tiling(tiling, is_integer, has_words), secs, (block_m, block_n))
