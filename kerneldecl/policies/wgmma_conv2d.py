"""Owns which TMA boxes of pixels, tiles and stages of a convolution on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them. It proposes nothing for a convolution that is a plain GEMM.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.analysis.hopper_limits import (
    K_TILE_BYTES,
    MAX_BLOCK_N,
    MAX_STAGES,
    MAX_TMA_BOX,
    MAX_TMA_BOX_STRIDE,
    MIN_STAGES,
    MMA_TILE_ROWS,
    PREFERRED_ACCUM_REGISTERS,
    RESERVED_SMEM_BYTES,
    WARPGROUP_THREADS,
    epilogue_tile_bytes,
)
from kerneldecl.analysis.params import CONV_ALONE, WgmmaParams
from kerneldecl.analysis.tensor_cores import accumulators_per_register
from kerneldecl.model import Arch, Block, Candidate, IterSpace, dtype_bytes
from kerneldecl.policies import wgmma_matmul
from kerneldecl.policies.gpu.gemm_tiles import Estimate
from kerneldecl.policies.hopper import time_model as model
from kerneldecl.policies.hopper.convolution import ALIGNED_ITEMS, ITEM_BYTES, ConvPolicy, ConvProblem, ImageReduction
from kerneldecl.policies.hopper.epilogue_smem import epilogue_smem, epilogue_smem_bytes
from kerneldecl.policies.hopper.operands import first_reason, smem_rows_unit, tma_lines
from kerneldecl.policies.hopper.split_k import split_k_choices, workspace_choices
from kerneldecl.policies.hopper.tile_widths import N_UNIT
from kerneldecl.policies.hopper.tilings import store_chunks

TEMPLATES = ("wgmma_conv2d",)
KINDS = ("cuda",)
HAS_TRACES = False

CONSUMERS = tuple(each for each in wgmma_matmul.CONSUMERS if each.consumers <= 2 and each.kernel_schedule != "staggered")
BLOCK_N_CHOICES = (64, 128, 192, 256)
SWAP_MAX_FILTERS = 128
"""Filters up to which pixels may be B and filters A, so that each wgmma reads the few filters for more pixels."""
SWAPPED_BLOCK_N_CHOICES = (64, 128, 256)
K_TILE_CHANNELS = K_TILE_BYTES // ITEM_BYTES
PDL = 1
"""Value of `pdl`: CTAs that fill an SM start as those of the preceding kernel end, which hides the launch."""
BOXES_PER_SIZE = 2
"""Boxes of pixels that are tried for each number of pixels."""
MAX_RASTER_GROUP = 8
SCATTERED_PIXELS_PENALTY = 0.2
"""Part of its time by which a tile of one pixel per image is slower than one of many pixels: they are further apart in memory. A tile
of 2 x 2 pixels of 32 images took 0.87 of the time of 1 pixel of 128 images, 4 x 4 pixels of 8 images 0.9 (H200, 2026-11)."""
MIN_PACKED_CHANNELS = 16
"""Channels from which images are copied where TMA cannot read them: a k-tile has 64 of one tap, whether or not they are there. Assumed."""
CLUSTER_FACTOR = 1.07
"""Ratio of the times of clusters that share filters and of single CTAs: 3 of 3 layers were slower (H200, 2026-11)."""


@dataclass(frozen=True)
class Convolution:
    """The sizes of a convolution."""

    outputs: tuple[int, int, int]
    """Images, rows and columns of the result."""
    strides: tuple[int, int]
    """Pixels between receptive fields along rows and columns."""
    taps: int
    """Pixels of a filter."""
    channels: int

    @property
    def k_tiles(self) -> int:
        """Return the k-tiles of a tile: 64 channels of one tap each."""
        return self.taps * -(-self.channels // K_TILE_CHANNELS)

    def boxes(self, box: tuple[int, int, int]) -> int:
        """Return how many boxes of images, rows and columns cover the outputs."""
        return math.prod(-(-extent // side) for extent, side in zip(self.outputs, box, strict=True))


Problem = ConvProblem[Convolution]


class Tiling(WgmmaParams):
    """The parameters of template `wgmma_conv2d`."""

    __slots__ = ()

    @property
    def box(self) -> tuple[int, int, int]:
        """Return the images, rows and columns of a tile's pixels."""
        return self.pixels // (self.tile_w * self.tile_h), self.tile_h, self.tile_w

    @property
    def pixels(self) -> int:
        return self.block_n if self.swap_ab else self.block_m

    @property
    def filters(self) -> int:
        return self.block_m if self.swap_ab else self.block_n

    def candidate(self) -> Candidate:
        return self.candidate_of("wgmma_conv2d", (*CONV_ALONE, "pack") if self.pack else CONV_ALONE)


