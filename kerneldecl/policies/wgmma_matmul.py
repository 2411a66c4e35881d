"""Owns which tiles, schedules and clusters of a product on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from kerneldecl.analysis.contraction import IS_GEMV, Contraction, contraction_of, stored
from kerneldecl.analysis.gpu_limits import MAX_GRID_Z
from kerneldecl.model import Access, Arch, Block, Gpu, IterSpace, Proposal
from kerneldecl.policies.gpu.gemm_tiles import Estimate, Group, best_first
from kerneldecl.policies.hopper import time_model as model
from kerneldecl.policies.hopper.operands import TURNED, is_box, is_k_last, is_turned, step_items, unit_of
from kerneldecl.policies.hopper.ranking import spread
from kerneldecl.policies.hopper.tile_widths import can_share, filling_widths, widths_of
from kerneldecl.policies.hopper.tilings import MIN_STAGES, ROWS, SOME_ROWS, Tiling, setting_of, timed

TEMPLATES = ("wgmma_matmul",)
HAS_TRACES = False

SUMS = {
    "float16": ("float32", "float16"),
    "bfloat16": ("float32",),
    "float8_e4m3fn": ("float32",),
    "float8_e5m2": ("float32",),
    "int8": ("int32",),
    "tfloat32": ("float32",),
}
"""By dtype of the factors: the dtypes that wgmma sums them in."""
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
SPLITS = (2, 4, 8)
LEAST_STEPS = 2
"""In each part of the reduction."""
CLUSTERS = ((1, 1), (2, 1), (1, 2))
FEW_ROWS, MANY_ROWS = 32, 512
"""A product with few of them has its rows become columns of tiles, which are cut finer; with `SOME_ROWS`, that may be better, and with more
where they do not fill tiles as they are."""
SAME_TILE = 2


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what wgmma does not take."""
    return tuple(itertools.islice(proposals(space, arch), top_k))


