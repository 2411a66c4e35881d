"""Owns how long a GPU with wgmma takes for tiles that warpgroups multiply out of a ring of stages in shared memory.

Knows nothing of TVM, of templates or of where tiles come from: a convolution's rows are as good as a matrix's.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.model import Gpu, dtype_bytes
from kerneldecl.policies.gpu.tensor_core_model import ROUNDED_DOWN, SUSTAINED_CLOCK
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, SM_BYTES_PER_CLOCK, p_norm

STEP_BYTES = 128
"""Of the reduction in one stage: the row that TMA permutes and wgmma reads."""
WARPGROUP = 128
"""Threads that multiply together."""
WGMMA_ROWS = 64
RESERVED_BYTES = 1024
"""Of shared memory, for barriers and alignment."""
CLOCKED, POWERED = 0.87, 0.70
"""Of the tensor cores' rate, which NVIDIA gives at 1.83 GHz, what one SM reaches, and what all sustain together: more would take
too much power: float16 products of 4096 to 16384 ran at 0.66 of it. The first one and the next ones are fitted to 500 kernels on an
H200: products of 1024 to 8192 in 8 and 16 bits, of 16 and 64 rows with wide weights, of 512 with short sums, and convolutions."""
LOAD_SECS = 8.8e-7
"""From asking for a stage to its arrival while all SMs ask."""
START_SECS = 1.5e-7
"""Before the first multiplication: barriers set up, a cluster met, the first stage from DRAM."""
STAGE_SECS = 2.2e-8
"""Of each stage, before all of them are on their way."""
STORE_BYTES_PER_CYCLE = 34.0
"""At which results leave registers, through shared memory."""
SPLIT_SECS = 4.8e-7
"""Of the blocks of a cluster to meet and add their parts up, for each beyond the first."""
FRESH_L2, SHARED_L2, L2_PARTS = 0.83, 2.0, 2
"""What L2 delivers of its rate of what comes from DRAM, and of what many SMs ask for again: products of 1024 on an H200 read over
12 TB/s of it, two SMs that read the same weights at once 6. Each of its parts fetches what it does not have."""
STAGGERED_SHARE = 0.4
"""Of the time in which results leave, what shows where a second consumer multiplies meanwhile what it is behind. Assumed."""
PART_BYTES_PER_CYCLE = 8.6
"""At which the parts of a sum go from block to block."""
LEAST_STEP_SECS = 1.41e-7
"""Of a step, however little there is to multiply: its barrier, and four wgmmas one after the other."""
STEP_OVERLAP, OVERLAP = 7.1, 6.1
"""How well the times of a step, and those of the whole, overlap: 1 would be not at all, infinity perfectly."""
STREAM_SECS, PIECE_SECS, STREAM_BYTES_PER_CYCLE = 5e-6, 6e-7, 70.0
"""Where the last waves are dealt evenly: of the kernel that clears flags and of a tile more to begin and to end, of each piece to be
found by who adds it, one after the other, and the rate at which a block brings sums to L2 and from there. Fitted to 16 products of 512 to
8192 rows on an H200, with 2 to 17 pieces a tile."""
CLUSTER_SECS = 7.5e-7
"""Of the blocks of a cluster to start and to end together."""
EARLY_SHARE = 0.5
"""Of a launch, what shows where it began before the kernel in front had ended."""
GATHER_SECS, GATHERED_BYTES, GATHER_INSTRUCTIONS = 7e-7, 64, 60.0
"""Where TMA cannot bring an operand: from asking for elements to their arrival, what each thread of a warpgroup asks for at once,
and what it does with every 16 bytes of it. Assumed, and within a quarter of ten products of odd sizes on
an H200; a smaller one took half as long again."""
PIECE_BYTES = 16
SCHEDULERS = 4
CLUSTERS_LOST = 11
"""Of so many clusters of more than 2 one finds no room, since a cluster lies within one processing cluster (GPC), and those are of 16 or
18 SMs: an H200 holds 30 of 4 at once."""
TORN_SHARE = 1.08
"""How much longer it takes where only some of a kernel's blocks can come early, or so many that they pile up on a part of the SMs: by
0 to 20 percent in products of 8 to 128 rows on an H200."""
FULL_SHARE = 0.9
"""Of the SMs that have a block: then all may have one."""
OWN_REGISTERS = 48
"""Of a thread beside its sums, where an SM has several blocks."""
SUM_BYTES = 4
"""Of one sum, at most."""
BUFFER_BYTES = 8192
"""For 64 x 64 results of 16 bits."""
MOST_BUFFERS = 4


class Ring(NamedTuple):
    """What one block holds: a tile's rows and columns, a stage of each operand for every `STEP_BYTES` of the reduction."""

    rows: int
    columns: int
    is_pingpong: bool = False
    """Whether each consumer has a tile of its own, so that results leave behind the other one's multiplications."""
    gathered_bytes: float = 0.0
    """Of one stage, that threads load; those that are to be turned count as often as they take longer."""
    is_staggered: bool = False
    """Whether the second of two consumers is some steps behind the first."""