def _why_not_tiled(problem: Problem, space: IterSpace, arch: Arch) -> str:
    conv, gemm = problem.conv, problem.gemm
    dtype, is_wasted = gemm.a.dtype, conv.channels % ALIGNED_ITEMS > 0 and conv.channels < MIN_PACKED_CHANNELS
    reasons = (
        (dtype_bytes(dtype) != ITEM_BYTES, f"wgmma transposes 16-bit operands alone, and filters of {dtype} do not have k last"),
        (is_wasted, f"its channels are not a multiple of {ALIGNED_ITEMS}, and too few for a k-tile of {K_TILE_CHANNELS}"),
        (max(conv.strides) > MAX_TMA_BOX_STRIDE, f"its stride is larger than TMA's, {MAX_TMA_BOX_STRIDE}"),
        (not wgmma_matmul.why_not(space, arch), "it is a plain GEMM"),
    )
    return first_reason(gemm, problem.gpu, reasons)


def _convolution(reduction: ImageReduction, gemm: Contraction) -> Convolution | None:
    """Return the sizes of a convolution over images; None for other computations."""
    block, image, _ = reduction
    *dims, channel = ([(axis, coefficient) for axis, coefficient in index or () if block.axes[axis].extent > 1] for index in image.index)
    read = [dim for dim in (_dimension(block, terms, gemm) for terms in dims) if dim is not None]
    if len(read) < len(dims) or len(channel) != 1 or channel[0][1] != 1 or channel[0][0] not in gemm.k:
        return None
    images, rows, columns = read
    if (images.stride, images.taps) != (1, 1):
        return None
    return Convolution(
        outputs=(images.outputs, rows.outputs, columns.outputs),
        strides=(rows.stride, columns.stride),
        taps=rows.taps * columns.taps,
        channels=block.axes[channel[0][0]].extent,
    )


class _Dimension(NamedTuple):
    """How receptive fields cover one dimension of an image."""

    outputs: int
    stride: int
    taps: int


def _dimension(block: Block, terms: Sequence[tuple[int, int]], gemm: Contraction) -> _Dimension | None:
    """Return how receptive fields cover a dimension with these index terms, None where several outputs' or filters' axes do."""
    spatial = [term for term in terms if term[0] in gemm.m]
    reduced = [axis for axis, _ in terms if axis in gemm.k]
    if len(spatial) > 1 or len(reduced) > 1 or len(spatial) + len(reduced) < len(terms):
        return None
    outputs, stride = (block.axes[spatial[0][0]].extent, spatial[0][1]) if spatial else (1, 1)
    return _Dimension(outputs, stride, math.prod(block.axes[axis].extent for axis in reduced))


def _packed_estimates(problem: Problem) -> Iterator[Estimate]:
    """Yield what `estimates` does, of copies of the operands that TMA cannot read, with the time to make them."""
    conv, gemm = problem.conv, problem.gemm
    unaligned = {"a": conv.channels % ALIGNED_ITEMS > 0, "b": gemm.b.vector() < ALIGNED_ITEMS}
    operands = {name: getattr(gemm, name) for name, is_copied in unaligned.items() if is_copied}
    if not operands:
        yield from estimates(problem)
        return
    secs = model.packing_secs(problem.gpu, sum(operand.size_bytes for operand in operands.values()))
    copies = {name: replace(operand, contiguous=K_TILE_CHANNELS) for name, operand in operands.items()}
    for estimate in estimates(problem._replace(gemm=replace(gemm, **copies))):
        yield estimate._replace(tiling=estimate.tiling._replace(pack=1), secs=estimate.secs + secs)  # type: ignore[attr-defined]


def estimates(problem: Problem) -> Iterator[Estimate]:
    """Yield every sensible tiling with its predicted time."""
    per_register = accumulators_per_register(problem.gemm.accum_dtype)
    for tile in _tiles(problem.conv, problem.filters):
        if tile.thread_accumulators <= PREFERRED_ACCUM_REGISTERS[tile.consumers] * per_register:
            for tiling in _clustered_or_split(problem, tile):
                yield from _with_stages(problem, tiling)


