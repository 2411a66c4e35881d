"""Owns into which splits, warps and stages attention against a KV cache should be cut on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.attention_decode import ITEM_BYTES, MMA_STEP, DecodeParams, DecodeSizes, decode_of, steps, takes
from kerneldecl.analysis.gpu_limits import FIRST_PDL_CAPABILITY, SM_PARTITIONS, VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.tensor_cores import first_capability
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal
from kerneldecl.policies.gpu.decode_order import Kind, varied
from kerneldecl.policies.gpu.time_model import p_norm

TEMPLATES = ("gpu_attention_decode",)
AUTO = {"cuda": 12}
HAS_TRACES = False

ROWS = (8, 16, 32, 64)
BLOCK_N = (16, 32, 64)
WARPS_M = (1, 2, 4, 8)
WARPS = (4, 8, 2, 16)
STAGES = (2, 3, 4, 6, 8)
BLOCKS = (1, 2, 3, 4)
CLUSTERS = (1, 2, 4, 8)
WAVES = (1, 2, 3, 4, 8)
"""How often the thread blocks of candidates fill the GPU, at most."""
SAME_SPLIT, SAME_TILE = 4, 3
"""Candidates with the same split, or the same warps, keys and blocks on an SM, that come before others: the model may be wrong there."""

# Fitted to 70 kernels of 15 attentions of 4 rows on an H200 (2026-11-23): 1 to 64 sequences, contiguous and in pages.

LOADED_LATENCY_SECS = 0.4e-6
"""Seconds from the issue of a block's copies to their arrival."""
SM_BYTES_PER_CLOCK = 27.3
"""Bytes that one SM draws from DRAM in a cycle, at most."""
STREAMED_SHARE = 0.867
"""Part of DRAM's bandwidth that keys and values are read with, where an SM has one thread block."""
BLOCKS_LOSS = 0.023
"""Part of that which is lost with each doubling of an SM's thread blocks: each reads two streams of its own."""
UNEVEN_POWER = 0.25
"""Power of the ratio of the busiest SM's thread blocks to the mean by which streaming takes longer: 60 kernels of two attentions with 160
and 170 MB of keys and values took 1.0 to 1.3 times as long with 140 to 616 thread blocks (H200, 2026-11)."""
PAGES_SECS = 1.7e-6
"""Seconds that numbers of pages take, which keys wait for, and pages that lie apart."""
START_SECS = 0.0
"""Seconds until the first keys have arrived, and a thread block's results are stored, as far as the kernels beside it leave them to see."""
CLUSTER_SECS = 0.93e-6
"""Seconds in which the thread blocks of a cluster meet and read each other's results, for each doubling of their number, and once more."""
COMBINE_SECS, PARTS_SECS = 0.7e-6, 0.65e-6
"""Seconds that the second kernel takes besides its traffic, and for each `AT_ONCE` parts that it adds up one after the other. Refitted to
160 kernels of eight attentions drawn at random (H200, 2026-11)."""
GROUP_SECS = 6e-8
"""Seconds for each group of warps whose results a thread block adds up at its end: with half of the warps and twice as long blocks of keys
each of five attentions took 0.1 to 0.9 us less (H200, 2026-11)."""
AT_ONCE = 8
PDL_LAUNCH_SHARE = 0.5
"""Part of a launch's time that is left where the kernel starts while the preceding one ends."""
BLOCK_CYCLES, MMA_CYCLES, COPY_CYCLES = 100.0, 18.0, 24.0
"""Cycles of a warp for a block of keys, besides those of each mma.sync and each copy: it waits for one after the other."""
ISSUED_CYCLES = 52.0
"""Cycles in which a scheduler issues a block's instructions besides these."""
MMA_SHARE = 0.6
"""Part of the tensor cores' rate that mma.sync reaches on a GPU that has wgmma."""
OVERLAP = 4.0
"""Exponent of the p-norm of times that overlap."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no attention of few queries."""
    sizes, gpu = decode_of(space), arch.the_gpu
    if sizes is None or not takes(sizes) or gpu.compute_capability < first_capability("mma.sync") or not gpu.async_copy:
        return ()
    timed = sorted({(secs(sizes, params, gpu), params) for params in choices(sizes, gpu)})
    found = varied(timed, lambda params: Kind(params.split_k, (params.warps, params.block_n, params.blocks)), SAME_SPLIT, SAME_TILE)
    return tuple(Proposal(params.candidate(), predicted) for predicted, params in found[:top_k])


