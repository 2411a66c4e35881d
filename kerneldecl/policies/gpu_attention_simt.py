"""Owns which tiles attention on CUDA cores should try, and in which order: by their predicted time.

Knows nothing of TVM or of how the template builds the kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.attention import AttentionSizes, attention_of
from kerneldecl.analysis.attention_simt import (
    LANE_COLUMNS,
    QUAD,
    THREAD_M,
    THREAD_N,
    WARPS_M,
    WARPS_N,
    AttentionSimtParams,
    key_pitch,
    takes,
    value_columns,
)
from kerneldecl.analysis.gpu_limits import SM_PARTITIONS
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.attention_tiles import heads_in_l2, keys_of_tiles
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first
from kerneldecl.policies.gpu.tensor_core_model import SUSTAINED_CLOCK, start_secs
from kerneldecl.policies.gpu.time_model import CHAIN_CYCLES, DRAM_SHARE, SMEM_LOAD_CYCLES, occupancy, p_norm, warp_fma_cycles

TEMPLATES = ("gpu_attention_simt",)
AUTO = {"cuda": 18}
HAS_TRACES = False

MAX_WARPS = 8
SAME_TILE = 2
"""Proposals of one number of rows and keys at most."""
REGISTERS_SPREAD = 1.25
"""Registers that nvcc takes at most for each that is counted, as far as there are some: it loads operands ahead."""

# Counted in the code that nvcc 13.0 makes for sm_90; waits are those of the GEMMs on CUDA cores and of attention on mma.sync.
SCORE_INSTRUCTIONS = 14.0
"""Instructions of a lane for a score besides its product: bounds, maximum, power, sum, store."""
BIAS_INSTRUCTIONS = 10.0
ROW_INSTRUCTIONS = 30.0
"""Instructions of a lane for a row of a block: exchange of maxima, the factor of earlier results; the results themselves come to it."""
COPY_INSTRUCTIONS = 12.0
"""Instructions of a lane for one copy to shared memory with its address."""
BLOCK_CYCLES = 1400.0
"""Cycles of a block in which a CTA's warps do nothing else: two barriers, maxima of rows, first operands. Fitted, as the next one, to 40
tilings of two attentions of float32, of which 700 cycles and 1.0 proposed CTAs of one warp first that took 1.45 times as long as the best
(seed 43, H200, 2026-11), and kept with 118 tilings of seven."""
TILE_CYCLES = 4000.0
"""Cycles of a tile besides its blocks: its launch, first copies, last results and their store."""
BLOCK_P_NORM = 2.4
KERNEL_P_NORM = 12.0


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no attention that CUDA cores take."""
    sizes = attention_of(space)
    if sizes is None or not takes(sizes):
        return ()
    gpu = arch.the_gpu
    found = (Estimate(params, secs(sizes, params, gpu), (params.block_m, params.block_n)) for params in _choices(sizes, gpu))
    return tuple(itertools.islice(best_first(found, SAME_TILE), top_k))


def _choices(sizes: AttentionSizes, gpu: Gpu) -> Iterator[AttentionSimtParams]:
    """Yield tiles that fit, without warps that would have no rows or no keys."""
    together = heads_in_l2(sizes, gpu)
    for warps_m, warps_n, thread_m, thread_n in itertools.product(WARPS_M, WARPS_N, THREAD_M, THREAD_N):
        params = AttentionSimtParams(warps_m, warps_n, thread_m, thread_n, together)
        has_rows = params.block_m - params.warp_rows < sizes.queries or warps_m == 1
        has_keys = params.block_n - params.warp_keys < sizes.keys or warps_n == 1
        if warps_m * warps_n <= MAX_WARPS and has_rows and has_keys and params.fits(sizes, gpu):
            yield params


def secs(sizes: AttentionSizes, params: AttentionSimtParams, gpu: Gpu) -> float:
    """Return the predicted time of a kernel: the busiest SM's tiles, L2 and DRAM."""
    blocks = [-(-keys.stop // params.block_n) - keys.start // params.block_n for keys in keys_of_tiles(sizes, params.block_m)]
    tiles = -(-sizes.queries // params.block_m) * sizes.batch * sizes.heads
    resident = min(_resident(sizes, params, gpu), -(-tiles // gpu.sm_count))
    mean = sum(blocks) / len(blocks)
    # The longest tiles come first, so that SMs differ by about one mean tile; without a causal mask all are as long.
    rounds = -(-tiles // (gpu.sm_count * resident)) if not sizes.is_causal else max(1.0, tiles / (gpu.sm_count * resident) + 0.25)
    busiest = max(*blocks, mean * rounds)
    cycles = busiest * block_cycles(sizes, params, gpu, resident) + max(1.0, rounds) * (TILE_CYCLES + _merge_cycles(sizes, params))
    l2_bytes = mean * tiles * params.block_n * (sizes.head_dim + sizes.value_dim) * dtype_bytes(sizes.dtype)
    dram_secs = sizes.arguments_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE)
    times = (cycles / (gpu.clock_hz * SUSTAINED_CLOCK), l2_bytes / gpu.l2_bytes_per_s, dram_secs)
    return p_norm(*times, exponent=KERNEL_P_NORM) + start_secs(gpu)


def _resident(sizes: AttentionSizes, params: AttentionSimtParams, gpu: Gpu) -> int:
    """Return the CTAs that an SM holds at once: one at least, since nvcc keeps to what lets a CTA run."""
    registers = min(int(params.registers(sizes.value_dim) * REGISTERS_SPREAD), gpu.max_registers_per_thread)
    return max(1, occupancy(gpu, params.threads, registers, 4 * params.smem_floats(sizes.head_dim, sizes.value_dim)))


def _merge_cycles(sizes: AttentionSizes, params: AttentionSimtParams) -> float:
    """Return the cycles in which one warp merges what the others of its rows have found."""
    return (params.warps_n - 1) * params.thread_m * value_columns(sizes.value_dim) / LANE_COLUMNS * 4


def block_cycles(sizes: AttentionSizes, params: AttentionSimtParams, gpu: Gpu, resident: int) -> float:
    """Return the cycles in which so many CTAs on an SM each take a block of keys: they share its units."""
    quads, columns = key_pitch(sizes.head_dim) / QUAD, value_columns(sizes.value_dim) / LANE_COLUMNS
    rows, keys, warps = params.thread_m, params.thread_n, params.warps_m * params.warps_n
    biases = sizes.has_mask + sizes.has_alibi + sizes.has_softcap
    multiplied = rows * keys * quads * QUAD + rows * columns * params.warp_keys
    loads = quads * (rows + keys) + params.warp_keys / QUAD * (rows + columns)
    copies = params.block_n * (sizes.head_dim + sizes.value_dim) / QUAD / params.threads
    other = rows * keys * (SCORE_INSTRUCTIONS + biases * BIAS_INSTRUCTIONS) + rows * (ROW_INSTRUCTIONS + columns)
    other += copies * COPY_INSTRUCTIONS
    issued = multiplied * warp_fma_cycles(gpu, "float32") + loads + other
    smem = warps * (loads * SMEM_LOAD_CYCLES + rows * keys + copies * QUAD)
    # Fewer warps than an SM has partitions leave some of its CUDA cores idle. Products are independent, scores and copies a chain.
    busy = max(resident * warps / SM_PARTITIONS, 1.0)
    alone = -(-warps // SM_PARTITIONS) * issued + CHAIN_CYCLES * other + BLOCK_CYCLES
    return p_norm(busy * issued, resident * smem, alone, exponent=BLOCK_P_NORM)
