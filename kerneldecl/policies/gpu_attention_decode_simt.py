"""Owns into which splits, warps and lanes attention against a KV cache on CUDA cores should be cut, and what to try first.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis import attention_decode
from kerneldecl.analysis.attention_decode import DecodeSizes, decode_of
from kerneldecl.analysis.attention_decode_simt import LANES, MAX_ROWS, UNROLL, DecodeSimtParams, takes, width
from kerneldecl.analysis.gpu_limits import SM_PARTITIONS, WARP_LANES
from kerneldecl.analysis.tensor_cores import first_capability
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies import gpu_attention_decode as mma_sync
from kerneldecl.policies import gpu_attention_simt
from kerneldecl.policies.gpu.decode_order import Kind, varied
from kerneldecl.policies.gpu.time_model import CHAIN_CYCLES, DRAM_LATENCY_SECS, FEW_TURNS, p_norm, warp_fma_cycles

TEMPLATES = ("gpu_attention_decode_simt",)
AUTO = {"cuda": 13}
HAS_TRACES = False

WARPS = (8, 4, 16, 2)
BLOCKS = (1, 2, 3, 4)
WAVES = (1, 2, 3, 4, 8)
"""How often the thread blocks of candidates fill the GPU, at most."""
SAME_SPLIT, SAME_TILE = 4, 3
"""Candidates with the same split, or the same lanes, keys and warps, that come before others: the model may be wrong there."""

# Instructions are counted in the text, rates NVIDIA's tables'; what streams is as fitted for mma.sync.

UNDER_WAY_SHARE = 0.6
"""Part of the bytes of a step that a warp has under way on average: either its keys or its values are being multiplied."""
SCORE_INSTRUCTIONS, SCORE_CYCLES = 6.0, 8.0
"""Instructions of a score besides products and shuffles, and the cycles of a partition in which its power of two is computed: 16 lanes a
cycle and SM (CUDA C++ Programming Guide, throughput of native arithmetic instructions)."""
SHUFFLE_CYCLES = 4.0
"""Cycles of a partition for a warp's shuffle: 32 lanes a cycle and SM (the same table)."""
KEY_INSTRUCTIONS, STEP_INSTRUCTIONS = 12.0, 40.0
"""Instructions of a thread for the addresses of a key and its values, and for a step besides its keys."""
STEP_CYCLES, LEVEL_CYCLES = 150.0, 30.0
"""Cycles of a step in which a warp waits for its own results, and for each level of its shuffles."""
LINE_CYCLES = 4.0
"""Cycles of an SM for each line that a warp's load touches. Fitted to eight attentions of float32, 104 kernels (H200, 2026-11): lanes that
read a row in pieces of 64 bytes took longer than those that read lines."""
MEAN_LENGTH, LONGEST_ALONE = 0.5, 0.5
"""Mean of lengths that are as likely as any up to the most, and the part of the longest sequence's thread blocks whose time nothing
overlaps: they begin at any time while others work. 8 sequences of 4096 keys at most in 2, 4 and 6 parts took 48, 42 and 41 us (H200,
2026-11)."""
FASTER = 0.85
"""Part of this kernel's time that tiles must be predicted to take: their model has less loss where DRAM is the limit, by 10 %."""
OVERLAP = 4.0
"""Exponent of the p-norm of times that overlap."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what other kernels are for, or is no such attention."""
    sizes, gpu = decode_of(space), arch.the_gpu
    if sizes is None or not takes(sizes) or _is_for_mma_sync(sizes, gpu):
        return ()
    timed = sorted({(secs(sizes, params, gpu), params) for params in choices(sizes, gpu)})
    if not timed or (not sizes.has_lengths and _is_slower_than_tiles(timed[0][0], space, arch)):
        return ()
    found = varied(timed, lambda params: Kind(params.split_k, (params.lanes, params.unroll, params.warps)), SAME_SPLIT, SAME_TILE)
    return tuple(Proposal(params.candidate(), predicted) for predicted, params in found[:top_k])


def _is_slower_than_tiles(secs: float, space: IterSpace, arch: Arch) -> bool:
    """Say whether tiles of queries by keys, which know no lengths and split no keys, are predicted to take much less time."""
    return any(proposal.predicted_secs < FASTER * secs for proposal in gpu_attention_simt.propose(space, arch, 1))


def _is_for_mma_sync(sizes: DecodeSizes, gpu: Gpu) -> bool:
    return attention_decode.takes(sizes) and gpu.compute_capability >= first_capability("mma.sync") and gpu.async_copy


