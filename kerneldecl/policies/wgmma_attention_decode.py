"""Owns into which splits and stages attention against a KV cache on wgmma should be cut, and where it is faster than on mma.sync.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from kerneldecl.analysis import tensor_cores
from kerneldecl.analysis.attention import MMA_K
from kerneldecl.analysis.attention_decode import DecodeSizes, decode_of, steps
from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.analysis.wgmma_decode import BLOCK_KEYS, CHUNK_BYTES, CONSUMERS, WgmmaDecodeParams, row_blocks, stage_chunks, takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal
from kerneldecl.policies import gpu_attention_decode as mma_sync
from kerneldecl.policies.gpu.tensor_core_model import SUSTAINED_CLOCK
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, SM_BYTES_PER_CLOCK, p_norm
from kerneldecl.policies.hopper.time_model import GPU_TENSOR_RATE_FRACTION, launch_secs

TEMPLATES = ("wgmma_attention_decode",)
AUTO = {"cuda": 11}
HAS_TRACES = False

STAGES = (6, 4, 2)
RINGS = 2
CLUSTERS = (1, 2)
WAVES = (1, 2, 3, 4, 6, 8)
"""How often the CTAs of candidates fill the GPU, at most."""
FEW_ROWS = 16
"""Rows of a group below which predictions for mma.sync, which was fitted there, are taken as they are."""
FASTER = 1.1
"""Part of the time that mma.sync is predicted to take, under which this kernel is proposed. With 16 rows and more that prediction is too
low: its best kernels took 1.03 to 1.55 times as long (4 attentions, H200, 2026-11-23)."""

# Constants are counted instructions, and figures of other kernels. Latent attention with 128 heads took 0.93 to 1.05 of the time predicted
# in one part and 0.96 to 1.08 in two, 16 queries of groups of eight 1.15 (17 kernels, H200, 2026-11-23).

SOFTMAX_CYCLES = 500.0
"""Cycles of a block's softmax, which a consumer's own products do not hide: maxima, powers, sums, and their way to shared memory."""
PAIR_CYCLES = 300.0
"""Cycles of a pair of blocks in which consumers wait for barriers and for wgmma's latency."""
CLUSTER_CYCLES = 150.0
"""Cycles of a pair in which CTAs of a cluster wait for each other."""
TURNS = 0.98
"""Time of a pair where consumers take turns by that where they do not, if scores take longer than a softmax and each CTA loads for itself.
Elsewhere turns gained nothing, or cost up to 3 % (latent attention of 128 and of 16 heads, groups of 8, H200, 2026-11-23)."""
LOAD_CYCLES = 1500.0
"""Cycles from the release of a stage to the arrival of what is loaded there, besides its bytes."""
CTA_CYCLES = 6000.0
"""Cycles of a CTA besides its pairs: queries, lengths, the first keys, the store of results."""
STREAMED_SHARE = 0.94
"""Part of DRAM's bandwidth that keys and values of full sequences are read with: 0.936 at 64 x 8192 (H200, 2026-11-24)."""
MOST_UNDER_WAY, CROWDED = 128 * 1024, 1.025
"""Bytes under way to an SM, and DRAM's time with more of them by that with fewer: six stages of 128 columns took 2.0 to 3.1 % longer than
four (3 attentions of 4 rows, H200, 2026-11-24)."""
COMBINE_SECS = 1.3e-6
"""Seconds that the second kernel takes besides its traffic and its launch."""
PAIR_P_NORM = 2.5
"""Exponent of the norm of tensor cores' time for a pair of blocks, and the time of one consumer's instructions in their order."""
KERNEL_P_NORM = 10.0
"""Exponent of the norm of SMs' time, the power limit, L2 and DRAM."""


class Timed(NamedTuple):
    """Parameters with their predicted time."""

    secs: float
    params: WgmmaDecodeParams


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing where mma.sync is about as fast."""
    sizes = decode_of(space)
    if sizes is None or why_not(space, arch):
        return ()
    found = _timed(sizes, arch.the_gpu)
    return tuple(Proposal(timed.params.candidate(), timed.secs) for timed in found[:top_k])


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why this kernel is not proposed for a computation, as a sentence; empty where it is."""
    sizes, gpu = decode_of(space), arch.the_gpu
    if sizes is None:
        return "it is no attention of few queries against many keys"
    if gpu.compute_capability[0] != tensor_cores.first_capability("wgmma")[0]:
        return "the GPU has no wgmma"
    if not takes(sizes):
        return (
            "its elements do not have 16 bits; values do not have 128, 256, 384 or 512 columns; latent keys have no 64 columns more; "
            "or pages have no multiple of 8 keys"
        )
    ours = _timed(sizes, gpu)
    if not ours:
        return "not even two blocks of keys fit shared memory"
    others = min((mma_sync.secs(sizes, params, gpu) for params in mma_sync.choices(sizes, gpu)), default=float("inf"))
    allowed = 1.0 if sizes.group_rows < FEW_ROWS else FASTER
    return "" if ours[0].secs < allowed * others else "mma.sync is faster"


