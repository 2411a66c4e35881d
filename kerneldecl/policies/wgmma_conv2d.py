"""Owns which boxes of pixels, tiles and rings of stages of a convolution on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them. Of a convolution that is a product of plain matrices it proposes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kerneldecl.analysis.contraction import Contraction, contraction_of, stored
from kerneldecl.model import Access, Arch, Block, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies import wgmma_matmul
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first
from kerneldecl.policies.hopper import time_model as model
from kerneldecl.policies.hopper.operands import unit_of
from kerneldecl.policies.hopper.tile_widths import COLUMN_UNIT, MAX_COLUMNS
from kerneldecl.policies.hopper.tilings import MAX_STAGES, MIN_STAGES

TEMPLATES = ("wgmma_conv2d",)
HAS_TRACES = False

WARPGROUPS = ((64, 1, False), (128, 1, False), (128, 2, False), (256, 2, False), (64, 2, True), (128, 2, True))
"""Rows of a tile, consumers, and whether these have tiles of their own."""
SWAPPED_FILTERS = 128
"""With no more of them, filters may be rows and pixels columns: wgmma then reads the fewer of them for more products."""
SWAPPED_PIXELS = (64, 128, 256)
STEP_CHANNELS = model.STEP_BYTES // 2
MAX_STEP = 8
MAX_BOX = 256
"""Limits of a tensor map's box: its steps and its sides, what it steps over included (CUDA driver API, cuTensorMapEncodeTiled)."""
ALIGNED_ITEMS = 8
"""Of 16 bits, which pitches must be multiples of."""
SHAPES = 2
"""Of boxes of pixels that are tried for each size of tiles."""
SAME_TILE = 4
RASTER = 8
"""Rows of tiles that are walked before the next column."""
APART = 0.2
"""By how much longer a tile of single pixels of many images takes than one of many pixels: their lines lie further apart. A tile of
2 x 2 pixels of 32 images took 0.87 of the time of one pixel of 128, and one of 4 x 4 pixels of 8 images 0.9 (H200)."""
CLUSTERED = 1.07
"""By how much longer tiles take that share an operand: the image's boxes are not it, and 3 of 3 layers were slower (H200)."""


@dataclass(frozen=True)
class Windows:
    """How results look at images: (images, rows, columns) of them, the steps between rows and columns, and what each adds up."""

    results: tuple[int, int, int]
    steps: tuple[int, int]
    taps: int
    channels: int


