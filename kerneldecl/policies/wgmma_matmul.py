"""Owns which tiles, rings of stages and clusters of a product on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kerneldecl.contraction import WITH_A_VECTOR, Contraction, contraction_of, stored
from kerneldecl.model import Access, Arch, Block, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies import _wgmma_model as model
from kerneldecl.policies._gpu_products import MAX_GRID_Z, Estimate, dram_bytes, ranked, wave_items
from kerneldecl.policies._wgmma_factors import TURNED, gathered_bytes, is_box, is_k_last, is_turned, step_items
from kerneldecl.policies._wgmma_order import spread
from kerneldecl.policies._wgmma_widths import COLUMN_UNIT, can_share, filling_widths, widths_of

TEMPLATES = ("wgmma_matmul",)

SUMS = {
    "float16": ("float32", "float16"),
    "bfloat16": ("float32",),
    "float8_e4m3fn": ("float32",),
    "float8_e5m2": ("float32",),
    "int8": ("int32",),
    "tfloat32": ("float32",),
}
"""By dtype of the factors: the dtypes that wgmma sums them in."""
ROWS = model.WGMMA_ROWS
WARPGROUPS = (
    (64, 1, "cooperative"),
    (128, 1, "cooperative"),
    (128, 2, "cooperative"),
    (256, 2, "cooperative"),
    (192, 3, "cooperative"),
    (128, 2, "staggered"),
    (256, 2, "staggered"),
    (64, 2, "pingpong"),
    (128, 2, "pingpong"),
)
"""Rows of a tile, consumers, and their schedule."""
SUMS_REGISTERS = {1: 192, 2: 160, 3: 104}
"""Of a thread beside those for what else it needs, by the number of consumers: 65536 registers are for all of them."""
MOST_REGISTERS = {**SUMS_REGISTERS, 2: 192}
"""The same for tiles that fill SMs better: the more sums, the less is left for the epilogue."""
MAX_BATCH_AXES = 3
"""TMA has five dimensions."""
MIN_STAGES, MAX_STAGES = 2, 12
STAGGERED_STAGES = 4
"""At least, some of which the second consumer keeps longer."""
FEWER_STAGES = (6, 4)
SPLITS = (2, 4, 8)
LEAST_STEPS = 2
"""In each part of the reduction."""
CLUSTERS = ((1, 1), (2, 1), (1, 2))
RASTERS = (1, 2, 4, 8, 16)
FEW_ROWS, SOME_ROWS, MANY_ROWS = 32, 128, 512
"""A product with few of them has its rows become columns of tiles, which are cut finer; with some, that may be better, and with more where
they do not fill tiles as they are."""
SAME_TILE = 2
ROWS_SHARED = 1.0005
"""How much longer it takes where the blocks of a cluster share the rows' operand rather than the columns'."""
SHORT_SECS, LONGER_SECS = 5e-5, 1.2e-4
"""Products that take no longer at best start before the kernel in front has ended: of few rows, where it may cost more, and of more.

Of longer ones those that fill an SM do: they gain up to 2 % at 4096 cubed on an H200, and lost nothing.
"""
FEW_WAVES = 4
STREAM_FILL, STREAM_WAVES = 0.8, 64
"""A last wave that is less full, of no more waves, may be worth dealing evenly over all SMs."""


class Tiling(NamedTuple):
    """The template's parameters."""

    block_m: int
    block_n: int
    consumers: int
    stages: int
    cluster_m: int = 1
    cluster_n: int = 1
    raster: int = 1
    split: int = 1
    schedule: str = "cooperative"
    swap: int = 0
    dependent: int = 0
    pack: int = 0
    stream: int = 0

    @property
    def is_pingpong(self) -> bool:
        return self.schedule == "pingpong"

    @property
    def is_staggered(self) -> bool:
        return self.schedule == "staggered"

    @property
    def consumer_rows(self) -> int:
        return self.block_m if self.is_pingpong else self.block_m // self.consumers

    @property
    def thread_sums(self) -> int:
        return self.consumer_rows * self.block_n // model.WARPGROUP

    def candidate(self) -> Candidate:
        return Candidate.of("wgmma_matmul", self._asdict())


