"""Owns which tiles and pipelines of attention on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kerneldecl.analysis import attention, tensor_cores
from kerneldecl.analysis.attention import AttentionSizes, WgmmaAttentionParams, attention_of
from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MMA_TILE_ROWS
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.attention_tiles import L2_SHARE, MOST_TILES, heads_in_l2, is_worth_a_try, keys_of_tiles
from kerneldecl.policies.gpu.tensor_core_model import SUSTAINED_CLOCK
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, p_norm
from kerneldecl.policies.hopper.time_model import GPU_TENSOR_RATE_FRACTION, launch_secs

TEMPLATES = ("wgmma_attention",)
AUTO = {"cuda": 14}
HAS_TRACES = False

CONSUMERS = ((2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 1))
"""Consumers of a CTA, and CTAs of an SM."""
BLOCK_N = (48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224)
PIPELINES = ((1, 1), (0, 1), (1, 2))
"""Values of `pingpong` and `cluster`."""
OVERLAP = 1
"""Without overlap, or with two blocks' scores in registers, the best kernels were 4 % slower and more (7 attentions, H200, 2026-11-23)."""
FMA_POWERS = 0
"""With an eighth of the powers on CUDA cores, kernels were 2 to 12 % slower (3 attentions, H200, 2026-11-23)."""
MAX_STAGES = 4
SAME_TILE = 3
"""Proposals of one number of consumers and keys at most: their pipelines differ in little."""
MANY_WAVES = 16
"""Waves of tiles from which on SMs are taken to have equal work."""

# Fitted to 48 kernels of 12 attentions on an H200 (2026-11-23): heads of 40 to 256, 128 to 16384 keys. BLOCK_CYCLES, TILE_CYCLES and
# SHARED_TILE were refitted to 14 attentions of 45 to 4096 queries, seven of them drawn at random (2026-11-28).

SOFTMAX_CYCLES = 9.9 / 128
"""Cycles of an SM for a score: 1/16 for its power, which nothing of the same warp hides wholly, and what is multiplied and added."""
CAP_CYCLES = 17.6 / 128
SLOPE_CYCLES = 3.0 / 128
MASK_CYCLES = 10.0 / 128
"""Cycles for what softcap, slopes and a mask do to a score. Counted instructions, not measured."""
BLOCK_CYCLES = 400.0
"""Cycles of a block in which its consumer does nothing else: barriers, the exchange of maxima, wgmma's latency."""
TILE_CYCLES = 3500.0
"""Cycles of a tile besides its blocks: its first scores, last results, and their store, as far as nothing hides them."""
SHARED_TILE = 0.7
"""Part of these that is left where another consumer works meanwhile."""
LOAD_CYCLES = 4000.0
"""Cycles of a tile that waits for its queries, because the tile before has their place."""
UNALIGNED_ROW_CYCLES = 7.0
"""Cycles in which TMA loads a row that is no multiple of 128 bytes; others are no limit."""
PINGPONG_FACTOR = 0.98
"""Ratio of an SM's times where consumers take turns, so that one's softmax overlaps with the other's MMAs, and where they do not: 0.95 to
1.01 for eleven attentions, pair by pair (H200, 2026-11)."""
BLOCK_P_NORM = 2.56
"""Exponent of the norm of what overlaps at a block."""
KERNEL_P_NORM = 20.0
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
    gpu, best, found = arch.the_gpu, dict[WgmmaAttentionParams, Timed](), list[Timed]()
    for timed in sorted(Timed(secs(sizes, params, gpu), params) for params in _choices(sizes, gpu)):
        best.setdefault(timed.params._replace(heads_together=0), timed)
    for timed in best.values():
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
            "its elements do not have 16 bits, or 8 with results of 16; its mask has too many; or rows of heads are no whole 16 bytes, "
            "or have more than 256 elements"
        )
    return ""


