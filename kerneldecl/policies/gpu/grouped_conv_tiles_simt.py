"""Owns the time model of convolutions in groups on CUDA cores: tiles, strips and how long they take.

Knows nothing of TVM or of which candidates are proposed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import SM_PARTITIONS, VECTOR_BYTES
from kerneldecl.analysis.grouped_conv import GroupedConvSizes
from kerneldecl.analysis.grouped_conv_params import GroupedConvSimtParams
from kerneldecl.model import Gpu, dtype_bytes
from kerneldecl.policies.gpu.grouped_conv_tiles import (
    COPY_CYCLES,
    INSTRUCTION_CYCLES,
    LEAST_BYTES,
    MAX_BLOCK_N,
    OVERLAP,
    PIXELS,
    memory_secs,
    sides,
)
from kerneldecl.policies.gpu.tensor_core_model import SUSTAINED_CLOCK
from kerneldecl.policies.gpu.time_model import DRAM_LATENCY_SECS, launch_secs, occupancy, p_norm, warp_fma_cycles

STRIPS, THREADS = (2, 4, 7, 8), (64, 128, 256)
MOST_WIDTHS = 4
"""Numbers of output channels that are tried, the narrowest that read whole sectors, besides the fewest and the most."""
BLOCK_BYTES = 512
"""Bytes of a pixel's results in a block at most."""
OTHER_REGISTERS = 36
"""Registers of a thread besides sums, pixels and weights."""
STRIP_CYCLES, RESULT_CYCLES = 40.0, 3.0
"""Instructions for a strip's place and its stores, and for one result. Counted in the code."""
LOAD_CYCLES = 1.5
"""Instructions of one load from shared memory."""

DEPTHWISE_SLOWDOWN = 1.5
"""How much longer depthwise convolutions take than their instructions, whose loads of one channel each wait more than others. Fitted to 35
tilings of five convolutions (H200, 2026-11)."""


def timed(sizes: GroupedConvSizes, gpu: Gpu) -> Iterator[tuple[float, GroupedConvSimtParams]]:
    """Yield what fits a GPU, with its predicted time."""
    return ((_secs(sizes, params, gpu), params) for params in _choices(sizes) if params.fits(sizes, gpu))


def _choices(sizes: GroupedConvSizes) -> Iterator[GroupedConvSimtParams]:
    """Yield the search space; some of it may not fit."""
    fewest = min(PIXELS[0], sizes.rows.results * sizes.columns.results)
    widest = VECTOR_BYTES // max(sizes.item_bytes, dtype_bytes(sizes.out_dtype))
    widths = [each for each in (1, 2, 4, 8) if widest % each == 0][-2:]
    blocks_n = _blocks_n(sizes)
    for rows, columns in itertools.product(sides(sizes.rows), sides(sizes.columns)):
        if not fewest <= rows * columns <= PIXELS[1]:
            continue
        strips = {min(strip, columns) for strip in STRIPS}
        for block_n, strip, threads in itertools.product(blocks_n, strips, THREADS):
            whole = block_n if sizes.is_depthwise else min(sizes.filters, block_n)
            for width in {math.gcd(width, whole) for width in widths}:
                params = GroupedConvSimtParams(rows, columns, block_n, strip, width, threads)
                if params.strips * params.vectors >= threads:
                    yield params