class Tiling(NamedTuple):
    """The template's parameters."""

    block_m: int
    block_n: int
    consumers: int
    tile_w: int
    tile_h: int
    stages: int = MIN_STAGES
    cluster_m: int = 1
    cluster_n: int = 1
    raster_group: int = 1
    split_k: int = 1
    kernel_schedule: str = "cooperative"
    swap_ab: int = 0
    pdl: int = 1
    """Blocks that fill an SM come as those of the kernel in front leave, and gain what a launch takes."""

    @property
    def is_pingpong(self) -> bool:
        return self.kernel_schedule == "pingpong"

    @property
    def box(self) -> tuple[int, int, int]:
        """Return the images, rows and columns of a tile."""
        return self.pixels // (self.tile_w * self.tile_h), self.tile_h, self.tile_w

    @property
    def pixels(self) -> int:
        return self.block_n if self.swap_ab else self.block_m

    @property
    def filters(self) -> int:
        return self.block_m if self.swap_ab else self.block_n

    @property
    def thread_sums(self) -> int:
        rows = self.block_m if self.is_pingpong else self.block_m // self.consumers
        return rows * self.block_n // model.WARPGROUP

    def candidate(self) -> Candidate:
        return Candidate.of("wgmma_conv2d", self._asdict())


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what is no convolution that TMA can bring."""
    return tuple(itertools.islice(proposals(space, arch), top_k))


def proposals(space: IterSpace, arch: Arch) -> Iterator[Proposal]:
    """Yield what `propose` returns."""
    gemm = contraction_of(space)
    if isinstance(gemm, str) or why_not(space, arch):
        return iter(())
    windows = _windows(space, gemm)
    assert windows is not None, "why_not has asked for them"
    out_dtype = space.blocks[-1].writes[0].dtype
    return best_first(estimates(windows, gemm, out_dtype, arch.the_gpu), SAME_TILE)


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why wgmma does not take a computation as a convolution, as a sentence; empty where it does."""
    gemm, gpu = contraction_of(space), arch.the_gpu
    if isinstance(gemm, str):
        return gemm
    dtype, other = gemm.a.dtype, gemm.b.dtype
    windows = _windows(space, gemm)
    if windows is None:
        return "it is no convolution of images whose channels lie side by side"
    is_pitched = windows.channels % ALIGNED_ITEMS == 0 and gemm.b.vector() == ALIGNED_ITEMS
    reasons = (
        (not gpu.wgmma_arch, "its GPU has no wgmma"),
        (not gemm.is_plain, "its reduction does something else than adding products"),
        (dtype != other, f"its operands differ in dtype: {dtype} and {other}"),
        (gemm.accum_dtype not in wgmma_matmul.SUMS.get(dtype, ()), f"there is no wgmma of {dtype} summed in {gemm.accum_dtype} here"),
        (dtype_bytes(dtype) != 2, "wgmma does not take weights of 8 bits whose filters lie side by side"),
        (not gpu.tensor_rate(dtype), f"the GPU's tensor cores do not take {dtype}"),
        (not is_pitched, "its channels or filters are no multiples of 8"),
        (max(windows.steps) > MAX_STEP, f"its windows are more than {MAX_STEP} pixels apart"),
        (not wgmma_matmul.why_not(space, arch), "it is a product of plain matrices"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def _windows(space: IterSpace, gemm: Contraction) -> Windows | None:
    """Return how a convolution looks at its images, None for what is none with dimensions image, row, column, channel."""
    before = list(itertools.takewhile(lambda block: not block.is_reduction, space.blocks))
    block = space.blocks[len(before)]
    image = block.reads[gemm.a.position]
    if gemm.batch or len(image.index) != 4 or not all(map(is_copy, before)) or not is_whole(stored(space, image), image):
        return None
    *sides, channel = ([(axis, step) for axis, step in index or () if block.axes[axis].extent > 1] for index in image.index)
    looks = [look for look in (_looks(block, terms, gemm) for terms in sides) if look is not None]
    if len(looks) < len(sides) or len(channel) != 1 or channel[0][1] != 1 or channel[0][0] not in gemm.k:
        return None
    (images, step, unseen), rows, columns = looks
    if step != 1 or unseen != 1:
        return None
    return Windows((images, rows[0], columns[0]), (rows[1], columns[1]), rows[2] * columns[2], block.axes[channel[0][0]].extent)


def is_copy(block: Block) -> bool:
    """Say whether a block changes nothing but places, such as one that adds a margin."""
    return len(block.reads) == 1 and block.reads[0].dtype == block.writes[0].dtype and block.flops_per_point == 0


def is_whole(source: Access, image: Access) -> bool:
    """Say whether an image has the argument's images and channels, with nothing but a margin added."""
    return len(source.shape) == len(image.shape) and (source.shape[0], source.shape[3]) == (image.shape[0], image.shape[3])


def _looks(block: Block, terms: Sequence[tuple[int, int]], gemm: Contraction) -> tuple[int, int, int] | None:
    """Return the results along a dimension of the image, the step between them, and the taps of each."""
    spatial = [term for term in terms if term[0] in gemm.m]
    reduced = [axis for axis, _ in terms if axis in gemm.k]
    if len(spatial) > 1 or len(reduced) > 1 or len(spatial) + len(reduced) < len(terms):
        return None
    results, step = (block.axes[spatial[0][0]].extent, spatial[0][1]) if spatial else (1, 1)
    return results, step, math.prod(block.axes[axis].extent for axis in reduced)


def estimates(windows: Windows, gemm: Contraction, out_dtype: str, gpu: Gpu) -> Iterator[Estimate]:
    """Yield every sensible tiling with its predicted time."""
    for bare in _bare_tilings(windows, gemm.extents[2]):
        if bare.thread_sums <= wgmma_matmul.SUMS_REGISTERS[bare.consumers] * model.sums_a_register(gemm.accum_dtype):
            for tiling in _shared(windows, gemm, bare, gpu):
                yield from _staged(windows, gemm, tiling, out_dtype, gpu)


def _bare_tilings(windows: Windows, filters: int) -> Iterator[Tiling]:
    """Yield tiles of boxes of pixels, with their consumers."""
    for block_m, consumers, is_pingpong in WARPGROUPS:
        kernel_schedule = "pingpong" if is_pingpong else "cooperative"
        for (_, tile_h, tile_w), block_n in itertools.product(_boxes(windows, block_m), _columns(filters)):
            yield Tiling(block_m, block_n, consumers, tile_w, tile_h, kernel_schedule=kernel_schedule)
        if filters <= SWAPPED_FILTERS and block_m - model.WGMMA_ROWS < filters:
            for block_n in SWAPPED_PIXELS:
                for _, tile_h, tile_w in _boxes(windows, block_n)[:1]:
                    yield Tiling(block_m, block_n, consumers, tile_w, tile_h, kernel_schedule=kernel_schedule, swap_ab=1)


def _boxes(windows: Windows, pixels: int) -> list[tuple[int, int, int]]:
    """Return boxes of so many pixels, sides powers of two: those that cover the results with the least, and have pixels of few images."""
    sizes = [1 << power for power in range(pixels.bit_length())]
    found = [
        (pixels // (rows * columns), rows, columns)
        for rows, columns in itertools.product(sizes, sizes)
        if rows * columns <= pixels
        and pixels // (rows * columns) <= MAX_BOX
        and all(side * step <= MAX_BOX for side, step in zip((rows, columns), windows.steps, strict=True))
    ]
    return sorted(found, key=lambda box: (count(windows, box) * _apart(box), abs(math.log2(box[1] / box[2])), box))[:SHAPES]


def _apart(box: tuple[int, int, int]) -> float:
    """Return by how much longer a tile takes whose pixels are of several images."""
    return 1 + APART / math.sqrt(box[1] * box[2])


def count(windows: Windows, box: tuple[int, int, int]) -> int:
    """Return how many boxes cover the results."""
    return math.prod(-(-extent // side) for extent, side in zip(windows.results, box, strict=True))


def _columns(filters: int) -> list[int]:
    """Return the widths of tiles up to the first that covers the filters."""
    widest = min(MAX_COLUMNS, -(-filters // model.WGMMA_ROWS) * model.WGMMA_ROWS)
    least = min(widest, max(COLUMN_UNIT, -(-filters // COLUMN_UNIT) * COLUMN_UNIT))
    return sorted({least, *(width for width in (64, 128, 192, 256) if width <= widest)})


def _shared(windows: Windows, gemm: Contraction, bare: Tiling, gpu: Gpu) -> Iterator[Tiling]:
    """Yield a tiling with the weights that clusters share, and with parts of the reduction where tiles leave SMs idle."""
    boxes, tiles = count(windows, bare.box), count(windows, bare.box) * -(-gemm.extents[2] // bare.filters)
    if bare.is_pingpong and tiles <= gpu.sm_count:
        return  # one consumer would have nothing to do
    yield bare
    if boxes > 1 and bare.filters % (2 * unit_of(gemm.b)) == 0:
        yield bare._replace(cluster_n=2) if bare.swap_ab else bare._replace(cluster_m=2)
    for split_k in wgmma_matmul.SPLITS:
        is_long = steps(windows) % split_k == 0 and steps(windows) // split_k >= wgmma_matmul.LEAST_STEPS
        is_whole = is_long and bare.thread_sums % (model.sums_a_register(gemm.accum_dtype) * split_k) == 0
        if is_whole and tiles * split_k <= 2 * gpu.sm_count and not bare.is_pingpong:
            yield bare._replace(split_k=split_k)


def steps(windows: Windows) -> int:
    """Return the stages that a tile's reduction takes: 64 channels at a tap each."""
    return windows.taps * -(-windows.channels // STEP_CHANNELS)


def _staged(windows: Windows, gemm: Contraction, bare: Tiling, out_dtype: str, gpu: Gpu) -> Iterator[Estimate]:
    """Yield a tiling with the most stages that fit, and with one less, which leaves room for results."""
    limit = gpu.smem_per_block_optin_bytes
    held = model.most_stages(limit, *_stored(gemm, bare), _beside(bare, out_dtype))
    # The next tile's first stages are loaded while this one's last are multiplied, so that short sums want as many.
    most = min(MAX_STAGES, held)
    for stages in (most, most - 1):
        if stages >= MIN_STAGES:
            raster_group = min(RASTER, count(windows, bare.box))
            yield _estimate(windows, gemm, bare._replace(stages=stages, raster_group=raster_group), out_dtype, gpu)


def _stored(gemm: Contraction, tiling: Tiling) -> tuple[int, int]:
    """Return the rows and columns that a stage has room for: filters side by side come 64 at a time."""
    unit = unit_of(gemm.b)
    return tiling.pixels, -(-tiling.filters // unit) * unit


def _beside(tiling: Tiling, out_dtype: str) -> int:
    """Return the least bytes that a block needs beside its stages."""
    return model.beside_bytes(tiling.block_m * tiling.block_n, tiling.consumers, tiling.split_k, dtype_bytes(out_dtype))


def smem_bytes(gemm: Contraction, tiling: Tiling, out_dtype: str) -> int:
    """Return the least shared memory of a block; where there is more, results have more buffers."""
    stages = tiling.stages * model.stage_bytes(*_stored(gemm, tiling))
    return stages + _beside(tiling, out_dtype) + model.RESERVED_BYTES


def _estimate(windows: Windows, gemm: Contraction, tiling: Tiling, out_dtype: str, gpu: Gpu) -> Estimate:
    boxes, filters = count(windows, tiling.box), -(-gemm.extents[2] // tiling.filters)
    rows, columns = (filters, boxes) if tiling.swap_ab else (boxes, filters)
    rows, columns = -(-rows // tiling.cluster_m) * tiling.cluster_m, -(-columns // tiling.cluster_n) * tiling.cluster_n
    free = gpu.smem_per_block_optin_bytes - smem_bytes(gemm, tiling, out_dtype)
    tiles = model.Tiles(
        rows * columns,
        -(-steps(windows) // tiling.split_k),
        tiling.cluster_m,
        tiling.cluster_n,
        tiling.split_k,
        dtype_bytes(out_dtype),
        _dram_bytes(windows, gemm, out_dtype),
    )
    pace = model.pace_of(gpu, gemm.a.dtype, tiles, model.Ring(tiling.block_m, tiling.block_n, tiling.is_pingpong))
    buffers = model.buffers_of(free, tiling.consumers, tiling.thread_sums)
    secs = model.tiles_secs(gpu, pace, model.Pipeline(tiling.stages, buffers)) * _apart(tiling.box)
    if tiling.cluster_m * tiling.cluster_n > 1:
        secs *= CLUSTERED
    launch = model.launch_secs(gpu, is_early=bool(tiling.pdl))
    return Estimate(tiling, secs + launch, (tiling.block_m, tiling.block_n, tiling.split_k, tiling.is_pingpong, tiling.swap_ab))


def _dram_bytes(windows: Windows, gemm: Contraction, out_dtype: str) -> float:
    """Return what comes from and goes to DRAM: each pixel once, for tiles that meet it are at work together."""
    results = math.prod(windows.results)
    met = results * windows.taps * windows.channels * dtype_bytes(gemm.a.dtype)
    return min(gemm.a.size_bytes, met) + gemm.b.size_bytes + results * gemm.extents[2] * dtype_bytes(out_dtype)
