"""Owns which tiles and pipelines of attention on mma.sync a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis import attention_tc, tensor_cores
from kerneldecl.analysis.attention import AttentionSizes, attention_of
from kerneldecl.analysis.attention_tc import POWER_BYTES, AttentionTcParams, Rows
from kerneldecl.analysis.gpu_limits import SM_PARTITIONS
from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.attention_tiles import L2_SHARE, heads_in_l2, is_worth_a_try, keys_of_tiles
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first
from kerneldecl.policies.gpu.tensor_core_model import LOAD_CYCLES, SUSTAINED_CLOCK, multiplies_per_cycle, start_secs
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, p_norm

TEMPLATES = ("gpu_attention_tc",)
AUTO = {"cuda": 15}
HAS_TRACES = False

WARPS = (4, 8, 2, 1)
FRAGMENTS = (2, 1)
BLOCK_N = (32, 48, 64, 80, 96, 112, 128, 160, 192)
LARGEST_OF_A_WARP = 256
"""Columns of values up to which no warps share rows."""
COLUMN_WARPS = (4, 8, 2, 1)
"""Warps that share rows of heads with more columns of values than one warp's registers hold results of."""
SHARED_BLOCK_N = (16, 32, 48, 64, 96, 128)
"""Keys of their blocks, of which each such warp takes a multiple of 8."""
SPLIT_K = (1, 2, 3, 4, 6, 8)
MOST_DIVIDED = 2
"""Tiles of rows for each that SMs hold, up to which keys are divided."""
STAGES = (2, 1, 3)
FMA_POWERS = (0, 1)
MAX_CTAS_PER_SM = 8
SAME_TILE = 2
"""Proposals of one number of rows and keys at most: their pipelines differ in little."""

