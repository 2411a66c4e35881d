"""Owns which tiles and pipelines of attention on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from kerneldecl.analysis import attention, tensor_cores
from kerneldecl.analysis.attention import AttentionSizes, WgmmaAttentionParams, attention_of
from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal
from kerneldecl.policies.gpu.tensor_core_model import SUSTAINED_CLOCK
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, p_norm
from kerneldecl.policies.hopper.time_model import launch_secs

TEMPLATES = ("wgmma_attention",)
HAS_TRACES = False

CONSUMERS = ((2, 1), (3, 1), (1, 2), (1, 3), (1, 1))
"""Consumers of a CTA, and CTAs of an SM."""
BLOCK_N = (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224)
FMA_POWERS = (0, 1, 2)
"""Values of `fma_powers`."""
MAX_STAGES = 4
L2_SHARE = 0.4
"""Part of L2 that the keys and values of heads that are computed together may take."""
SAME_TILE = 2
"""Proposals of one number of consumers and keys at most: their pipelines differ in little."""

EXP_PER_CLOCK = 16.0
"""Powers of two that an SM computes in a cycle (CUDA programming guide, arithmetic throughput, compute capability 9.0)."""
FLOAT32_PER_CLOCK = 128.0
"""float32 instructions of an SM in a cycle (same)."""
SCORE_INSTRUCTIONS = 4.5
"""Instructions for a score: maximum, multiply-add, power, sum, half a conversion."""
FMA_POWER_INSTRUCTIONS = 7.0
"""Instructions of a power on CUDA cores beyond those of one on special-function units."""
BLOCK_CYCLES = 250.0
"""Cycles in which a consumer does nothing else at a block: barriers, the exchange of maxima, the first wgmma's latency. Assumed."""
TILE_CYCLES = 1500.0
"""Cycles of a tile besides its blocks: its first scores, last results, and their store, as far as nothing hides them. Assumed."""
LOAD_CYCLES = 1000.0
"""Cycles until queries are there that are not loaded ahead. Assumed."""
OVERLAP = 4.0
"""Exponent of the norm of activities that overlap. Assumed."""


class Timed(NamedTuple):
    """Parameters with their predicted time."""

    secs: float
    params: WgmmaAttentionParams


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no attention that wgmma takes."""
    sizes = attention_of(space)
    if sizes is None or why_not(space, arch):
        return ()
    gpu, found = arch.the_gpu, list[Timed]()
    for timed in sorted(Timed(secs(sizes, params, gpu), params) for params in _choices(sizes, gpu)):
        same = sum(other.params[:2] == timed.params[:2] for other in found)
        if same < SAME_TILE and len(found) < top_k:
            found.append(timed)
    return tuple(Proposal(timed.params.candidate(), timed.secs) for timed in found)


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why the template does not take a computation, as a sentence; empty where it does."""
    sizes = attention_of(space)
    if sizes is None:
        return "it is no attention"
    if arch.the_gpu.compute_capability[0] != tensor_cores.first_capability("wgmma")[0]:
        return "the GPU has no wgmma"
    if not attention.takes(sizes.head_dim, sizes.value_dim, sizes.dtype, has_mask=sizes.has_mask):
        return "it has a mask, its elements do not have 16 bits, or heads' dimensions are no multiples of 8 up to 256"
    return ""