def choices(sizes: DecodeSizes, gpu: Gpu) -> Iterator[DecodeSimtParams]:
    """Yield the search space: what fits an SM, with no more splits than there are blocks of keys for all warps, and no idle lanes."""
    for rows, lanes, unroll, warps, blocks in itertools.product(_rows(sizes), LANES, UNROLL, WARPS, BLOCKS):
        tile = DecodeSimtParams(rows, lanes, unroll, warps, 1, blocks)
        if not tile.fits(sizes, gpu) or (lanes > LANES[0] and lanes // 2 * width(sizes) >= max(sizes.head_dim, sizes.value_dim)):
            continue
        units = sizes.batch * sizes.kv_heads * -(-sizes.group_rows // rows)
        most = max(1, sizes.keys // (tile.block_n * warps))
        for split_k in sorted({1} | {min(most, waves * blocks * gpu.sm_count // units) for waves in WAVES} - {0}):
            # An SM has no use for room for thread blocks that are not there.
            if units * split_k > (blocks - 1) * gpu.sm_count:
                yield tile._replace(split_k=split_k)


def _rows(sizes: DecodeSizes) -> list[int]:
    """Return the rows of thread blocks: even shares of a group's rows, in as few thread blocks as registers may allow, or twice as many."""
    fewest = -(-sizes.group_rows // MAX_ROWS)
    return sorted({-(-sizes.group_rows // (fewest * by)) for by in (1, 2, 4, 8, 16)})


def _steps(sizes: DecodeSizes, params: DecodeSimtParams) -> int:
    """Return how many blocks of keys a warp goes through in a sequence of full length."""
    return -(-sizes.keys // (params.block_n * params.warps * params.split_k))


def secs(sizes: DecodeSizes, params: DecodeSimtParams, gpu: Gpu) -> float:
    """Return the predicted time: DRAM with what is under way, L2 where blocks share keys, an SM's instructions, and the combination."""
    row_blocks = -(-sizes.group_rows // params.rows)
    grid = sizes.batch * sizes.kv_heads * row_blocks * params.split_k
    slots = gpu.sm_count * params.blocks
    full, rest = divmod(grid, slots)
    block_bytes = sizes.cache_bytes * row_blocks / grid
    streamed = full * slots * block_bytes / _bytes_per_s(sizes, params, gpu, slots)
    streamed += rest * block_bytes / _bytes_per_s(sizes, params, gpu, rest) if rest else 0.0
    if sizes.has_lengths and sizes.batch > 1:
        streamed = MEAN_LENGTH * streamed + LONGEST_ALONE * block_bytes / _alone_bytes_per_s(sizes, params, gpu)
    elif grid > gpu.sm_count:
        streamed *= (-(-grid // gpu.sm_count) * gpu.sm_count / grid) ** mma_sync.UNEVEN_POWER
    resident = min(params.blocks, -(-grid // gpu.sm_count))
    # Of many turns the last one overlaps others: thread blocks differ in when they began.
    turns = grid / slots if grid > FEW_TURNS * slots else -(-grid // slots)
    computed = turns * _steps(sizes, params) * _step_secs(sizes, params, gpu, resident)
    busy = p_norm(streamed, computed, exponent=OVERLAP) + mma_sync.GROUP_SECS * params.warps
    busy += mma_sync.PAGES_SECS if sizes.page_size else 0.0
    return busy + mma_sync.launch_secs(gpu) + (_combine_secs(sizes, params, gpu, grid) if params.split_k > 1 else 0.0)


def _combine_secs(sizes: DecodeSizes, params: DecodeSimtParams, gpu: Gpu, grid: int) -> float:
    """Return the time of the second kernel, which adds up the results of a grid's thread blocks."""
    turns = -(-params.parts // mma_sync.AT_ONCE)
    moved = 2 * 4 * grid * params.rows * sizes.value_dim
    return mma_sync.COMBINE_SECS + mma_sync.PARTS_SECS * turns + mma_sync.launch_secs(gpu) + moved / gpu.l2_bytes_per_s


def _bytes_per_s(sizes: DecodeSizes, params: DecodeSimtParams, gpu: Gpu, active: int) -> float:
    """Return the bandwidth that so many thread blocks reach at once; those that share keys read them from DRAM once."""
    step_bytes = params.held_vectors(sizes) * width(sizes) * dtype_bytes(sizes.dtype) * WARP_LANES
    under_way = active * params.warps * step_bytes * UNDER_WAY_SHARE / mma_sync.LOADED_LATENCY_SECS
    of_sms = min(active, gpu.sm_count) * mma_sync.SM_BYTES_PER_CLOCK * gpu.clock_hz
    row_blocks = -(-sizes.group_rows // params.rows)
    of_dram = row_blocks * gpu.dram_bytes_per_s * mma_sync.STREAMED_SHARE
    of_l2 = gpu.l2_bytes_per_s if row_blocks > 1 else math.inf
    return 1 / p_norm(1 / under_way, 1 / of_sms, 1 / of_dram, 1 / of_l2, exponent=OVERLAP)


def _alone_bytes_per_s(sizes: DecodeSizes, params: DecodeSimtParams, gpu: Gpu) -> float:
    """Return the bandwidth that a thread block reaches while others have ended."""
    step_bytes = params.held_vectors(sizes) * width(sizes) * dtype_bytes(sizes.dtype) * WARP_LANES
    return min(params.warps * step_bytes / DRAM_LATENCY_SECS, mma_sync.SM_BYTES_PER_CLOCK * gpu.clock_hz)


def _step_secs(sizes: DecodeSizes, params: DecodeSimtParams, gpu: Gpu, resident: int) -> float:
    """Return the time of a block of keys of each warp of an SM: a warp's own latencies, what its partitions issue, lines that it loads."""
    vectors, levels = sum(params.vectors(sizes)), math.log2(params.lanes)
    elements = vectors * width(sizes)
    fma_cycles = elements * (params.rows * warp_fma_cycles(gpu, "float32") + (0 if sizes.dtype == "float32" else 1))
    score_cycles = levels * (SHUFFLE_CYCLES + 1) + SCORE_INSTRUCTIONS + SCORE_CYCLES
    issued = params.unroll * (fma_cycles + params.rows * score_cycles + vectors + KEY_INSTRUCTIONS) + STEP_INSTRUCTIONS
    alone = CHAIN_CYCLES * issued + STEP_CYCLES + LEVEL_CYCLES * levels
    warps = params.warps * resident
    lines = params.held_vectors(sizes) * max(1.0, WARP_LANES / params.lanes) * LINE_CYCLES
    return p_norm(alone, issued * warps / SM_PARTITIONS, lines * warps, exponent=OVERLAP) / gpu.clock_hz