def _blocks_n(sizes: GroupedConvSizes) -> list[int]:
    """Return how many output channels a block may have: those of some whole groups, or a part of one group's."""
    most = min(MAX_BLOCK_N, BLOCK_BYTES // sizes.item_bytes)
    whole = {count * sizes.filters for count in range(1, sizes.groups + 1) if sizes.groups % count == 0 and count * sizes.filters <= most}
    parts = {sizes.filters // count for count in (2, 4, 8, 16) if sizes.filters % (count * 4) == 0}
    # Weights of a whole group may not fit shared memory.
    narrow = sorted(whole | parts)
    wide = [block_n for block_n in narrow if block_n * sizes.item_bytes >= LEAST_BYTES]
    return sorted({*narrow[:1], *narrow[-1:], *wide[:MOST_WIDTHS]})


def _secs(sizes: GroupedConvSizes, params: GroupedConvSimtParams, gpu: Gpu) -> float:
    """Return the predicted time: memory's, and that of the busiest SM's instructions over latencies.

    A block copies before it computes. Blocks of the first round begin together, so that the two do not overlap there; later ones copy
    while others compute: depthwise convolutions of 100 and 150 MB took 0.66 and 0.7 of what the sum predicts (seed 43, H200, 2026-11).
    """
    tile = params.tile(sizes)
    resident = occupancy(gpu, params.threads, OTHER_REGISTERS + params.registers(sizes), tile.smem_bytes)
    if not resident:
        return math.inf
    per_sm, clock = -(-tile.blocks // gpu.sm_count), gpu.clock_hz * SUSTAINED_CLOCK
    item = _instructions(sizes, params, gpu)
    warps = params.turns * params.threads / gpu.warp_size
    copies = tile.copied_bytes / (tile.image_piece * sizes.item_bytes) / params.threads * COPY_CYCLES
    issued = (warps * item + copies * params.threads / gpu.warp_size) / SM_PARTITIONS
    sm_secs = per_sm * p_norm(issued, warps * _smem_cycles(sizes, params, gpu), exponent=OVERLAP) / clock
    chain = (params.turns * item + copies) * INSTRUCTION_CYCLES
    rounds = max(1.0, per_sm / resident)
    latency = rounds * (2 * DRAM_LATENCY_SECS + chain / clock)
    stored_bytes = params.vectors * params.width * dtype_bytes(sizes.out_dtype)
    moved_secs = p_norm(*memory_secs(tile, stored_bytes, gpu), exponent=OVERLAP)
    slowdown = DEPTHWISE_SLOWDOWN if sizes.is_depthwise else 1.0
    shorter, longer = sorted((moved_secs, slowdown * p_norm(sm_secs, latency, exponent=OVERLAP)))
    return longer + shorter / rounds + launch_secs(gpu)


def _loads(sizes: GroupedConvSizes, params: GroupedConvSimtParams) -> tuple[int, int]:
    """Return how many vectors of pixels and of weights a thread loads for a strip."""
    depth = params.depth(sizes)
    chunks = sizes.rows.taps * (1 if sizes.is_depthwise else sizes.channels // depth)
    columns = sizes.columns
    pixels = len({p * columns.stride + s * columns.dilation for p in range(params.strip) for s in range(columns.taps)})
    return chunks * pixels, chunks * columns.taps * (1 if sizes.is_depthwise else depth)


def _instructions(sizes: GroupedConvSizes, params: GroupedConvSimtParams, gpu: Gpu) -> float:
    """Return the cycles of a scheduler for a warp's strips."""
    pixels, weights = _loads(sizes, params)
    products = params.strip * params.width * sizes.terms
    widened = (pixels * params.depth(sizes) + weights * params.width) if sizes.item_bytes < 4 else 0
    results = params.strip * params.width * RESULT_CYCLES
    return products * warp_fma_cycles(gpu, "float32") + widened + (pixels + weights) * LOAD_CYCLES + results + STRIP_CYCLES


def _smem_cycles(sizes: GroupedConvSizes, params: GroupedConvSimtParams, gpu: Gpu) -> float:
    """Return the cycles of shared memory for a warp's strips: lanes that read the same place share it."""
    pixels, weights = _loads(sizes, params)
    lanes = gpu.warp_size
    same_pixels = 1 if sizes.is_depthwise else min(lanes, min(sizes.filters, params.block_n) // params.width)
    pixel_bytes = lanes / max(1, same_pixels) * params.depth(sizes) * sizes.item_bytes
    weight_bytes = min(lanes, params.vectors) * params.width * sizes.item_bytes
    cycles = [max(1.0, each / gpu.smem_bytes_per_clock_per_sm) for each in (pixel_bytes, weight_bytes)]
    return pixels * cycles[0] + weights * cycles[1]
