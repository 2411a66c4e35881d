"""Owns the time model of convolutions in groups on mma.sync: tiles, warps and how long they take.

Knows nothing of TVM or of which candidates are proposed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.grouped_conv import ITEM_BYTES, K_STEP, N_TILE, GroupedConvSizes, Side
from kerneldecl.analysis.grouped_conv_params import PIECE, ConvTile, GroupedConvParams
from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.model import Gpu, dtype_bytes
from kerneldecl.policies.gpu.tensor_core_model import MMA_LATENCY_CYCLES, SUSTAINED_CLOCK, multiplies_per_cycle
from kerneldecl.policies.gpu.time_model import DRAM_LATENCY_SECS, DRAM_SHARE, SM_BYTES_PER_CLOCK, launch_secs, occupancy, p_norm

SIDES = (4, 7, 8, 14, 16, 28, 32, 56)
"""Rows and columns of a tile, besides those that cut an image evenly."""
PIXELS = (48, 1024)
"""Pixels of a tile, the fewest where an image has more, and the most."""
MAX_BLOCK_N = 256
WARPS_M, WARPS_N = (1, 2, 4, 8), (1, 2, 4)
MAX_WARPS = 16
MAX_WARP_TILES = 8
FRAGMENTS = (1, 2, 4)
"""Fragments of 16 pixels at once; several pay only where a warp loads weights for each."""
OTHER_REGISTERS = 44
"""Registers of a thread besides weights, pixels and sums. For 14 x 28 pixels by 64 channels, nvcc takes 108 in all (sm_90a)."""
MULTIPLY_SLOWDOWN = 1.6
"""How much longer mma.sync takes than tensor cores need: what a warp loads for one hides behind others only in part. Not fitted yet."""
COPY_CYCLES, RESULT_CYCLES = 30.0, 6.0
"""Instructions of a thread for one copy of the image with its bounds, fitted to twelve convolutions on an H200 (2026-11); and for a lane's
two neighbouring results, counted in the code."""
TURN_CYCLES, ISSUE_CYCLES, INSTRUCTION_CYCLES = 120.0, 9.0, 3.0
"""Cycles of a warp for a turn's first loads and last stores; from one independent mma.sync to the next; from an instruction to the next.
The first two fitted to 117 tilings of seven convolutions (H200, 2026-11), the last assumed."""
LEAST_BYTES = 64
"""Bytes of a pixel that a block should read or store together: two sectors, as DRAM delivers them."""
EVEN_COLUMNS, UNEVEN_COLUMNS_FACTOR = 8, 1.15
"""Pixels of a row that are loaded and found quickly, and the ratio of times where a tile has parts of them and is not as wide as the image:
tiles of 4 and 7 columns took 1.2 to 1.4 times as long as those of as many pixels in rows of 8 to 32 (H200, 2026-11)."""
OVERLAP = 4.0
"""Exponent of the p-norm of an SM's multiplications, its shared memory, its instructions and the memories."""


def timed(sizes: GroupedConvSizes, gpu: Gpu) -> Iterator[tuple[float, GroupedConvParams]]:
    """Yield what fits a GPU, with its predicted time."""
    return ((_secs(sizes, params, gpu), params) for params in _choices(sizes) if params.fits(sizes, gpu))


def _choices(sizes: GroupedConvSizes) -> Iterator[GroupedConvParams]:
    """Yield the search space; some of it may not fit."""
    fewest = min(PIXELS[0], sizes.rows.results * sizes.columns.results)
    blocks_n, warps = _blocks_n(sizes), [each for each in itertools.product(WARPS_M, WARPS_N) if math.prod(each) <= MAX_WARPS]
    for rows, columns in itertools.product(sides(sizes.rows), sides(sizes.columns)):
        if not fewest <= rows * columns <= PIXELS[1]:
            continue
        for block_n, (warps_m, warps_n), fragments in itertools.product(blocks_n, warps, FRAGMENTS):
            params = GroupedConvParams(rows, columns, block_n, warps_m, warps_n, fragments)
            is_shared = warps_m * fragments <= params.pixel_fragments()
            pays = fragments == 1 or not params.holds_weights(sizes)
            if params.warp_tiles in range(1, MAX_WARP_TILES + 1) and is_shared and pays:
                yield params


