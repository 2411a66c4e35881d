"""Owns which blocks and register tiles of attention a CPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.attention import AttentionSizes, attention_of
from kerneldecl.analysis.cpu_params import CpuAttentionParams
from kerneldecl.model import Arch, Cpu, IterSpace, Proposal
from kerneldecl.policies.cpu import time_model as model

TEMPLATES = ("cpu_attention",)
AUTO = {"cpu": 25}
HAS_TRACES = False

MOST = 8
"""Proposals at most: the model is right within a few per cent, and each takes half a second to build."""
VECTORS = (4, 3, 2, 1)
"""Vectors of queries of a task."""
BLOCKS_N = (64, 128)
"""Keys of a block, about: rounded to tiles."""
TILES = (4, 5, 6, 8, 10, 12)
"""Rows of a register tile."""
POWER_INSTRUCTIONS = 18.0
"""Instructions for a vector of powers, with the loads, stores and maxima of their scores."""
COLUMN_CYCLES = 1.0
"""Cycles of one core for an element of queries or results: transposing, dividing, loading, storing. About half of it is shuffles."""
TILE_CYCLES = 30.0
"""Cycles of a register tile besides its multiplications: loop, addresses, and results that the next tile waits for."""
CHOICE_CYCLES = 2.0
"""Cycles for an element of a mask, ALiBi or softcap: a mask's are transposed, others computed."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no attention."""
    sizes = attention_of(space)
    if sizes is None:
        return ()
    cpu = arch.the_cpu
    estimates = [estimate(sizes, params, cpu) for params in dict.fromkeys(choices(sizes, cpu))]
    return model.ranked(estimates)[: min(top_k, MOST)]


def choices(sizes: AttentionSizes, cpu: Cpu) -> Iterator[CpuAttentionParams]:
    """Yield the parameters whose accumulators fit the vector registers, beside a row of vectors and a number that is spread."""
    lanes = model.compute_lanes(cpu, "float32")
    most = -(-sizes.queries // lanes)
    for vectors, rows in itertools.product(VECTORS, TILES):
        if vectors > most or vectors * (rows + 1) + 1 > cpu.vector_registers:
            continue
        tile_n, tile_e = min(rows, sizes.keys), _even(sizes.value_dim, rows)
        for keys, pack in itertools.product(BLOCKS_N, (False, True) if sizes.dtype == "float32" else (True,)):
            block_n = min(-(-keys // tile_n), -(-sizes.keys // tile_n)) * tile_n
            params = CpuAttentionParams(vectors * lanes, block_n, tile_n, tile_e, pack)
            if params.fits(lanes):
                yield params


def _even(extent: int, most: int) -> int:
    """Return the rows of tiles of which an extent needs as few as of the largest ones, the last of which is nearly whole."""
    return -(-extent // -(-extent // most))


def estimate(sizes: AttentionSizes, params: CpuAttentionParams, cpu: Cpu) -> model.Estimate:
    """Return the predicted time: the busiest core's tasks, and packing before them."""
    blocks = [len(sizes.band.keys_of(range(row, row + params.block_m), sizes.keys)) for row in range(0, sizes.queries, params.block_m)]
    heads = sizes.batch * sizes.heads
    tasks = heads * len(blocks)
    mean = sum(blocks) / len(blocks)
    share = model.busiest_share(tasks, cpu.cores) * tasks
    kv_bytes = 4 * mean * (sizes.head_dim + sizes.value_dim)
    # A block's values and powers are read again for each tile of results.
    again = 4 * params.block_n * (sizes.value_dim + params.block_m)
    near = kv_bytes + (mean / params.block_n * again * sizes.value_dim / params.tile_e if again > cpu.l1d_bytes else 0)
    item_bytes = sizes.arguments_bytes
    works = [
        *_packing(sizes, params, cpu),
        model.Work(
            compute_cycles=share * _task_cycles(sizes, params, cpu, mean),
            l2_bytes=share * near,
            l3_bytes=share * kv_bytes / len(blocks),
            dram_bytes=item_bytes if item_bytes > cpu.l3_bytes else 0,
            parallel_regions=int(tasks > 1),
        ),
    ]
    return model.estimate_of(cpu, params.candidate(), works, (params.block_m, params.tile_n))


def _task_cycles(sizes: AttentionSizes, params: CpuAttentionParams, cpu: Cpu, keys: float) -> float:
    """Return the cycles of a task that sees so many keys, were all operands in L1."""
    vectors = params.block_m // model.compute_lanes(cpu, "float32")
    scores = -(-keys // params.tile_n) * (sizes.head_dim * _step_cycles(params.tile_n, vectors, cpu) + TILE_CYCLES)
    blocks = max(1.0, keys / params.block_n)
    tiles = -(-sizes.value_dim // params.tile_e)
    values = tiles * (keys * _step_cycles(params.tile_e, vectors, cpu) + blocks * TILE_CYCLES)
    results = blocks * 2 * sizes.value_dim * vectors * cpu.vector_bytes / cpu.l1_bytes_per_cycle
    powers = keys * vectors * POWER_INSTRUCTIONS / cpu.fma_per_cycle
    changed = int(sizes.has_mask and sizes.mask[-2] > 1) + sizes.has_alibi + 4 * sizes.has_softcap
    columns = params.block_m * (sizes.head_dim + sizes.value_dim) * COLUMN_CYCLES
    return scores + values + results + powers + columns + changed * CHOICE_CYCLES * keys * vectors


def _step_cycles(rows: int, vectors: int, cpu: Cpu) -> float:
    """Return the cycles in which a register tile adds one product to each accumulator."""
    # A broadcast reads one element and costs half of a full vector's load.
    loads = (vectors + rows / 2) * cpu.vector_bytes / cpu.l1_bytes_per_cycle
    return max(rows * vectors / cpu.fma_per_cycle, loads, model.FMA_LATENCY_CYCLES)


def _packing(sizes: AttentionSizes, params: CpuAttentionParams, cpu: Cpu) -> Iterator[model.Work]:
    """Yield the work of copying keys and values."""
    if params.pack:
        items = sizes.batch * sizes.kv_heads * sizes.keys * (sizes.head_dim + sizes.value_dim)
        yield model.Work(l3_bytes=8 * items / cpu.cores, parallel_regions=1)