def _choices(sizes: AttentionSizes, gpu: Gpu) -> Iterator[WgmmaAttentionParams]:
    together = _heads_together(sizes, gpu)
    most_n = -(-sizes.keys // attention.MMA_K) * attention.MMA_K
    pipelines = itertools.product(CONSUMERS, BLOCK_N, (1, 2), (1, 0), FMA_POWERS)
    for (consumers, ctas), block_n, q_stages, overlap, fma in pipelines:
        if (consumers - 1) * MMA_TILE_ROWS >= sizes.queries or (block_n >= most_n + min(BLOCK_N) and block_n > min(BLOCK_N)):
            continue
        pingpong = int(consumers > 1)
        for stages in range(MAX_STAGES, 1, -1):
            params = WgmmaAttentionParams(consumers, block_n, stages, q_stages, overlap, pingpong, together, ctas, 1, fma, pdl=1)
            if params.fits(sizes.head_dim, sizes.value_dim):
                yield params
                break


def _heads_together(sizes: AttentionSizes, gpu: Gpu) -> int:
    """Return how many heads of queries have keys and values that stay in L2 together: whole groups of those that share them."""
    kv_bytes = sizes.keys * (sizes.head_dim + sizes.value_dim) * attention.ITEM_BYTES
    fitting = max(1, int(gpu.l2_bytes * L2_SHARE / kv_bytes))
    return min(fitting * sizes.group, sizes.batch * sizes.heads)


def secs(sizes: AttentionSizes, params: WgmmaAttentionParams, gpu: Gpu) -> float:
    """Return the predicted time of a kernel: the busiest SM's tiles, L2 and DRAM."""
    tiles = -(-sizes.queries // params.block_m) * sizes.batch * sizes.heads
    blocks = _blocks(sizes, params)
    resident = min(params.ctas_per_sm, -(-tiles // gpu.sm_count))
    per_block, per_tile = block_cycles(sizes, params, gpu, resident), _tile_cycles(params)
    waves = -(-tiles // (gpu.sm_count * resident))
    mean = sum(blocks) / len(blocks)
    # The longest tiles come first and every other wave goes backwards: CTAs differ by about one mean tile at most.
    busiest = max(*blocks, mean * (waves if not sizes.is_causal else max(1.0, tiles / (gpu.sm_count * resident) + 0.25)))
    sm_secs = (busiest * per_block + waves * per_tile) / (gpu.clock_hz * SUSTAINED_CLOCK)
    loaded = mean * tiles * params.block_n * (sizes.head_dim + sizes.value_dim) * attention.ITEM_BYTES
    dram_secs = sizes.arguments_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE)
    return p_norm(sm_secs, loaded / gpu.l2_bytes_per_s, dram_secs, exponent=OVERLAP) + launch_secs(gpu, has_pdl=bool(params.pdl))


def _blocks(sizes: AttentionSizes, params: WgmmaAttentionParams) -> list[int]:
    """Return how many blocks of keys each tile of a head goes through."""
    rows = range(0, sizes.queries, params.block_m)
    if not sizes.is_causal:
        return [-(-sizes.keys // params.block_n)] * len(rows)
    seen = (min(row + params.block_m, sizes.queries) + sizes.keys - sizes.queries for row in rows)
    return [max(1, -(-min(keys, sizes.keys) // params.block_n)) for keys in seen]


def block_cycles(sizes: AttentionSizes, params: WgmmaAttentionParams, gpu: Gpu, resident: int) -> float:
    """Return the cycles of a block of keys of all consumers of so many CTAs on an SM.

    They share tensor cores, special functions, CUDA cores and shared memory.
    """
    scores, results = _mma_cycles(sizes, params, gpu)
    elements = MMA_TILE_ROWS * params.block_n
    on_fma = params.fma_powers / 8
    exp = elements * (1 - on_fma) / EXP_PER_CLOCK
    issue = elements * (SCORE_INSTRUCTIONS + on_fma * FMA_POWER_INSTRUCTIONS) / FLOAT32_PER_CLOCK
    softmax = max(exp, issue)
    smem_bytes = (MMA_TILE_ROWS + params.block_n) * sizes.head_dim + params.block_n * sizes.value_dim
    smem = smem_bytes * attention.ITEM_BYTES / gpu.smem_bytes_per_clock_per_sm
    alone = BLOCK_CYCLES + scores + (max(results, softmax) if params.overlap else results + softmax)
    together = [resident * params.consumers * each for each in (scores + results, exp, issue, smem)]
    return p_norm(*together, alone, exponent=OVERLAP)


def _tile_cycles(params: WgmmaAttentionParams) -> float:
    """Return the cycles of a tile besides those of its blocks; one consumer's are hidden by others' work."""
    hidden = 1.0 if params.consumers == 1 else 0.5
    return TILE_CYCLES * hidden + (LOAD_CYCLES if params.q_stages == 1 else 0.0)


def _mma_cycles(sizes: AttentionSizes, params: WgmmaAttentionParams, gpu: Gpu) -> tuple[float, float]:
    """Return the cycles of one consumer's products at a block: scores, results."""
    per_cycle = gpu.tensor_rate(sizes.dtype) / (gpu.sm_count * gpu.clock_hz)
    steps = math.ceil(sizes.head_dim / attention.MMA_K) * attention.MMA_K
    pairs = 2 * MMA_TILE_ROWS * params.block_n
    return pairs * steps / per_cycle, pairs * sizes.value_dim / per_cycle