def sides(side: Side) -> list[int]:
    """Return how long a side of a tile may be: all results, halves and quarters of them, and usual lengths."""
    parts = {-(-side.results // count) for count in (1, 2, 3, 4)}
    return sorted(parts | {size for size in SIDES if size < side.results})


def _blocks_n(sizes: GroupedConvSizes) -> list[int]:
    """Return how many output channels a block may have: those of some whole groups, or a part of one group's."""
    whole = math.lcm(sizes.filters, N_TILE)
    found = {whole * count for count in (1, 2, 3, 4, 8, 16) if whole * count <= MAX_BLOCK_N}
    found |= {sizes.filters // parts for parts in (2, 4) if sizes.filters % (parts * N_TILE) == 0}
    return sorted(each for each in found if sizes.groups * sizes.filters % each == 0)


def _registers(sizes: GroupedConvSizes, params: GroupedConvParams) -> int:
    weights = params.warp_tiles * (sizes.steps + sizes.steps % 2) if params.holds_weights(sizes) else 4
    return OTHER_REGISTERS + weights + params.accumulators(sizes) + 4 * params.fragments


def _secs(sizes: GroupedConvSizes, params: GroupedConvParams, gpu: Gpu) -> float:
    """Return the predicted time: memory's, then that of the busiest SM's blocks over latencies of as many rounds as they take.

    A block copies its part of the image before it multiplies, and all blocks begin together, so that the two do not overlap.
    """
    tile = params.tile(sizes)
    resident = occupancy(gpu, params.threads, _registers(sizes, params), params.smem_bytes(sizes))
    if not resident:
        return math.inf
    per_sm, clock = -(-tile.blocks // gpu.sm_count), gpu.clock_hz * SUSTAINED_CLOCK
    sm_secs = per_sm * p_norm(*_cycles(sizes, params, gpu), exponent=OVERLAP) / clock
    # What a block waits for hides behind the SM's other blocks.
    rounds = max(1.0, per_sm / resident)
    latency = rounds * (2 * DRAM_LATENCY_SECS + _chain_cycles(sizes, params) / clock)
    is_uneven = params.columns % EVEN_COLUMNS > 0 and params.columns < sizes.columns.results
    stored_bytes = params.warp_tiles * N_TILE * dtype_bytes(sizes.out_dtype)
    secs = p_norm(*memory_secs(tile, stored_bytes, gpu), exponent=OVERLAP) + p_norm(sm_secs, latency, exponent=OVERLAP)
    return secs * (UNEVEN_COLUMNS_FACTOR if is_uneven else 1.0) + launch_secs(gpu)


def memory_secs(tile: ConvTile, stored_bytes: int, gpu: Gpu) -> tuple[float, float, float]:
    """Return the times of DRAM, of L2 and of an SM's bandwidth from there; `stored_bytes` are stored together, of one pixel."""
    sizes = tile.sizes
    # Of a pixel, a block reads its groups' channels.
    copied = tile.copied_bytes * max(1.0, LEAST_BYTES / (tile.slab * sizes.item_bytes))
    results = sizes.out_elements * dtype_bytes(sizes.out_dtype)
    stored = results * max(1.0, LEAST_BYTES / stored_bytes)
    least = (sizes.image_elements + sizes.terms * sizes.groups * sizes.filters) * sizes.item_bytes + results
    clock = gpu.clock_hz * SUSTAINED_CLOCK
    return (
        least / (gpu.dram_bytes_per_s * DRAM_SHARE),
        (tile.blocks * copied + stored) / gpu.l2_bytes_per_s,
        -(-tile.blocks // gpu.sm_count) * copied / (SM_BYTES_PER_CLOCK * clock),
    )


def _cycles(sizes: GroupedConvSizes, params: GroupedConvParams, gpu: Gpu) -> tuple[float, float, float]:
    """Return the cycles of a block on its SM: tensor cores, shared memory, instructions of its four schedulers."""
    turns = -(-params.pixel_fragments() // (params.warps_m * params.fragments))
    fragments = turns * params.warps_m * params.warps_n * params.fragments
    pairs, warp_tiles = -(-sizes.steps // 2), params.warp_tiles
    groups = max(1, warp_tiles * N_TILE // sizes.filters)
    products = fragments * pairs * max(warp_tiles, groups)
    multiply = MULTIPLY_SLOWDOWN * products * FRAGMENT * N_TILE * 2 * K_STEP / multiplies_per_cycle(gpu, sizes.dtype, "float32")
    # A register of every lane is 128 bytes: one cycle of shared memory.
    loads = fragments * pairs * groups * 4.0
    if not params.holds_weights(sizes):
        loads += fragments / params.fragments * pairs * warp_tiles * 2
    item = dtype_bytes(sizes.out_dtype)
    staged = 2 * fragments * FRAGMENT * warp_tiles * N_TILE * item / gpu.smem_bytes_per_clock_per_sm
    copied = params.tile(sizes).copied_bytes / gpu.smem_bytes_per_clock_per_sm
    by_ldmatrix = sizes.channels % K_STEP == 0
    instructions = products + fragments * pairs * groups * (2 if by_ldmatrix else 8) + fragments * warp_tiles * 2 * RESULT_CYCLES
    piece = math.gcd(PIECE, params.tile(sizes).groups * sizes.channels)
    instructions += params.tile(sizes).copied_bytes / (piece * ITEM_BYTES) / gpu.warp_size * COPY_CYCLES
    return multiply, (loads + staged + copied) * 128.0 / gpu.smem_bytes_per_clock_per_sm, instructions / 4


def _chain_cycles(sizes: GroupedConvSizes, params: GroupedConvParams) -> float:
    """Return the cycles that one warp takes if it never waits for another: its copies, then turn by turn what depends on one another."""
    turns = -(-params.pixel_fragments() // (params.warps_m * params.fragments))
    groups = max(1, params.warp_tiles * N_TILE // sizes.filters)
    products = params.fragments * max(groups, params.warp_tiles) * -(-sizes.steps // 2)
    turn = TURN_CYCLES + max(MMA_LATENCY_CYCLES * -(-sizes.steps // 2), ISSUE_CYCLES * products)
    turn += params.fragments * params.warp_tiles * 2 * RESULT_CYCLES * INSTRUCTION_CYCLES
    piece = math.gcd(PIECE, params.tile(sizes).groups * sizes.channels)
    copies = params.tile(sizes).copied_bytes / (piece * ITEM_BYTES) / params.threads
    return turns * turn + copies * COPY_CYCLES * INSTRUCTION_CYCLES