def _choices(sizes: AttentionSizes, gpu: Gpu) -> Iterator[WgmmaAttentionParams]:
    all_heads, item_bytes, mma_k = sizes.batch * sizes.heads, dtype_bytes(sizes.dtype), _mma_k(sizes)
    blocks = tuple(block_n for block_n in BLOCK_N if block_n % mma_k == 0)
    for (consumers, ctas), block_n, together in itertools.product(CONSUMERS, blocks, {heads_in_l2(sizes, gpu), all_heads}):
        if not is_worth_a_try(sizes, (consumers - 1) * MMA_TILE_ROWS, block_n, blocks, mma_k):
            continue
        for pingpong, cluster in PIPELINES if consumers > 1 else ((0, 1),):
            if cluster > 1 and (consumers != 2 or (not sizes.band.is_full and sizes.group % cluster)):
                continue
            rings = (
                WgmmaAttentionParams(consumers, block_n, stages, q_stages, OVERLAP, pingpong, together, ctas, cluster, FMA_POWERS, pdl=1)
                for q_stages, stages in itertools.product((2, 1), range(MAX_STAGES, 1, -1))
            )
            fitting = (params for params in rings if params.fits(sizes.head_dim, sizes.value_dim, sizes.bias_registers, item_bytes))
            yield from itertools.islice(fitting, 1)


