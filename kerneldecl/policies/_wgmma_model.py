"""Owns how long a GPU with wgmma takes for tiles that warpgroups multiply out of a ring of stages in shared memory.

Knows nothing of TVM, of templates or of where tiles come from: a convolution's rows are as good as a matrix's.
"""

from __future__ import annotations

from dataclasses import dataclass

from kerneldecl.model import Gpu, dtype_bytes
from kerneldecl.policies._gpu_model import DRAM_SHARE
from kerneldecl.policies._gpu_tensor_model import SM_BYTES_PER_CYCLE, SUSTAINED_CLOCK, together

STEP_BYTES = 128
"""Of the reduction in one stage: the row that TMA permutes and wgmma reads."""
WARPGROUP = 128
"""Threads that multiply together."""
WGMMA_ROWS = 64
RESERVED_BYTES = 1024
"""Of shared memory, for barriers and alignment."""
CLOCKED = 0.9
"""Of the tensor cores' rate, which NVIDIA gives at 1.83 GHz, that one SM reaches."""
POWERED = 0.75
"""Of it, that all SMs together sustain: the rest would take more power than the GPU may draw. Products of 4096 and 8192 in
float16, bfloat16 and float8 on an H200 all come to 0.66 to 0.70 of the rate."""
STEP_SECS = 2.5e-8
"""From one stage to the next, of a warpgroup that no other one covers: its barrier, and the start of wgmma."""
LOAD_SECS = 9e-7
"""From asking for a stage to its arrival while all SMs ask."""
START_SECS = 9e-7
"""Before the first multiplication: barriers set up, a cluster met, the first stage from DRAM."""
STORE_SECS = 4e-7
"""Of a tile's results beside their bytes: registers to shared memory, and out."""
SPLIT_SECS = 7e-7
"""Of the blocks of a cluster to meet and add their parts up."""
SHARED_L2 = 1.5
"""What L2 delivers of its rate where SMs ask for the same tiles at once: products of 1024 on an H200 read over 12 TB/s of it."""
CLUSTER_SECS = 3e-7
"""Of the blocks of a cluster to start and to end together."""
EARLY_SHARE = 0.5
"""Of a launch, what shows where it began before the kernel in front had ended."""
GATHER_INSTRUCTIONS = 10.0
"""For one load with its address, its bounds and its store to shared memory, where TMA does not bring a tile."""
CLUSTERED_SMS = 16
"""SMs of one processing cluster (GPC) that can be counted on: a thread block cluster lies within one."""
SCHEDULERS = 4
SUM_BYTES = 4
"""Of one sum, in float32 or int32."""
BUFFER_BYTES = 8192
"""For 64 x 64 results of 16 bits."""


@dataclass(frozen=True)
class Ring:
    """What one block holds: a tile's rows and columns, a stage of each operand for every `STEP_BYTES` of the reduction."""

    rows: int
    columns: int
    stages: int
    consumers: int
    """Warpgroups that multiply."""
    is_pingpong: bool = False
    """Whether each consumer has a tile of its own, so that results leave behind the other one's multiplications."""
    gathered_loads: float = 0.0
    """Of one stage: loads through registers, all threads of the loading warpgroup together."""


@dataclass(frozen=True)
class Tiles:
    """What there is to do: tiles of so many steps each, by blocks of clusters."""

    count: int
    """In all batches, those that clusters of 2 add at the edge included."""
    steps: int
    """In each part of the reduction."""
    cluster_m: int
    cluster_n: int
    split: int
    """Parts of the reduction, each on one block of a cluster."""
    out_bytes: int
    """Of one result."""
    buffers: int
    """For results of 64 x 64, of each consumer."""
    dram_bytes: float


def workers(gpu: Gpu, cluster: int) -> int:
    """Return the clusters that the GPU holds at once, one block on each SM."""
    if cluster <= 2:
        return gpu.sm_count // cluster
    return gpu.sm_count // CLUSTERED_SMS * (CLUSTERED_SMS // cluster)