def _timed(sizes: DecodeSizes, gpu: Gpu) -> list[Timed]:
    return sorted(Timed(secs(sizes, params, gpu), params) for params in choices(sizes, gpu))


def choices(sizes: DecodeSizes, gpu: Gpu) -> Iterator[WgmmaDecodeParams]:
    """Yield the search space: as many stages as fit, or two less, and no more splits than there are pairs of blocks."""
    units = sizes.batch * sizes.kv_heads * row_blocks(sizes)
    most = -(-sizes.keys // (CONSUMERS * BLOCK_KEYS))
    splits = {1, *(min(most, waves * gpu.sm_count // units) for waves in WAVES)} - {0}
    for split_k, *others in itertools.product(sorted(splits), CLUSTERS, (0, 1)):
        rings = (WgmmaDecodeParams(stages, split_k, *others) for stages in STAGES)
        fitting = (params for params in rings if params.fits(sizes))
        yield from itertools.islice(fitting, RINGS)


def secs(sizes: DecodeSizes, params: WgmmaDecodeParams, gpu: Gpu) -> float:
    """Return the predicted time: the busiest SM's CTAs, the power limit, L2 and DRAM, and the combination of parts."""
    grid = sizes.batch * sizes.kv_heads * row_blocks(sizes) * params.split_k
    pairs = -(-sizes.keys // (CONSUMERS * BLOCK_KEYS * params.split_k))
    cycles = -(-grid // gpu.sm_count) * (pairs * pair_cycles(sizes, params, gpu) + CTA_CYCLES)
    multiplied = 2 * grid * pairs * CONSUMERS * BLOCK_KEYS * MMA_TILE_ROWS * (sizes.head_dim + sizes.value_dim)
    limit_secs = multiplied / (GPU_TENSOR_RATE_FRACTION * gpu.tensor_rate(sizes.dtype))
    dram_secs = sizes.cache_bytes / (gpu.dram_bytes_per_s * STREAMED_SHARE)
    dram_secs *= CROWDED if params.stages * stage_chunks(sizes) * CHUNK_BYTES > MOST_UNDER_WAY else 1.0
    l2_secs = sizes.cache_bytes * row_blocks(sizes) / params.cluster / gpu.l2_bytes_per_s
    clock_hz = gpu.clock_hz * SUSTAINED_CLOCK
    busy = p_norm(cycles / clock_hz, limit_secs, dram_secs + CTA_CYCLES / clock_hz, l2_secs, exponent=KERNEL_P_NORM)
    launch = launch_secs(gpu, has_pdl=True)
    combine = 0.0
    if params.split_k > 1:
        moved = 2 * 4 * sizes.batch * sizes.kv_heads * sizes.group_rows * params.split_k * sizes.value_dim
        combine = COMBINE_SECS + launch + moved / (gpu.dram_bytes_per_s * DRAM_SHARE)
    return busy + launch + combine


def pair_cycles(sizes: DecodeSizes, params: WgmmaDecodeParams, gpu: Gpu) -> float:
    """Return the cycles of a pair of blocks of keys, one for each consumer: tensor cores', or what a consumer does one after the other."""
    per_cycle = gpu.tensor_rate(sizes.dtype) / (gpu.sm_count * gpu.clock_hz)
    block = 2 * MMA_TILE_ROWS * BLOCK_KEYS / per_cycle
    scores, results = block * steps(sizes.head_dim) * MMA_K, block * sizes.value_dim
    chain = scores + 2 * SOFTMAX_CYCLES + results + PAIR_CYCLES
    refill = LOAD_CYCLES + stage_chunks(sizes) * CHUNK_BYTES / SM_BYTES_PER_CLOCK
    chain += refill / params.stages + (CLUSTER_CYCLES if params.cluster > 1 else 0.0)
    pays = params.turns and params.cluster == 1 and scores > SOFTMAX_CYCLES
    return p_norm(CONSUMERS * (scores + results), chain, exponent=PAIR_P_NORM) * (TURNS if pays else 1.0)