def _tiles(conv: Convolution, filters: int) -> Iterator[Tiling]:
    """Yield tiles of boxes of pixels, with their consumers."""
    for block_m, consumers, kernel_schedule in CONSUMERS:
        sizes = [(block_n, box, 0) for box in _boxes(conv, block_m) for block_n in _block_n_choices(filters)]
        if filters <= SWAP_MAX_FILTERS and block_m - MMA_TILE_ROWS < filters:
            sizes += [(block_n, box, 1) for block_n in SWAPPED_BLOCK_N_CHOICES for box in _boxes(conv, block_n)[:1]]
        for block_n, (_, tile_h, tile_w), swap_ab in sizes:
            yield Tiling(
                block_m=block_m,
                block_n=block_n,
                consumers=consumers,
                tile_w=tile_w,
                tile_h=tile_h,
                kernel_schedule=kernel_schedule,
                swap_ab=swap_ab,
                pdl=PDL,
            )


def _boxes(conv: Convolution, pixels: int) -> list[tuple[int, int, int]]:
    """Return the best boxes (images, rows, columns) of so many pixels, whose sides are powers of two.

    Those are best that cover the outputs with the fewest boxes, have pixels of few images, and are nearly square.
    """
    sizes = [1 << power for power in range(pixels.bit_length())]
    found = [
        (pixels // (rows * columns), rows, columns)
        for rows, columns in itertools.product(sizes, sizes)
        if rows * columns <= pixels
        and pixels // (rows * columns) <= MAX_TMA_BOX
        and all(side * stride <= MAX_TMA_BOX for side, stride in zip((rows, columns), conv.strides, strict=True))
    ]
    return sorted(found, key=lambda box: (conv.boxes(box) * _scattered_factor(box), abs(math.log2(box[1] / box[2])), box))[:BOXES_PER_SIZE]


def _scattered_factor(box: tuple[int, int, int]) -> float:
    """Return the ratio by which a tile is slower whose pixels are of several images."""
    return 1 + SCATTERED_PIXELS_PENALTY / math.sqrt(box[1] * box[2])


def _block_n_choices(filters: int) -> list[int]:
    """Return the widths of tiles, in ascending order: fixed ones that are not wider than filters need, and the least that covers them."""
    widest = min(MAX_BLOCK_N, -(-filters // MMA_TILE_ROWS) * MMA_TILE_ROWS)
    covering = min(widest, -(-filters // N_UNIT) * N_UNIT)
    return sorted({covering, *(width for width in BLOCK_N_CHOICES if width <= widest)})


def _clustered_or_split(problem: Problem, tile: Tiling) -> Iterator[Tiling]:
    """Yield a tile alone, in clusters that share filters, and with split-K where tiles leave SMs idle."""
    conv, gemm, gpu = problem.conv, problem.gemm, problem.gpu
    boxes = conv.boxes(tile.box)
    tiles = boxes * -(-problem.filters // tile.filters)
    if tile.is_pingpong and tiles <= gpu.sm_count:
        return  # one consumer would have nothing to do
    yield tile
    if boxes > 1 and tile.filters % (2 * smem_rows_unit(gemm.b)) == 0:
        yield tile._replace(cluster_n=2) if tile.swap_ab else tile._replace(cluster_m=2)
    if tile.is_pingpong:
        return
    # A k-tile beyond the last one would be a filter tap beyond the last one.
    for split_k in split_k_choices(gpu, tiles, conv.k_tiles):
        if conv.k_tiles % split_k == 0:
            yield tile._replace(split_k=split_k)
    for split_k in workspace_choices(gpu, tiles, conv.k_tiles, is_even=True):
        yield tile._replace(split_k=split_k, workspace=1)


def _with_stages(problem: Problem, tiling: Tiling) -> Iterator[Estimate]:
    """Yield a tiling with the most stages that fit, and with one less, which leaves room for epilogue buffers."""
    limit = problem.gpu.smem_per_block_optin_bytes
    # The next tile's first k-tiles are loaded while this one's last are multiplied, so that short reductions want as many stages.
    most = min(MAX_STAGES, model.fitting_stages(limit, *_stage_extents(problem.gemm, tiling), _epilogue_smem_bytes(problem, tiling)))
    for stages in sorted({most, most - 1, *_roomy_stages(problem, tiling, most)}, reverse=True):
        if stages >= MIN_STAGES:
            raster_group = min(MAX_RASTER_GROUP, problem.conv.boxes(tiling.box))
            yield _estimate(problem, tiling._replace(stages=stages, raster_group=raster_group))


def _roomy_stages(problem: Problem, tiling: Tiling, most: int) -> tuple[int, ...]:
    """Return the most stages beside which all results of a tile have room, so that TMA loads the residual's; none without one."""
    if not problem.has_residual or tiling.split_k > 1:
        return ()
    results = tiling.consumers * tiling.thread_accumulators * WARPGROUP_THREADS
    limit = problem.gpu.smem_per_block_optin_bytes
    return (min(most, model.fitting_stages(limit, *_stage_extents(problem.gemm, tiling), epilogue_tile_bytes(results))),)


def _stage_extents(gemm: Contraction, tiling: Tiling) -> tuple[int, int]:
    """Return the pixels and filters that a stage has room for: contiguous filters are loaded 64 at a time."""
    unit = smem_rows_unit(gemm.b)
    return tiling.pixels, -(-tiling.filters // unit) * unit


def _epilogue_smem_bytes(problem: Problem, tiling: Tiling) -> int:
    out_bytes = dtype_bytes(problem.out_dtype)
    split_k = 1 if tiling.workspace else tiling.split_k
    return epilogue_smem_bytes(tiling.thread_accumulators, tiling.consumers, split_k, out_bytes)


def smem_bytes(problem: Problem, tiling: Tiling) -> int:
    """Return the least shared memory of a CTA; where more is free, the epilogue has more buffers."""
    stages = tiling.stages * model.stage_bytes(*_stage_extents(problem.gemm, tiling))
    return stages + _epilogue_smem_bytes(problem, tiling) + RESERVED_SMEM_BYTES


def _estimate(problem: Problem, tiling: Tiling) -> Estimate:
    gpu = problem.gpu
    a, b = (problem.gemm.b, problem.gemm.a) if tiling.swap_ab else (problem.gemm.a, problem.gemm.b)
    cta = model.CtaTile(
        tiling.block_m,
        tiling.block_n,
        tiling.is_pingpong,
        tma_lines=(tma_lines(a, tiling.block_m), tma_lines(b, tiling.block_n)),
        consumers=1 if tiling.is_pingpong else tiling.consumers,
        store_chunks=store_chunks(tiling, problem.out_dtype),
    )
    cost = model.tile_cost(gpu, problem.gemm.a.dtype, _grid(problem, tiling), cta)
    free = gpu.smem_per_block_optin_bytes - smem_bytes(problem, tiling)
    loads = ("threads" if tiling.split_k > 1 else "tma") if problem.has_residual else ""
    smem = epilogue_smem(free, tiling.consumers, tiling.thread_accumulators, loads=loads)
    pipeline = model.Pipeline(tiling.stages, smem.buffers, residual_chunks=smem.residual_chunks)
    secs = model.tiles_secs(gpu, cost, pipeline) * _scattered_factor(tiling.box)
    if tiling.cluster_m * tiling.cluster_n > 1:
        secs *= CLUSTER_FACTOR
    launch = model.launch_secs(gpu, has_pdl=bool(tiling.pdl))
    return Estimate(
        tiling, secs + launch, (tiling.block_m, tiling.block_n, tiling.split_k, tiling.workspace, tiling.is_pingpong, tiling.swap_ab)
    )


def _grid(problem: Problem, tiling: Tiling) -> model.TileGrid:
    boxes, filter_tiles = problem.conv.boxes(tiling.box), -(-problem.filters // tiling.filters)
    rows, columns = (filter_tiles, boxes) if tiling.swap_ab else (boxes, filter_tiles)
    rows, columns = -(-rows // tiling.cluster_m) * tiling.cluster_m, -(-columns // tiling.cluster_n) * tiling.cluster_n
    return model.TileGrid(
        tiles=rows * columns,
        k_tiles=-(-problem.conv.k_tiles // tiling.split_k),
        cluster_m=tiling.cluster_m,
        cluster_n=tiling.cluster_n,
        split_k=tiling.split_k,
        has_workspace=bool(tiling.workspace),
        out_bytes=dtype_bytes(problem.out_dtype),
        dram_bytes=_dram_bytes(problem),
        store_bytes=math.gcd(problem.filters * dtype_bytes(problem.out_dtype), VECTOR_BYTES),
    )


def _dram_bytes(problem: Problem) -> float:
    """Return the bytes from and to DRAM: each pixel once, since tiles whose receptive fields overlap run at the same time."""
    conv, gemm = problem.conv, problem.gemm
    outputs = math.prod(conv.outputs)
    receptive = outputs * conv.taps * conv.channels * dtype_bytes(gemm.a.dtype)
    return min(gemm.a.size_bytes, receptive) + gemm.b.size_bytes + outputs * problem.filters * dtype_bytes(problem.out_dtype)


POLICY = ConvPolicy(_convolution, _why_not_tiled, _packed_estimates)
propose, proposals, why_not = POLICY.propose, POLICY.proposals, POLICY.why_not
