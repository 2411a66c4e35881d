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
from kerneldecl.policies.hopper.time_model import GPU_TENSOR_RATE_FRACTION, launch_secs

TEMPLATES = ("wgmma_attention",)
HAS_TRACES = False

CONSUMERS = ((2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 1))
"""Consumers of a CTA, and CTAs of an SM."""
BLOCK_N = (48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224)
OVERLAPS = (1, 2, 0)
FMA_POWERS = (0, 1)
"""Values of `fma_powers`. Two eighths were 1 to 6 % slower than one in 13 of 15 cases (H200, 2026-11-23)."""
MAX_STAGES = 4
L2_SHARE = 0.4
"""Part of L2 that the keys and values of heads that are computed together may take."""
SAME_TILE = 2
"""Proposals of one number of consumers and keys at most: their pipelines differ in little."""

# Fitted to 44 kernels of 11 attentions on an H200 (2026-11-23), with a root mean square of 4.6 %: heads of 40 to 256, 128 to 4096 keys.

SOFTMAX_CYCLES = 2.4 / 128
"""Cycles of an SM for a score, besides its power."""
POWER_CYCLES = 8.8 / 128
"""Cycles for a power: 1/16 for special functions, which nothing of the same warp hides wholly."""
FMA_POWER_CYCLES = 10.0 / 128
"""Cycles for a power on CUDA cores."""
BLOCK_CYCLES = 710.0
"""Cycles of a block in which its consumer does nothing else: barriers, the exchange of maxima, wgmma's latency."""
TILE_CYCLES = 5000.0
"""Cycles of a tile besides its blocks: its first scores, last results, and their store, as far as nothing hides them."""
SHARED_TILE = 0.49
"""Part of these that is left where another consumer works meanwhile."""
BLOCK_P_NORM = 2.4
"""Exponent of the norm of what overlaps at a block."""
KERNEL_P_NORM = 12.0
"""Exponent of the norm of SMs' time, the power limit, L2 and DRAM."""


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
    if not attention.takes(sizes):
        return (
            "it has another mask than a causal one, its elements do not have 16 bits, or heads' dimensions are no multiples of 8 up to 256"
        )
    return ""


def _choices(sizes: AttentionSizes, gpu: Gpu) -> Iterator[WgmmaAttentionParams]:
    together = _heads_together(sizes, gpu)
    most_n = -(-sizes.keys // attention.MMA_K) * attention.MMA_K
    for (consumers, ctas), block_n, overlap, fma in itertools.product(CONSUMERS, BLOCK_N, OVERLAPS, FMA_POWERS):
        if (consumers - 1) * MMA_TILE_ROWS >= sizes.queries or (block_n >= most_n + min(BLOCK_N) and block_n > min(BLOCK_N)):
            continue
        pingpong = int(consumers > 1 and overlap < 2)
        rings = (
            WgmmaAttentionParams(consumers, block_n, stages, q_stages, overlap, pingpong, together, ctas, 1, fma, pdl=1)
            for q_stages, stages in itertools.product((2, 1), range(MAX_STAGES, 1, -1))
        )
        yield from itertools.islice((params for params in rings if params.fits(sizes.head_dim, sizes.value_dim)), 1)


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
    rows, columns = mean * tiles * params.block_n, sizes.head_dim + sizes.value_dim
    limit_secs = 2 * rows * params.block_m * columns / (GPU_TENSOR_RATE_FRACTION * gpu.tensor_rate(sizes.dtype))
    l2_secs = rows * columns * attention.ITEM_BYTES / gpu.l2_bytes_per_s
    dram_secs = sizes.arguments_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE)
    return p_norm(sm_secs, limit_secs, l2_secs, dram_secs, exponent=KERNEL_P_NORM) + launch_secs(gpu, has_pdl=bool(params.pdl))


def _blocks(sizes: AttentionSizes, params: WgmmaAttentionParams) -> list[int]:
    """Return how many blocks of keys each tile of a head goes through."""
    rows = range(0, sizes.queries, params.block_m)
    if not sizes.is_causal:
        return [-(-sizes.keys // params.block_n)] * len(rows)
    seen = (sizes.band.keys_of(range(row, min(row + params.block_m, sizes.queries)), sizes.keys) for row in rows)
    return [max(1, -(-keys.stop // params.block_n)) for keys in seen]


def block_cycles(sizes: AttentionSizes, params: WgmmaAttentionParams, gpu: Gpu, resident: int) -> float:
    """Return the cycles of a block of keys of all consumers of so many CTAs on an SM: they share tensor cores, and what softmax takes."""
    scores, results = _mma_cycles(sizes, params, gpu)
    on_fma = params.fma_powers / 8
    power = (1 - on_fma) * POWER_CYCLES + on_fma * FMA_POWER_CYCLES
    softmax = MMA_TILE_ROWS * params.block_n * (SOFTMAX_CYCLES + power)
    alone = (scores + results + softmax, scores + max(results, softmax), max(scores + results, softmax))[params.overlap]
    consumers = resident * params.consumers
    return p_norm(consumers * (scores + results), consumers * softmax, BLOCK_CYCLES + alone, exponent=BLOCK_P_NORM)


def _tile_cycles(params: WgmmaAttentionParams) -> float:
    """Return the cycles of a tile besides those of its blocks."""
    return TILE_CYCLES * (1.0 if params.consumers == 1 else SHARED_TILE)


def _mma_cycles(sizes: AttentionSizes, params: WgmmaAttentionParams, gpu: Gpu) -> tuple[float, float]:
    """Return the cycles of one consumer's products at a block: scores, results."""
    per_cycle = gpu.tensor_rate(sizes.dtype) / (gpu.sm_count * gpu.clock_hz)
    steps = math.ceil(sizes.head_dim / attention.MMA_K) * attention.MMA_K
    pairs = 2 * MMA_TILE_ROWS * params.block_n
    return pairs * steps / per_cycle, pairs * sizes.value_dim / per_cycle