def secs(sizes: AttentionSizes, params: WgmmaAttentionParams, gpu: Gpu) -> float:
    """Return the predicted time of a kernel: the busiest SM's tiles, the power limit, L2 and DRAM."""
    ctas = params.ctas_per_sm * gpu.sm_count
    tiles = -(-sizes.queries // params.block_m) * sizes.batch * sizes.heads
    resident = min(params.ctas_per_sm, -(-tiles // gpu.sm_count))
    per_block, per_tile = block_cycles(sizes, params, gpu, resident), _tile_cycles(params)
    busiest = max(count * per_tile + blocks * per_block for count, blocks in _work(sizes, params, ctas))
    sm_secs = busiest / (gpu.clock_hz * SUSTAINED_CLOCK) * (PINGPONG_FACTOR if params.pingpong else 1.0)
    keys = _keys_seen(sizes, params.block_m) * sizes.batch * sizes.heads
    columns, item_bytes = sizes.head_dim + sizes.value_dim, dtype_bytes(sizes.dtype)
    limit_secs = 2 * keys * params.block_m * columns / (GPU_TENSOR_RATE_FRACTION * gpu.tensor_rate(sizes.dtype))
    l2_secs = keys * columns * item_bytes / gpu.l2_bytes_per_s
    together = -(-params.heads_together // sizes.group) * sizes.keys * columns * item_bytes
    reloads = -(-tiles // ctas) - 1 if together > gpu.l2_bytes * L2_SHARE else 0
    kv_bytes = sizes.batch * sizes.kv_heads * sizes.keys * columns * item_bytes
    dram_secs = (sizes.arguments_bytes + reloads * kv_bytes) / (gpu.dram_bytes_per_s * DRAM_SHARE)
    launch = launch_secs(gpu, has_pdl=bool(params.pdl))
    before = launch + _transpose_secs(sizes, gpu) if sizes.dtype == attention.FLOAT8 else 0.0
    return p_norm(sm_secs, limit_secs, l2_secs, dram_secs, exponent=KERNEL_P_NORM) + launch + before


def _transpose_secs(sizes: AttentionSizes, gpu: Gpu) -> float:
    """Return the time of the kernel that transposes values of float8: it reads and writes them."""
    return 2 * sizes.batch * sizes.kv_heads * sizes.keys * sizes.value_dim / (gpu.dram_bytes_per_s * DRAM_SHARE)


def _work(sizes: AttentionSizes, params: WgmmaAttentionParams, ctas: int) -> Iterable[tuple[int, float]]:
    """Return how many tiles, and blocks of keys in them, CTAs have, without repetition."""
    tiles = -(-sizes.queries // params.block_m) * sizes.batch * sizes.heads
    if sizes.band.is_full:
        count = -(-tiles // ctas)
        return [(count, count * -(-sizes.keys // params.block_n))]
    if tiles > MANY_WAVES * ctas:
        dealt = [(-(-tiles // ctas), _keys_seen(sizes, params.block_m) * sizes.batch * sizes.heads // ctas)]
    else:
        dealt = _dealt(sizes, params.block_m, params.heads_together, ctas)
    # Where keys are limited, a tile's last block, or its first one, reaches half a block further than its rows see, in the mean.
    limits = sum(limit is not None for limit in sizes.band)
    return [(count, seen / params.block_n + count * limits / 2) for count, seen in dealt]


@functools.lru_cache
def _dealt(sizes: AttentionSizes, block_m: int, heads_together: int, ctas: int) -> list[tuple[int, int]]:
    """Return how many tiles each CTA takes and how many keys these see, as the kernel deals them out.

    Heads that belong together come first, the longest tiles of them first, and every other wave goes backwards.
    """
    seen, heads = _tiles_keys(sizes, block_m, most=sizes.queries), sizes.batch * sizes.heads
    order = [
        keys for first in range(0, heads, heads_together) for keys in reversed(seen) for _ in range(min(heads_together, heads - first))
    ]
    work = [[0, 0] for _ in range(min(ctas, len(order)))]
    for index, keys in enumerate(order):
        wave, place = divmod(index, len(work))
        mine = work[place if wave % 2 == 0 else -1 - place]
        mine[0] += 1
        mine[1] += keys
    return sorted({(count, keys) for count, keys in work})


def _tiles_keys(sizes: AttentionSizes, block_m: int, most: int = MOST_TILES) -> list[int]:
    """Return how many keys the tiles of a head see, as `keys_of_tiles` has them."""
    return [max(1, len(keys)) for keys in keys_of_tiles(sizes, block_m, most)]


def _keys_seen(sizes: AttentionSizes, block_m: int) -> int:
    """Return how many keys all tiles of a head see."""
    seen = _tiles_keys(sizes, block_m)
    return sum(seen) * -(-sizes.queries // block_m) // len(seen)


def block_cycles(sizes: AttentionSizes, params: WgmmaAttentionParams, gpu: Gpu, resident: int) -> float:
    """Return the cycles of a block of keys of all consumers of so many CTAs on an SM: they share tensor cores, and what softmax takes."""
    scores, results = _mma_cycles(sizes, params, gpu)
    bias = sizes.has_softcap * CAP_CYCLES + sizes.has_alibi * SLOPE_CYCLES + sizes.has_mask * MASK_CYCLES
    softmax = MMA_TILE_ROWS * params.block_n * (SOFTMAX_CYCLES + bias)
    consumers = resident * params.consumers
    alone = BLOCK_CYCLES + scores + max(results, softmax)
    cycles = p_norm(consumers * (scores + results), consumers * softmax, alone, exponent=BLOCK_P_NORM)
    is_aligned = all(row_bytes % K_TILE_BYTES == 0 for row_bytes in _row_bytes(sizes))
    loads = 0.0 if is_aligned else 2 * params.block_n * resident * UNALIGNED_ROW_CYCLES
    return p_norm(cycles, loads, exponent=2 * BLOCK_P_NORM)


def _row_bytes(sizes: AttentionSizes) -> tuple[int, int]:
    """Return the bytes of rows of keys and values that TMA loads. Those of float8's values, which are transposed, have a chunk's keys."""
    if sizes.dtype == attention.FLOAT8:
        return sizes.head_dim, K_TILE_BYTES
    return sizes.head_dim * attention.ITEM_BYTES, sizes.value_dim * attention.ITEM_BYTES


def _mma_k(sizes: AttentionSizes) -> int:
    """Return how many elements of the reduction one wgmma multiplies."""
    return attention.MMA_K * attention.ITEM_BYTES // dtype_bytes(sizes.dtype)


def _tile_cycles(params: WgmmaAttentionParams) -> float:
    """Return the cycles of a tile besides those of its blocks."""
    return TILE_CYCLES * (1.0 if params.consumers == 1 else SHARED_TILE) + (LOAD_CYCLES if params.q_stages == 1 else 0.0)


def _mma_cycles(sizes: AttentionSizes, params: WgmmaAttentionParams, gpu: Gpu) -> tuple[float, float]:
    """Return the cycles of one consumer's products at a block: scores, results."""
    per_cycle = gpu.tensor_rate(sizes.dtype) / (gpu.sm_count * gpu.clock_hz)
    steps = math.ceil(sizes.head_dim / _mma_k(sizes)) * _mma_k(sizes)
    pairs = 2 * MMA_TILE_ROWS * params.block_n
    return pairs * steps / per_cycle, pairs * sizes.value_dim / per_cycle