def proposals(space: IterSpace, arch: Arch) -> Iterator[Proposal]:
    """Yield what `propose` returns, and time no more than that takes."""
    gemm = contraction_of(space)
    if isinstance(gemm, str) or why_not(space, arch):
        return iter(())
    found = _by_schedule(gemm, space.blocks[-1].writes[0].dtype, arch.the_gpu)
    return spread(best_first(forms, SAME_TILE) for forms in found)


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why wgmma does not take a computation, as a sentence; empty where it does."""
    gemm, gpu = contraction_of(space), arch.the_gpu
    if isinstance(gemm, str):
        return gemm
    dtype, other = gemm.a.dtype, gemm.b.dtype
    before = list(itertools.takewhile(lambda block: not block.is_reduction, space.blocks))
    block = space.blocks[len(before)]
    reasons = (
        (not gpu.wgmma_arch, "its GPU has no wgmma"),
        (not gemm.is_plain, "its reduction does something else than adding products"),
        (dtype != other, f"its operands differ in dtype: {dtype} and {other}"),
        (gemm.accum_dtype not in SUMS.get(dtype, ()), f"there is no wgmma of {dtype} summed in {gemm.accum_dtype} here"),
        (not gpu.tensor_rate(dtype), f"the GPU's tensor cores do not take {dtype}"),
        (not all(map(_is_copy, before)), "an operand is computed on the way"),
        (not _are_matrices(space, block, gemm), "an operand's rows or terms do not lie at one distance from each other"),
        (max(gemm.extents[1:3]) == 1, IS_GEMV),
        (gemm.extents[0] > MAX_GRID_Z, f"its batch is longer than a launch takes: {MAX_GRID_Z}"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def _is_copy(block: Block) -> bool:
    """Say whether a block changes nothing but places: TMA brings what lies in memory, and computes nothing."""
    (write,) = block.writes
    same = [(read.dtype, math.prod(read.shape)) == (write.dtype, math.prod(write.shape)) for read in block.reads]
    return same == [True] and block.flops_per_point == 0


def _are_matrices(space: IterSpace, block: Block, gemm: Contraction) -> bool:
    """Say whether both operands are matrices in memory: each group of axes walks on where the one inside of it ends."""
    sides = ((gemm.a, gemm.m), (gemm.b, gemm.n))
    joined = (_is_joined(block, stored(space, block.reads[operand.position]), group) for operand, axes in sides for group in (axes, gemm.k))
    return all(joined) and len(gemm.batch) <= MAX_BATCH_AXES


def _is_joined(block: Block, access: Access, group: Sequence[int]) -> bool:
    strides: Counter[int] = Counter()
    for dim, index in enumerate(access.index):
        for axis, coefficient in index or ():
            strides[axis] += coefficient * math.prod(access.shape[dim + 1 :])
    axes = [axis for axis in group if block.axes[axis].extent > 1]
    return all(strides[outer] == block.axes[inner].extent * strides[inner] for outer, inner in itertools.pairwise(axes))


def _by_schedule(gemm: Contraction, out_dtype: str, gpu: Gpu) -> Iterable[list[Group | Estimate]]:
    """Return every sensible tiling of each schedule, of the operands as they are and of copies that TMA can read."""
    found = list(_forms(gemm, out_dtype, gpu, packing_secs=0.0))
    packed, packed_bytes = _packed(gemm)
    if packed_bytes:
        found += _forms(packed, out_dtype, gpu, packing_secs=model.packing_secs(gpu, packed_bytes))
    parts = defaultdict(list)
    for kernel_schedule, form in found:
        parts[kernel_schedule].append(form)
    return parts.values()


def _packed(gemm: Contraction) -> tuple[Contraction, int]:
    """Return the product of copies of those operands that TMA does not bring, and the bytes to copy, more for those to be turned."""
    operands = {name: operand for name in ("a", "b") if not is_box(operand := getattr(gemm, name))}
    copies = {name: replace(operand, contiguous=model.STEP_BYTES, is_k_last=is_k_last(operand)) for name, operand in operands.items()}
    copied = (operand.size_bytes * (TURNED if is_turned(operand) else 1) for operand in operands.values())
    return replace(gemm, **copies), sum(copied)


def _forms(gemm: Contraction, out_dtype: str, gpu: Gpu, packing_secs: float) -> Iterator[tuple[str, Group | Estimate]]:
    """Yield tiles with their schedule, to be timed."""
    m = gemm.extents[1]
    are_odd = SOME_ROWS < m <= MANY_ROWS and m % SOME_ROWS > 0
    for swap_ab in (1,) if m <= FEW_ROWS else (0, 1) if m <= SOME_ROWS or are_odd else (0,):
        setting = setting_of(_exchanged(gemm) if swap_ab else gemm, out_dtype, gpu, packing_secs)
        for bare in _bare_tilings(setting.gemm, gpu, swap_ab):
            yield from timed(setting, bare._replace(pack=int(packing_secs > 0)))


def _exchanged(gemm: Contraction) -> Contraction:
    """Return the product of the transposed operands, whose result is the transposed one."""
    batch, m, n, k = gemm.extents
    return replace(gemm, m=gemm.n, n=gemm.m, a=gemm.b, b=gemm.a, extents=(batch, n, m, k))


def _bare_tilings(gemm: Contraction, gpu: Gpu, swap_ab: int) -> Iterator[Tiling]:
    """Yield tiles with their consumers, parts and clusters, without stages."""
    batch, m, n, k = gemm.extents
    steps, packing = -(-k // step_items(gemm)), model.sums_a_register(gemm.accum_dtype)
    are_boxes = all(map(is_box, (gemm.a, gemm.b)))
    for (block_m, consumers, kernel_schedule), (block_n, is_filling) in _shapes(gemm, gpu, swap_ab):
        tiling = Tiling(block_m, block_n, consumers, MIN_STAGES, kernel_schedule=kernel_schedule, swap_ab=swap_ab)
        most = (MOST_REGISTERS if is_filling else SUMS_REGISTERS)[consumers] * packing
        if tiling.thread_sums > most or not _suits(tiling, m) or (tiling.is_pingpong and block_n & (block_n - 1) and not is_filling):
            continue  # fewer forms to time: ping-pong of other widths won no contest
        rows, columns = -(-m // block_m), -(-n // block_n)
        is_alone = batch * rows * columns <= gpu.sm_count
        if is_alone and kernel_schedule != "cooperative":
            continue  # there is no other tile to multiply while results leave
        for cluster_m, cluster_n in CLUSTERS if are_boxes else CLUSTERS[:1]:
            if cluster_m <= rows and cluster_n <= columns and _can_share(gemm, tiling, cluster_m, cluster_n):
                yield tiling._replace(cluster_m=cluster_m, cluster_n=cluster_n)
        for split_k in SPLITS:
            is_whole = steps // split_k >= LEAST_STEPS and steps % split_k == tiling.thread_sums % (packing * split_k) == 0
            if is_whole and batch * rows * columns * split_k <= 2 * gpu.sm_count and kernel_schedule == "cooperative":
                yield tiling._replace(split_k=split_k)


def _shapes(gemm: Contraction, gpu: Gpu, swap_ab: int) -> Iterator[tuple[tuple[int, int, str], tuple[int, bool]]]:
    """Yield rows, consumers and schedules with widths, and whether these are cut to fill the SMs."""
    batch, m, n, _ = gemm.extents
    dtype, unit = gemm.a.dtype, unit_of(gemm.b)
    widths = [] if swap_ab and n > SOME_ROWS else widths_of(n, dtype, is_whole=bool(swap_ab))
    may_fill = not swap_ab or n > SOME_ROWS
    for warpgroups in WARPGROUPS:
        filling = filling_widths(batch * -(-m // warpgroups[0]), n, dtype, unit, gpu) if may_fill else []
        yield from ((warpgroups, (width, False)) for width in widths if width not in filling)
        yield from ((warpgroups, (width, True)) for width in filling)


def _suits(tiling: Tiling, m: int) -> bool:
    """Say whether no smaller tile does for the rows, and consumers have enough to do: one alone is as good for narrow tiles."""
    least = 2 * ROWS if tiling.consumers == 3 or tiling.is_staggered else ROWS if tiling.block_m == ROWS * tiling.consumers else 0
    return (tiling.block_n >= least or tiling.consumers == 1) and (tiling.block_m - ROWS < m or tiling.block_m == ROWS)


def _can_share(gemm: Contraction, tiling: Tiling, cluster_m: int, cluster_n: int) -> bool:
    """Say whether blocks can bring together what they share: columns along the rows, and rows along the columns."""
    sides = ((gemm.b, tiling.block_n, cluster_m), (gemm.a, tiling.block_m, cluster_n))
    return all(can_share(extent, unit_of(operand), blocks) for operand, extent, blocks in sides)