def choices(sizes: DecodeSizes, gpu: Gpu) -> Iterator[DecodeParams]:
    """Yield the search space: what fits an SM, with no more splits than there are blocks of keys for all groups of warps."""
    for (rows, warps_m), block_n, warps, stages, blocks in itertools.product(_rows(sizes), BLOCK_N, WARPS, STAGES, BLOCKS):
        units = sizes.batch * sizes.kv_heads * -(-sizes.group_rows // (rows * warps_m))
        most = max(1, sizes.keys * warps_m // (block_n * warps))
        splits = {min(most, waves * blocks * gpu.sm_count // units) for waves in WAVES} | {
            split_k for split_k in CLUSTERS if split_k <= most
        }
        for split_k, cluster in itertools.product(sorted(splits - {0}), CLUSTERS):
            params = DecodeParams(rows, block_n, warps_m, warps, stages, split_k, blocks, cluster)
            if params.fits(sizes, gpu) and (_blocks_of_group(sizes, params) >= stages - 1 or stages == min(STAGES)):
                yield params


def _rows(sizes: DecodeSizes) -> list[tuple[int, int]]:
    """Return the rows of a warp, and how many warps share keys: no more than have rows, and those that fit registers are found later."""
    most = max(min(ROWS), sizes.group_rows)
    found = itertools.product(ROWS, WARPS_M)
    return [(rows, warps_m) for rows, warps_m in found if rows < 2 * most and (warps_m == 1 or rows * (warps_m - 1) < most)]


def _blocks_of_group(sizes: DecodeSizes, params: DecodeParams) -> int:
    """Return how many blocks of keys a group of warps goes through in a sequence of full length."""
    return -(-sizes.keys // (params.block_n * params.groups * params.split_k))


def secs(sizes: DecodeSizes, params: DecodeParams, gpu: Gpu) -> float:
    """Return the predicted time: DRAM with what is in flight, L2 where blocks share keys, warps' own time, and the combination."""
    row_blocks = -(-sizes.group_rows // params.block_rows)
    grid = sizes.batch * sizes.kv_heads * row_blocks * params.split_k
    slots = gpu.sm_count * params.blocks
    waves = -(-grid // slots)
    block_bytes = sizes.cache_bytes * row_blocks / grid
    full, rest = divmod(grid, slots)
    streamed = full * slots * block_bytes / _bytes_per_s(sizes, params, gpu, slots)
    streamed += rest * block_bytes / _bytes_per_s(sizes, params, gpu, rest) if rest else 0.0
    # SMs with one more thread block than others end later, though memory is the limit and others get less of it.
    streamed *= max(1.0, -(-grid // gpu.sm_count) * gpu.sm_count / grid if grid > gpu.sm_count else 1.0) ** UNEVEN_POWER
    resident = min(params.blocks, -(-grid // gpu.sm_count))
    computed = waves * _blocks_of_group(sizes, params) * _block_secs(sizes, params, gpu, resident)
    # Thread blocks that share an SM hide each other's ends.
    ends = waves / params.blocks if waves > 1 else 1.0
    ends *= START_SECS + (CLUSTER_SECS * params.cluster.bit_length() if params.cluster > 1 else 0.0)
    busy = p_norm(streamed, computed, exponent=OVERLAP) + ends + GROUP_SECS * params.groups + (PAGES_SECS if sizes.page_size else 0.0)
    return busy + launch_secs(gpu) + (_combine_secs(sizes, params, gpu, grid) if params.split_k > params.cluster else 0.0)


def launch_secs(gpu: Gpu) -> float:
    """Return the time of a launch, less where the kernel starts while the preceding one ends."""
    has_pdl = gpu.compute_capability >= FIRST_PDL_CAPABILITY
    return gpu.launch_secs * (PDL_LAUNCH_SHARE if has_pdl else 1.0)


def _combine_secs(sizes: DecodeSizes, params: DecodeParams, gpu: Gpu, grid: int) -> float:
    """Return the time of the second kernel, which adds up the results of a grid's clusters."""
    results = grid // params.cluster * params.block_rows * sizes.value_dim
    return COMBINE_SECS + PARTS_SECS * -(-params.parts // AT_ONCE) + launch_secs(gpu) + 2 * 4 * results / gpu.l2_bytes_per_s


def _bytes_per_s(sizes: DecodeSizes, params: DecodeParams, gpu: Gpu, active: int) -> float:
    """Return the bandwidth that so many thread blocks reach at once; those that share keys read them from DRAM once."""
    stage = params.stage_bytes(sizes.head_dim, sizes.value_dim, is_latent=sizes.is_latent)
    ahead = min(params.stages - 1, _blocks_of_group(sizes, params))
    in_flight = active * params.groups * ahead * stage / LOADED_LATENCY_SECS
    of_sms = min(active, gpu.sm_count) * SM_BYTES_PER_CLOCK * gpu.clock_hz
    row_blocks = -(-sizes.group_rows // params.block_rows)
    share = STREAMED_SHARE * (1 - BLOCKS_LOSS * math.log2(params.blocks))
    of_memory = min(gpu.l2_bytes_per_s, row_blocks * gpu.dram_bytes_per_s * share)
    return 1 / p_norm(1 / in_flight, 1 / of_sms, 1 / of_memory, exponent=OVERLAP)


def _block_secs(sizes: DecodeSizes, params: DecodeParams, gpu: Gpu, resident: int) -> float:
    """Return the time of a block of keys beside all groups of an SM: a warp's latencies, or what schedulers and shared memory take."""
    mmas = params.block_n // MMA_STEP * params.row_tiles * (steps(sizes.head_dim) + steps(sizes.value_dim))
    stage = params.stage_bytes(sizes.head_dim, sizes.value_dim, is_latent=sizes.is_latent)
    copies = stage / (WARP_LANES * VECTOR_BYTES * params.warps_m)
    alone = BLOCK_CYCLES + mmas * MMA_CYCLES + copies * COPY_CYCLES
    # mma.sync m16n8k16 takes 4096 operations of the tensor cores, half of whose rate it reaches where wgmma has all of it.
    mma_cycles = 4096 * SM_PARTITIONS * gpu.sm_count * gpu.clock_hz / (MMA_SHARE * gpu.tensor_rate(sizes.dtype))
    issued = max(ISSUED_CYCLES + copies * COPY_CYCLES / 2 + mmas * 2, mmas * mma_cycles)
    read = params.block_n * (sizes.head_dim + sizes.value_dim) * ITEM_BYTES / gpu.smem_bytes_per_clock_per_sm
    warps = params.warps * resident
    return max(alone, issued * max(1.0, warps / SM_PARTITIONS), read * warps) / gpu.clock_hz