def stage_bytes(rows: int, columns: int) -> int:
    return (rows + columns) * STEP_BYTES


def step_secs(gpu: Gpu, dtype: str, ring: Ring) -> float:
    """Return how long an SM is busy with one stage: multiplying, reading shared memory, bringing the stage in and waiting for it.

    Each wgmma reads its 64 rows and all columns, so that narrow tiles wait for shared memory.
    """
    cycles_per_s = gpu.clock_hz * SUSTAINED_CLOCK
    products = ring.rows * ring.columns * STEP_BYTES / dtype_bytes(dtype)
    multiply = products * 2 * gpu.sm_count / (gpu.tensor_rate(dtype) * CLOCKED)
    read = ring.rows / WGMMA_ROWS * (WGMMA_ROWS + ring.columns) * STEP_BYTES / (gpu.smem_bytes_per_clock_per_sm * cycles_per_s)
    load = stage_bytes(ring.rows, ring.columns) / (SM_BYTES_PER_CYCLE * cycles_per_s)
    gather = ring.gathered_loads / gpu.warp_size * GATHER_INSTRUCTIONS / (SCHEDULERS * cycles_per_s)
    return together(multiply, read, load, LOAD_SECS / ring.stages) + gather + STEP_SECS / ring.consumers


def tiles_secs(gpu: Gpu, dtype: str, tiles: Tiles, ring: Ring) -> float:
    """Return the time from the first block's start to the last one's end.

    The busiest SM decides, unless all of them together draw too much power, or L2 or DRAM are slower. Blocks without parts
    stay and take tile after tile; a cluster for parts of a sum takes one.
    """
    cluster = tiles.cluster_m * tiles.cluster_n * tiles.split
    turns = -(-tiles.count * tiles.split // (cluster * workers(gpu, cluster)))
    store = ring.rows * ring.columns * tiles.out_bytes / (SM_BYTES_PER_CYCLE * gpu.clock_hz * SUSTAINED_CLOCK)
    edge = STORE_SECS + store * (1 + 1 / max(1, tiles.buffers))
    between = 0.0 if ring.is_pingpong else edge
    if tiles.split > 1:
        edge += SPLIT_SECS + ring.rows * ring.columns * SUM_BYTES / (SM_BYTES_PER_CYCLE * gpu.clock_hz * SUSTAINED_CLOCK)
        between = edge + START_SECS
    loaded = tiles.count * tiles.split * tiles.steps * STEP_BYTES * (ring.rows / tiles.cluster_n + ring.columns / tiles.cluster_m)
    stored = tiles.count * ring.rows * ring.columns * tiles.out_bytes
    products = tiles.count * tiles.split * tiles.steps * ring.rows * ring.columns * STEP_BYTES / dtype_bytes(dtype)
    moving = together(
        turns * tiles.steps * step_secs(gpu, dtype, ring) + (turns - 1) * between,
        2 * products / (gpu.tensor_rate(dtype) * POWERED),
        (loaded / SHARED_L2 + stored) / gpu.l2_bytes_per_s,
        tiles.dram_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE),
    )
    return START_SECS + moving + edge + (CLUSTER_SECS if cluster > 1 else 0.0)


def launch_secs(gpu: Gpu, *, is_early: bool) -> float:
    return gpu.launch_secs * (EARLY_SHARE if is_early else 1.0)


def most_stages(limit_bytes: int, rows: int, columns: int, beside_bytes: int) -> int:
    """Return how many stages shared memory holds beside so many bytes."""
    return (limit_bytes - RESERVED_BYTES - beside_bytes) // stage_bytes(rows, columns)


def buffers_of(free_bytes: int, chunks: int, one_bytes: int) -> int:
    """Return how many buffers of results each consumer has: the most of 1, 2, 4 that fit and divide its chunks; 0 if none fits."""
    return max((count for count in (1, 2, 4) if count * one_bytes <= free_bytes and chunks % count == 0), default=0)