class Tiles(NamedTuple):
    """What there is to do: tiles of so many steps each, by blocks of clusters."""

    total: int
    """In all batches, those that clusters of 2 add at the edge included."""
    steps: int
    """In each part of the reduction."""
    cluster_m: int
    cluster_n: int
    split_k: int
    """Parts of the reduction, each on one block of a cluster."""
    out_bytes: int
    """Of one result."""
    dram_bytes: float
    operands_bytes: tuple[float, float] = (0.0, 0.0)
    """Of the rows' operand and of the columns', each once."""


class Pipeline(NamedTuple):
    """How blocks go through their tiles."""

    stages: int
    buffers: int
    """For results of 64 x 64, of each consumer."""
    resident: int = 1
    """Blocks that an SM holds at once."""
    stream_k: int = 0
    """Last waves whose steps are dealt evenly over all SMs."""


class Pace(NamedTuple):
    """What the time of tiles comes of, whatever their pipeline."""

    tiles: Tiles
    ring: Ring
    turns: int
    """Tiles that the busiest SM takes, one after the other."""
    step_secs: tuple[float, float, float, float]
    """Of one stage: multiplying, reading shared memory, bringing it in by TMA and by threads."""
    whole_secs: tuple[float, float, float]
    """Of all tiles: as much as power lets multiply, L2, DRAM."""
    store_secs: float
    """Of one tile's results."""
    parts_secs: float
    """Of one tile's parts to be added up."""


def workers(gpu: Gpu, cluster: int) -> int:
    """Return the clusters that the GPU holds at once, one block on each SM."""
    at_once = gpu.sm_count // cluster
    return at_once if cluster <= 2 else at_once - at_once // CLUSTERS_LOST