def propose(space: IterSpace, arch: Arch, top_k: int, measured: Sequence[object]) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what wgmma does not take."""
    product = contraction_of(space)
    if isinstance(product, str) or measured or why_not(space, arch):
        return ()
    out_dtype = space.blocks[-1].writes[0].dtype
    return spread(ranked(estimates(product, out_dtype, arch.the_gpu), SAME_TILE))[:top_k]


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why wgmma does not take a computation, as a sentence; empty where it does."""
    product, gpu = contraction_of(space), arch.the_gpu
    if isinstance(product, str):
        return product
    dtype, other = product.left.dtype, product.right.dtype
    before = list(itertools.takewhile(lambda block: not block.is_reduction, space.blocks))
    block = space.blocks[len(before)]
    reasons = (
        (not gpu.wgmma_arch, "its GPU has no wgmma"),
        (not product.is_plain, "its reduction does something else than adding products"),
        (dtype != other, f"its operands differ in dtype: {dtype} and {other}"),
        (product.sums_dtype not in SUMS.get(dtype, ()), f"there is no wgmma of {dtype} summed in {product.sums_dtype} here"),
        (not gpu.tensor_rate(dtype), f"the GPU's tensor cores do not take {dtype}"),
        (not all(map(_is_copy, before)), "an operand is computed on the way"),
        (not _are_matrices(space, block, product), "an operand's rows or terms do not lie at one distance from each other"),
        (max(product.extents[1:3]) == 1, WITH_A_VECTOR),
        (product.extents[0] > MAX_GRID_Z, f"its batch is longer than a launch takes: {MAX_GRID_Z}"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def _is_copy(block: Block) -> bool:
    """Say whether a block changes nothing but places: TMA brings what lies in memory, and computes nothing."""
    (write,) = block.writes
    same = [(read.dtype, math.prod(read.shape)) == (write.dtype, math.prod(write.shape)) for read in block.reads]
    return same == [True] and block.flops_per_point == 0


def _are_matrices(space: IterSpace, block: Block, product: Contraction) -> bool:
    """Say whether both operands are matrices in memory: each group of axes walks on where the one inside of it ends."""
    sides = ((product.left, product.m), (product.right, product.n))
    joined = (
        _is_joined(block, stored(space, block.reads[factor.position]), group) for factor, axes in sides for group in (axes, product.k)
    )
    return all(joined) and len(product.batch) <= MAX_BATCH_AXES


def _is_joined(block: Block, access: Access, group: Sequence[int]) -> bool:
    strides: Counter[int] = Counter()
    for dim, index in enumerate(access.index):
        for axis, coefficient in index or ():
            strides[axis] += coefficient * math.prod(access.shape[dim + 1 :])
    axes = [axis for axis in group if block.axes[axis].extent > 1]
    return all(strides[outer] == block.axes[inner].extent * strides[inner] for outer, inner in itertools.pairwise(axes))


def estimates(product: Contraction, out_dtype: str, gpu: Gpu) -> Iterator[Estimate]:
    """Yield every sensible tiling with its predicted time: of the operands as they are, and of copies that TMA can read."""
    yield from _estimates(product, out_dtype, gpu)
    packed, packed_bytes = _packed(product)
    if packed_bytes:
        secs = model.packing_secs(gpu, packed_bytes)
        for estimate in _estimates(packed, out_dtype, gpu, pack=1):
            yield estimate._replace(secs=estimate.secs + secs)


def _packed(product: Contraction) -> tuple[Contraction, int]:
    """Return the product of copies of those operands that TMA does not bring, and the bytes to copy, more for those to be turned."""
    factors = {name: factor for name in ("left", "right") if not is_box(factor := getattr(product, name))}
    copies = {name: replace(factor, run=model.STEP_BYTES, is_k_last=is_k_last(factor)) for name, factor in factors.items()}
    copied = (factor.size_bytes * (TURNED if is_turned(factor) else 1) for factor in factors.values())
    return replace(product, **copies), sum(copied)


def _estimates(product: Contraction, out_dtype: str, gpu: Gpu, pack: int = 0) -> Iterator[Estimate]:
    m = product.extents[1]
    are_odd = SOME_ROWS < m <= MANY_ROWS and m % SOME_ROWS > 0
    for swap in (1,) if m <= FEW_ROWS else (0, 1) if m <= SOME_ROWS or are_odd else (0,):
        sides = _exchanged(product) if swap else product
        for bare in _bare_tilings(sides, gpu, swap):
            yield from _staged(sides, bare._replace(pack=pack), out_dtype, gpu)


def _exchanged(product: Contraction) -> Contraction:
    """Return the product of the transposed operands, whose result is the transposed one."""
    batch, m, n, k = product.extents
    return replace(product, m=product.n, n=product.m, left=product.right, right=product.left, extents=(batch, n, m, k))


def _bare_tilings(product: Contraction, gpu: Gpu, swap: int) -> Iterator[Tiling]:
    """Yield tiles with their consumers, parts and clusters, without stages."""
    batch, m, n, k = product.extents
    steps, packing = -(-k // step_items(product)), model.sums_a_register(product.sums_dtype)
    are_boxes = all(map(is_box, (product.left, product.right)))
    for (block_m, consumers, schedule), (block_n, is_filling) in _forms(product, gpu, swap):
        tiling = Tiling(block_m, block_n, consumers, MIN_STAGES, schedule=schedule, swap=swap)
        most = (MOST_REGISTERS if is_filling else SUMS_REGISTERS)[consumers] * packing
        if tiling.thread_sums > most or not _suits(tiling, m) or (tiling.is_pingpong and block_n & (block_n - 1) and not is_filling):
            continue  # fewer forms to time: ping-pong of other widths won no contest
        rows, columns = -(-m // block_m), -(-n // block_n)
        is_alone = batch * rows * columns <= gpu.sm_count
        if is_alone and schedule != "cooperative":
            continue  # there is no other tile to multiply while results leave
        for cluster_m, cluster_n in CLUSTERS if are_boxes else CLUSTERS[:1]:
            if cluster_m <= rows and cluster_n <= columns and _can_share(product, tiling, cluster_m, cluster_n):
                yield tiling._replace(cluster_m=cluster_m, cluster_n=cluster_n)
        for split in SPLITS:
            is_whole = steps // split >= LEAST_STEPS and steps % split == tiling.thread_sums % (packing * split) == 0
            if is_whole and batch * rows * columns * split <= 2 * gpu.sm_count and schedule == "cooperative":
                yield tiling._replace(split=split)


def _forms(product: Contraction, gpu: Gpu, swap: int) -> Iterator[tuple[tuple[int, int, str], tuple[int, bool]]]:
    """Yield rows, consumers and schedules with widths, and whether these are cut to fill the SMs."""
    batch, m, n, _ = product.extents
    dtype, unit = product.left.dtype, COLUMN_UNIT if is_k_last(product.right) else ROWS
    widths = [] if swap and n > SOME_ROWS else widths_of(n, dtype, is_whole=bool(swap))
    may_fill = not swap or n > SOME_ROWS
    for warpgroups in WARPGROUPS:
        filling = filling_widths(batch * -(-m // warpgroups[0]), n, dtype, unit, gpu) if may_fill else []
        yield from ((warpgroups, (width, False)) for width in widths if width not in filling)
        yield from ((warpgroups, (width, True)) for width in filling)


def _suits(tiling: Tiling, m: int) -> bool:
    """Say whether no smaller tile does for the rows, and consumers have enough to do: one alone is as good for narrow tiles."""
    least = 2 * ROWS if tiling.consumers == 3 or tiling.is_staggered else ROWS if tiling.block_m == ROWS * tiling.consumers else 0
    return (tiling.block_n >= least or tiling.consumers == 1) and (tiling.block_m - ROWS < m or tiling.block_m == ROWS)


def _can_share(product: Contraction, tiling: Tiling, cluster_m: int, cluster_n: int) -> bool:
    """Say whether blocks can bring together what they share: columns along the rows, and rows along the columns."""
    sides = ((product.right, tiling.block_n, cluster_m), (product.left, tiling.block_m, cluster_n))
    return all(can_share(extent, COLUMN_UNIT if is_k_last(factor) else ROWS, blocks) for factor, extent, blocks in sides)


def _staged(product: Contraction, bare: Tiling, out_dtype: str, gpu: Gpu) -> Iterator[Estimate]:
    """Yield a tiling with the most stages that fit, and with less, which leave room for results and are filled earlier."""
    steps = -(-product.extents[3] // (step_items(product) * bare.split))
    most = min(
        MAX_STAGES, steps + 1, model.most_stages(gpu.smem_per_block_optin_bytes, *_stored(product, bare), _least_beside(bare, out_dtype))
    )
    bare = bare._replace(raster=_raster(product, bare, gpu))
    work = _work(product, bare, out_dtype, gpu)
    are_boxes = is_box(product.left) and is_box(product.right)
    are_few = min(product.extents[1:3]) <= SOME_ROWS
    is_short = _least_secs(product, gpu) < (SHORT_SECS if are_few else LONGER_SECS)
    fewer = (most,) if is_short and not are_few else (most - 1, *FEWER_STAGES)
    for stages in sorted({most, *fewer} if are_boxes else {most, FEWER_STAGES[-1]}):
        if (STAGGERED_STAGES if bare.is_staggered else MIN_STAGES) <= stages <= min(most, steps + 1 - bare.is_staggered):
            tiling = bare._replace(stages=stages)
            if are_few or not is_short:
                fills = 2 * (stages * work.stage_bytes + work.beside_bytes) > gpu.smem_per_block_optin_bytes
                yield _estimate(work, tiling._replace(dependent=int(fills and not are_few)), gpu)
            if is_short and (not are_few or stages in (most, FEWER_STAGES[0])):
                yield _estimate(work, tiling._replace(dependent=1), gpu)
            if stages == most:
                yield from (_estimate(work, dealt, gpu) for dealt in _dealt(product, tiling, gpu))


def _least_secs(product: Contraction, gpu: Gpu) -> float:
    """Return the time without which a product cannot be made, of multiplying or of reading its operands."""
    products = 2.0 * math.prod(product.extents) / gpu.tensor_rate(product.left.dtype)
    return max(products, (product.left.size_bytes + product.right.size_bytes) / gpu.dram_bytes_per_s)


def _dealt(product: Contraction, tiling: Tiling, gpu: Gpu) -> Iterator[Tiling]:
    """Yield a tiling with its last wave dealt evenly (stream-K), and the last two, where the very last would leave SMs idle.

    Neighbours' pieces begin at different steps, so that what they share must stay in L2: of a product that does not, not all is dealt.
    """
    batch, m, n, _ = product.extents
    if tiling.schedule != "cooperative" or tiling.split > 1 or tiling.consumers == 1 or model.sums_a_register(product.sums_dtype) > 1:
        return
    clusters = batch * -(-m // (tiling.block_m * tiling.cluster_m)) * -(-n // (tiling.block_n * tiling.cluster_n))
    at_once = model.workers(gpu, tiling.cluster_m * tiling.cluster_n)
    full, rest = divmod(clusters, at_once)
    most = full + int(product.left.size_bytes + product.right.size_bytes <= gpu.l2_bytes)
    if 0 < rest < STREAM_FILL * at_once and full < STREAM_WAVES:
        yield from (tiling._replace(stream=waves, dependent=1) for waves in (1, 2) if waves <= most)


def _stored(product: Contraction, tiling: Tiling) -> tuple[int, int]:
    """Return the rows and columns that a stage has room for: columns side by side come 64 at a time."""
    unit = COLUMN_UNIT if is_k_last(product.right) else ROWS
    return tiling.block_m, -(-tiling.block_n // unit) * unit


def _least_beside(tiling: Tiling, out_dtype: str) -> int:
    """Return the least bytes that a block needs beside its stages."""
    parts = tiling.block_m * tiling.block_n * model.SUM_BYTES if tiling.split > 1 else 0
    return parts + (tiling.consumers * model.BUFFER_BYTES if dtype_bytes(out_dtype) == 2 else 0)


def _raster(product: Contraction, tiling: Tiling, gpu: Gpu) -> int:
    _, m, n, _ = product.extents
    rows = -(-m // (tiling.block_m * tiling.cluster_m))
    columns = -(-n // (tiling.block_n * tiling.cluster_n))
    tile = (tiling.block_m * tiling.cluster_m, tiling.block_n * tiling.cluster_n)
    # Of ping-pong's two tiles one is multiplied after the other; of many, both are asked for at once.
    is_double = tiling.is_pingpong and rows * columns * tiling.cluster_m * tiling.cluster_n > FEW_WAVES * gpu.sm_count
    at_work = gpu.sm_count * (tiling.consumers if is_double else 1)
    return _best_raster(rows, columns, at_work // (tiling.cluster_m * tiling.cluster_n), *tile)


@functools.cache
def _best_raster(rows: int, columns: int, resident: int, block_m: int, block_n: int) -> int:
    """Return after how many rows of tiles the walk goes on with the next column, so that the tiles at work need least."""
    groups = [group for group in RASTERS if group <= rows] or [1]
    return min(groups, key=lambda group: (wave_items(group, columns, resident, block_m, block_n), group))


class _Work(NamedTuple):
    """What a tiling does, whatever its stages."""

    dtype: str
    tiles: model.Tiles
    ring: model.Ring
    packing: int
    """Sums that share a register."""
    stage_bytes: int
    beside_bytes: int
    """Of shared memory, at least, beside the stages: where there is more, results have more buffers."""


def _work(product: Contraction, tiling: Tiling, out_dtype: str, gpu: Gpu) -> _Work:
    batch, m, n, k = product.extents
    across, down = tiling.block_n * tiling.cluster_n, tiling.block_m * tiling.cluster_m
    count = batch * -(-m // down) * -(-n // across) * tiling.cluster_m * tiling.cluster_n
    tiles = model.Tiles(
        count,
        -(-k // (step_items(product) * tiling.split)),
        tiling.cluster_m,
        tiling.cluster_n,
        tiling.split,
        dtype_bytes(out_dtype),
        0,
        dram_bytes(product, gpu, (tiling.block_m, tiling.block_n, tiling.raster * tiling.cluster_m), gpu.sm_count),
        (product.left.size_bytes, product.right.size_bytes),
    )
    gathered = gathered_bytes(product.left, tiling.block_m) + gathered_bytes(product.right, tiling.block_n)
    ring = model.Ring(tiling.block_m, tiling.block_n, tiling.stages, tiling.is_pingpong, gathered, tiling.is_staggered)
    beside_bytes = _least_beside(tiling, out_dtype) + model.RESERVED_BYTES
    packing = model.sums_a_register(product.sums_dtype)
    return _Work(product.left.dtype, tiles, ring, packing, model.stage_bytes(*_stored(product, tiling)), beside_bytes)


def _estimate(work: _Work, tiling: Tiling, gpu: Gpu) -> Estimate:
    """Return the time of a tiling that does so much work, with as many buffers of results as there is room for."""
    used = tiling.stages * work.stage_bytes + work.beside_bytes
    chunks = max(1, tiling.thread_sums * model.WARPGROUP // (ROWS * ROWS))
    free = gpu.smem_per_block_optin_bytes - used
    buffers = model.buffers_of(free // tiling.consumers + model.BUFFER_BYTES, chunks, model.BUFFER_BYTES)
    held = used + (max(1, buffers) - 1) * model.BUFFER_BYTES
    resident = model.resident(gpu, held, tiling.thread_sums // work.packing) if tiling.consumers == 1 else 1
    tiles = work.tiles._replace(buffers=buffers, stream=tiling.stream, resident=resident)
    secs = model.tiles_secs(gpu, work.dtype, tiles, work.ring._replace(stages=tiling.stages))
    if tiling.dependent and not tiling.stream:
        secs *= model.early_share(gpu, tiles)
    secs += model.launch_secs(gpu, is_early=bool(tiling.dependent))
    secs *= ROWS_SHARED if tiling.cluster_n > 1 else 1.0
    # With waves that are dealt evenly all clusters are alike.
    clusters = (0, 0) if tiling.stream > 0 else (tiling.cluster_m, tiling.cluster_n)
    form = (*clusters, tiling.consumers, tiling.is_pingpong, tiling.is_staggered, tiling.swap, tiling.pack, tiling.dependent)
    return Estimate(tiling, secs, (tiling.block_m, tiling.block_n, tiling.split, *form))