# Taken from the model of attention on wgmma, which computes the softmax in the same way.
SOFTMAX_CYCLES = 2.4 / 128
"""Cycles of an SM for a score, besides its power."""
POWER_CYCLES = 8.8 / 128
FMA_POWER_CYCLES = 10.0 / 128
"""Cycles for a power on CUDA cores."""
BIAS_CYCLES = 6.0 / 128
"""Cycles for a score to which a mask is added: its load, conversion and addition. Slopes and caps take about as much."""
BLOCK_CYCLES = 400.0
"""Cycles of a block in which its warps do nothing else: two barriers, the exchange of maxima, the first fragments."""
EXCHANGE_CYCLES = 300.0
"""Cycles of a block more where warps share rows, assumed: a third barrier, maxima and powers on their way through shared memory."""
TILE_CYCLES = 2500.0
"""Cycles of a tile besides its blocks: its launch, first copies, last results and their store."""
BLOCK_P_NORM = 2.4
"""Exponent of the norm of what overlaps at a block."""
KERNEL_P_NORM = 12.0
"""Exponent of the norm of SMs' time, L2 and DRAM."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no attention that mma.sync takes."""
    sizes = attention_of(space)
    if sizes is None or why_not(space, arch):
        return ()
    gpu = arch.the_gpu
    found = (
        Estimate(params, secs(sizes, params, gpu), (params.block_m, params.block_n, params.split_k)) for params in _choices(sizes, gpu)
    )
    return tuple(itertools.islice(best_first(found, SAME_TILE), top_k))


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why the template does not take a computation, as a sentence; empty where it does."""
    sizes, gpu = attention_of(space), arch.the_gpu
    if sizes is None:
        return "it is no attention"
    if gpu.compute_capability < tensor_cores.first_capability("mma.sync") or not gpu.async_copy:
        return "the GPU has no mma.sync of 16 x 8 x 16 or no cp.async"
    if not attention_tc.takes(sizes, gpu):
        return (
            "tensor cores do not take its dtype (nor float32: infinities would become NaN), an argument has too many elements, or heads' "
            f"dimensions are no multiples of 8 up to {attention_tc.MAX_HEAD_DIM}"
        )
    return ""


def _choices(sizes: AttentionSizes, gpu: Gpu) -> Iterator[AttentionTcParams]:
    together, shares_rows = heads_in_l2(sizes, gpu), sizes.value_dim > LARGEST_OF_A_WARP
    # Where heads are large, powers are few beside products: special-function units compute them.
    column_warps, blocks, powers = (COLUMN_WARPS, SHARED_BLOCK_N, (0,)) if shares_rows else ((1,), BLOCK_N, FMA_POWERS)
    # Of these a CTA has few rows, unless their keys are divided.
    splits = SPLIT_K if shares_rows else (1,)
    for columns, warps, fragments, block_n, stages, fma in itertools.product(column_warps, WARPS, FRAGMENTS, blocks, STAGES, powers):
        if not is_worth_a_try(sizes, (warps * fragments - 1) * FRAGMENT, block_n, blocks, FRAGMENT):
            continue
        rows = Rows.of(sizes, columns)
        for q_in_registers in (1, 0):
            residents = (
                AttentionTcParams(warps, fragments, block_n, stages, q_in_registers, together, ctas, fma, columns)
                for ctas in range(MAX_CTAS_PER_SM, 0, -1)
            )
            for params in itertools.islice((params for params in residents if params.fits(rows, gpu, has_bias=sizes.has_bias)), 1):
                yield from (params._replace(split_k=parts) for parts in splits if _is_worth_dividing(sizes, params, parts, gpu))


def _is_worth_dividing(sizes: AttentionSizes, params: AttentionTcParams, parts: int, gpu: Gpu) -> bool:
    """Say whether each part of the keys has a block, and rows alone do not fill the SMs several times."""
    tiles = -(-sizes.queries // params.block_m) * sizes.batch * sizes.heads
    has_keys = parts * params.block_n < sizes.keys + params.block_n
    return parts == 1 or (has_keys and tiles < MOST_DIVIDED * gpu.sm_count * params.ctas_per_sm)


def secs(sizes: AttentionSizes, params: AttentionTcParams, gpu: Gpu) -> float:
    """Return the predicted time of a kernel: the busiest SM's tiles, L2 and DRAM."""
    blocks = _blocks(sizes, params)
    tiles = -(-sizes.queries // params.block_m) * sizes.batch * sizes.heads * params.split_k
    per_sm = -(-tiles // gpu.sm_count)
    resident = min(params.ctas_per_sm, per_sm)
    mean = sum(blocks) / len(blocks)
    # The longest tiles come first, so that SMs differ by about one mean tile; without a causal mask all are as long.
    rounds = -(-tiles // (gpu.sm_count * resident)) if not sizes.is_causal else max(1.0, tiles / (gpu.sm_count * resident) + 0.25)
    busiest = max(*blocks, mean * rounds)
    cycles = busiest * block_cycles(sizes, params, gpu, resident) + max(1.0, rounds) * TILE_CYCLES
    sm_secs = cycles / (gpu.clock_hz * SUSTAINED_CLOCK)
    l2_bytes = mean * tiles * params.block_n * (sizes.head_dim + sizes.value_dim) * dtype_bytes(sizes.dtype)
    dram_secs = sizes.arguments_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE)
    return (
        p_norm(sm_secs, l2_bytes / gpu.l2_bytes_per_s, dram_secs, exponent=KERNEL_P_NORM)
        + start_secs(gpu)
        + _combine_secs(sizes, params, gpu)
    )


def _combine_secs(sizes: AttentionSizes, params: AttentionTcParams, gpu: Gpu) -> float:
    """Return the time in which parts of the keys leave their results, and a second kernel combines them."""
    if params.split_k == 1:
        return 0.0
    parts_bytes = 4 * params.split_k * sizes.batch * sizes.heads * sizes.queries * sizes.value_dim
    bytes_per_s = gpu.l2_bytes_per_s if parts_bytes < gpu.l2_bytes * L2_SHARE else gpu.dram_bytes_per_s * DRAM_SHARE
    return 2 * parts_bytes / bytes_per_s + start_secs(gpu)


def _blocks(sizes: AttentionSizes, params: AttentionTcParams) -> list[int]:
    """Return how many blocks of keys the tiles of a head go through, as `keys_of_tiles` has them, or the longest parts of them."""
    found = [-(-keys.stop // params.block_n) - keys.start // params.block_n for keys in keys_of_tiles(sizes, params.block_m)]
    return [-(-blocks // params.split_k) for blocks in found]


def _biases(sizes: AttentionSizes) -> int:
    """Return how many things are done to each score before its softmax."""
    return sizes.has_mask + sizes.has_alibi + sizes.has_softcap


def block_cycles(sizes: AttentionSizes, params: AttentionTcParams, gpu: Gpu, resident: int) -> float:
    """Return the cycles in which so many CTAs on an SM each take a block of keys: they share its units."""
    scores = params.block_m * params.block_n
    columns = params.column_warps
    rows = Rows.of(sizes, columns)
    row_bytes = rows.qk_bytes + rows.value_dim * rows.item_bytes
    # Fewer warps than an SM has partitions leave some of its tensor cores idle.
    idle = max(1.0, SM_PARTITIONS / (params.warps * columns))
    on_fma = params.fma_powers / 8
    softmax = scores * (SOFTMAX_CYCLES + (1 - on_fma) * POWER_CYCLES + on_fma * FMA_POWER_CYCLES + _biases(sizes) * BIAS_CYCLES)
    products = scores * row_bytes / rows.item_bytes / multiplies_per_cycle(gpu, rows.dtype, "float32")
    read = params.warps * params.block_n * row_bytes
    read += 0 if params.q_in_registers else columns * params.block_m * rows.qk_bytes
    written = params.block_n * row_bytes
    read += columns * scores * POWER_BYTES if columns > 1 else 0
    smem = (read + written) / gpu.smem_bytes_per_clock_per_sm
    waited = BLOCK_CYCLES + (LOAD_CYCLES if params.stages == 1 else 0.0) / 4 + (EXCHANGE_CYCLES if columns > 1 else 0.0)
    alone = (products + softmax + smem / 4) * idle + waited
    busy = max(float(resident), idle)
    return p_norm(busy * products, busy * softmax, resident * smem, alone, exponent=BLOCK_P_NORM)