def resident(gpu: Gpu, smem_bytes: int, sums_registers: int) -> int:
    """Return how many blocks of one consumer an SM holds at once."""
    threads = 2 * WARPGROUP
    by_smem = gpu.smem_per_sm_bytes // (smem_bytes + gpu.smem_reserved_per_block_bytes)
    return max(1, min(by_smem, gpu.registers_per_sm // (threads * (OWN_REGISTERS + sums_registers))))


def early_share(gpu: Gpu, total: int, resident: int) -> float:
    """Return how much longer blocks take that start early: all of them should find room beside those of the kernel in front, or none."""
    room, full = resident * gpu.sm_count, FULL_SHARE * gpu.sm_count
    blocks = min(room, total)
    if blocks < full:
        is_sound = resident == 1 and full <= 2 * blocks <= room
    else:
        is_sound = 2 * blocks <= room or blocks >= FULL_SHARE * room or blocks <= gpu.sm_count
    return 1.0 if is_sound else TORN_SHARE


def sums_a_register(accum_dtype: str) -> int:
    """Return how many sums share a register of 32 bits."""
    return 2 if accum_dtype == "float16" else 1


def stage_bytes(rows: int, columns: int) -> int:
    return (rows + columns) * STEP_BYTES


def pace_of(gpu: Gpu, dtype: str, tiles: Tiles, ring: Ring) -> Pace:
    """Return what the time of tiles comes of.

    Each wgmma reads its 64 rows and all columns, so that narrow tiles wait for shared memory. Blocks without parts stay and
    take tile after tile; a cluster for parts of a sum takes one.
    """
    cycles_per_s, rate = gpu.clock_hz * SUSTAINED_CLOCK, gpu.tensor_rate(dtype)
    cluster, sums = tiles.cluster_m * tiles.cluster_n * tiles.split_k, ring.rows * ring.columns
    products = sums * STEP_BYTES / dtype_bytes(dtype)
    read = ring.rows / WGMMA_ROWS * (WGMMA_ROWS + ring.columns) * STEP_BYTES / (gpu.smem_bytes_per_clock_per_sm * cycles_per_s)
    gather = ring.gathered_bytes * GATHER_SECS / (WARPGROUP * GATHERED_BYTES)
    gather += ring.gathered_bytes / PIECE_BYTES * GATHER_INSTRUCTIONS / (gpu.warp_size * SCHEDULERS * cycles_per_s)
    steps = tiles.total * tiles.split_k * tiles.steps
    loaded = (steps * STEP_BYTES * ring.rows / tiles.cluster_n, steps * STEP_BYTES * ring.columns / tiles.cluster_m)
    fresh = sum(min(of, L2_PARTS * once) for of, once in zip(loaded, tiles.operands_bytes, strict=True))
    stored = tiles.total * sums * tiles.out_bytes
    return Pace(
        tiles,
        ring,
        turns=-(-tiles.total * tiles.split_k // (cluster * workers(gpu, cluster))),
        step_secs=(
            products * 2 * gpu.sm_count / (rate * CLOCKED),
            read,
            stage_bytes(ring.rows, ring.columns) / (SM_BYTES_PER_CLOCK * cycles_per_s),
            gather,
        ),
        whole_secs=(
            2 * steps * products / (rate * POWERED),
            (fresh / FRESH_L2 + (sum(loaded) - fresh) / SHARED_L2 + stored) / gpu.l2_bytes_per_s,
            tiles.dram_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE),
        ),
        store_secs=sums * tiles.out_bytes / (STORE_BYTES_PER_CYCLE * cycles_per_s),
        parts_secs=SPLIT_SECS * (tiles.split_k - 1) + sums * SUM_BYTES / (PART_BYTES_PER_CYCLE * cycles_per_s)
        if tiles.split_k > 1
        else 0.0,
    )


def tiles_secs(gpu: Gpu, pace: Pace, pipeline: Pipeline) -> float:
    """Return the time from the first block's start to the last one's end: the busiest SM decides, unless L2 or DRAM are slower."""
    blocks = min(pipeline.resident, pace.turns)
    return _secs(gpu, pace, pipeline, blocks, -(-pace.turns // blocks))


def least_secs(gpu: Gpu, pace: Pace, pipeline: Pipeline) -> float:
    """Return a time that `tiles_secs` is not below for any lesser pipeline."""
    blocks = min(pipeline.resident, pace.turns)
    return ROUNDED_DOWN * (_secs(gpu, pace, pipeline, blocks, pace.turns / blocks) - pipeline.stages * STAGE_SECS)


def _secs(gpu: Gpu, pace: Pace, pipeline: Pipeline, blocks: int, turns: float) -> float:
    """Return the time in which each SM has so many blocks at once, so many times."""
    tiles, ring = pace.tiles, pace.ring
    edge = pace.store_secs * (1 + 1 / max(1, pipeline.buffers))
    between = 0.0 if ring.is_pingpong else edge * STAGGERED_SHARE if ring.is_staggered else edge
    if tiles.split_k > 1:
        edge += pace.parts_secs
        between = edge + START_SECS
    steps, ends, meeting = turns * tiles.steps, turns - 1, 0.0
    if pipeline.stream_k > 0:
        steps, ends, meeting = _dealt(gpu, tiles, ring, pipeline.stream_k)
    moving = p_norm(steps * _step_secs(pace, pipeline, blocks) + ends * between, *pace.whole_secs, exponent=OVERLAP)
    is_cluster = tiles.cluster_m * tiles.cluster_n * tiles.split_k > 1
    return START_SECS + pipeline.stages * STAGE_SECS + moving + edge + meeting + (CLUSTER_SECS if is_cluster else 0.0)


def _step_secs(pace: Pace, pipeline: Pipeline, blocks: int) -> float:
    """Return how long an SM is busy with one stage of each block, which wait at once."""
    busy = [secs * blocks for secs in pace.step_secs]
    return p_norm(*busy, LOAD_SECS / (pipeline.stages - 1), LEAST_STEP_SECS, exponent=STEP_OVERLAP)


def _dealt(gpu: Gpu, tiles: Tiles, ring: Ring, stream_k: int) -> tuple[int, int, float]:
    """Return what each SM does where the last waves are dealt evenly: steps, tiles before the last that it ends, time to add pieces.

    A block leaves the sums of one piece in L2 at most, and reads those of all that share the tile that it began. Tiles are of one part.
    """
    cluster = tiles.cluster_m * tiles.cluster_n
    clusters = workers(gpu, cluster)
    full, rest = divmod(-(-tiles.total // cluster), clusters)
    whole = max(0, full - (stream_k - 1))
    share = -(-((full - whole) * clusters + rest) * tiles.steps // clusters)
    pieces = 1 + -(-tiles.steps // share)
    piece_bytes = ring.rows * ring.columns * SUM_BYTES
    moved = pieces * piece_bytes / (STREAM_BYTES_PER_CYCLE * gpu.clock_hz * SUSTAINED_CLOCK)
    return whole * tiles.steps + share, whole, STREAM_SECS + pieces * PIECE_SECS + moved


def launch_secs(gpu: Gpu, *, is_early: bool) -> float:
    return gpu.launch_secs * (EARLY_SHARE if is_early else 1.0)


def packing_secs(gpu: Gpu, size_bytes: float) -> float:
    """Return how long the kernel takes that copies operands of so many bytes: from DRAM, and to L2."""
    return gpu.launch_secs + size_bytes * (1 / (gpu.dram_bytes_per_s * DRAM_SHARE) + 1 / gpu.l2_bytes_per_s)


def most_stages(limit_bytes: int, rows: int, columns: int, beside_bytes: int) -> int:
    """Return how many stages shared memory holds beside so many bytes."""
    return (limit_bytes - RESERVED_BYTES - beside_bytes) // stage_bytes(rows, columns)


def beside_bytes(sums: int, consumers: int, split_k: int, out_bytes: int) -> int:
    """Return the least bytes that a block of so many sums needs beside its stages: its part of them, and a buffer for each consumer."""
    return (sums * SUM_BYTES if split_k > 1 else 0) + (consumers * BUFFER_BYTES if out_bytes == 2 else 0)


def buffers_of(free_bytes: int, consumers: int, thread_sums: int) -> int:
    """Return how many buffers of results each consumer has, one of them apart from what is free.

    That is the most of 1, 2, 4 that fit and divide its chunks of 64 x 64; 0 if none fits.
    """
    chunks, held = max(1, thread_sums * WARPGROUP // WGMMA_ROWS**2), free_bytes // consumers + BUFFER_BYTES
    return next((count for count in (MOST_BUFFERS, 2, 1) if count * BUFFER_BYTES <= held and chunks % count == 0), 0)
