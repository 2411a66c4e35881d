"""Owns how convolutions look at an image, and which parts of it tensor cores should convolve at once out of shared memory.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kerneldecl.analysis.contraction import FRAGMENT, Contraction
from kerneldecl.model import Access, Block, Candidate, Gpu, IterSpace, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import Estimate, out_bytes
from kerneldecl.policies.gpu.tensor_core_model import SM_BYTES_PER_CYCLE, SUSTAINED_CLOCK, multiplies_per_cycle, together
from kerneldecl.policies.gpu.time_model import occupancy

ROWS = (1, 2, 4, 8, 16)
CHANNELS = (16, 32, 64, 128)
WARPS = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (8, 1), (4, 2), (1, 7), (2, 7), (1, 3), (1, 5), (1, 6))
LANE_ELEMENTS = 8
"""Of a fragment of 16 x 16."""
MULTIPLIED_TOGETHER, MULTIPLIED_ALONE = 2.35, 0.77
"""How much longer multiplying takes than tensor cores need, since each product waits for its elements: and then, where no
other block is on the SM. With TAKEN_SHARE, fitted to 27 tilings of a 7 x 7 convolution of 3 channels on an H200, within 7 %."""
TAKEN_SHARE = 0.43
"""Of the time in which elements are taken from shared memory: what does not go on behind multiplying."""
MOST_FRAGMENTS = 16
"""Of sums, that one warp holds: 128 registers a thread."""
OTHER_REGISTERS = 40
MOST_COLUMNS = 8
"""Of 16 results each."""
MOST_STEPS = 16
"""Of the reduction: the template spells them all out."""


@dataclass(frozen=True)
class Windows:
    """How results look at an image: the step from one to the next, and how far beyond its first pixel each looks."""

    images: int
    rows: int
    columns: int
    row_step: int
    column_step: int
    row_reach: int
    column_reach: int
    channels: int
    lines: int
    """Of a window: places along the first axis that is summed over."""

    def pixels(self, rows: int, columns: int) -> int:
        """Return how many pixels a rectangle of results looks at; the padded end of the reduction may look one row further."""
        return ((rows - 1) * self.row_step + self.row_reach + 2) * ((columns - 1) * self.column_step + self.column_reach + 1)


@dataclass(frozen=True)
class Tiling:
    """The template's parameters."""

    rows: int
    columns: int
    block_n: int
    warps_rows: int
    warps_columns: int
    warps_n: int
    smem_epilogue: int

    @property
    def warps(self) -> int:
        return self.warps_rows * self.warps_columns * self.warps_n

    @property
    def fragments(self) -> tuple[int, int]:
        """Of results: how many a warp has along pixels and along channels."""
        pixels = self.rows // self.warps_rows * (self.columns // self.warps_columns // FRAGMENT)
        return pixels, self.block_n // self.warps_n // FRAGMENT

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_conv2d_tc", {name: getattr(self, name) for name in self.__dataclass_fields__})


def windows_of(space: IterSpace, gemm: Contraction) -> Windows | None:
    """Return how a convolution looks at its image, None for products that no image with overlapping windows is in."""
    if gemm.batch or len(gemm.m) != 3 or len(gemm.k) < 2:
        return None
    block = next(block for block in space.blocks if block.is_reduction)
    image = block.reads[gemm.a.position]
    looks = [_looks(block, image, axis, gemm.k) for axis in gemm.m]
    if None in looks:
        return None
    (_, outer), (row_step, row_reach), (column_step, column_reach) = (look or (0, 0) for look in looks)
    if outer or not row_reach + column_reach:
        return None
    images, rows, columns = (block.axes[axis].extent for axis in gemm.m)
    return Windows(images, rows, columns, row_step, column_step, row_reach, column_reach, image.shape[-1], block.axes[gemm.k[0]].extent)


def _looks(block: Block, image: Access, axis: int, reduced: tuple[int, ...]) -> tuple[int, int] | None:
    """Return an axis's step through the image and the reach of the reduction beside it, None where it is in no dimension alone."""
    if block.axes[axis].extent == 1:  # such as one image: no index shows it
        return 0, 0
    for index in image.index:
        steps = dict(index or ())
        if axis in steps:
            others = steps.keys() - {axis}
            reach = sum((block.axes[other].extent - 1) * steps[other] for other in others)
            return (steps[axis], reach) if others <= set(reduced) else None
    return None


def estimates(windows: Windows, gemm: Contraction, gpu: Gpu) -> Iterator[Estimate]:
    """Yield what a GPU can hold, with its time."""
    for tiling in tilings(windows, gemm):
        if smem_bytes(windows, gemm, tiling) <= gpu.smem_per_block_optin_bytes:
            yield Estimate(tiling, _secs(windows, gemm, tiling, gpu), (tiling.rows, tiling.columns, tiling.block_n))


def tilings(windows: Windows, gemm: Contraction) -> Iterator[Tiling]:
    """Yield the lattice: parts of an image with few results beyond it, cut into warps whose sums fit registers."""
    _, _, n, k = gemm.extents
    if -(-k // FRAGMENT) > MOST_STEPS:
        return
    whole = -(-windows.columns // FRAGMENT)
    columns = [FRAGMENT * parts for parts in range(1, MOST_COLUMNS + 1) if whole % parts == 0]
    blocks_n = [size for size in CHANNELS if size < 2 * n] or [FRAGMENT]
    tiles = itertools.product(ROWS, columns, blocks_n[-2:], WARPS, (1, 2, 4), (0, 1))
    for rows, column, block_n, (warps_rows, warps_columns), warps_n, smem_epilogue in tiles:
        if rows % warps_rows or column % (FRAGMENT * warps_columns) or block_n % (FRAGMENT * warps_n) or rows >= 2 * windows.rows:
            continue
        tiling = Tiling(rows, column, block_n, warps_rows, warps_columns, warps_n, smem_epilogue)
        pixels, channels = tiling.fragments
        if 2 <= tiling.warps <= 16 and pixels * channels <= MOST_FRAGMENTS:
            yield tiling


def smem_bytes(windows: Windows, gemm: Contraction, tiling: Tiling) -> int:
    """Return the shared memory of a block: its part of the image, the weights, and where they were, gathered results."""
    item_bytes = dtype_bytes(gemm.a.dtype)
    steps = -(-gemm.extents[3] // FRAGMENT) * FRAGMENT
    weights = steps * (tiling.block_n if tiling.block_n in {32, 64, 128} else tiling.block_n + 40) * item_bytes
    image = windows.pixels(tiling.rows, tiling.columns) * windows.channels * item_bytes
    gathered = tiling.rows * tiling.columns * (-(-tiling.block_n // 32) * 32 + 8) * dtype_bytes(gemm.accum_dtype)
    return max(weights + image, tiling.smem_epilogue * gathered)


def _secs(windows: Windows, gemm: Contraction, tiling: Tiling, gpu: Gpu) -> float:
    _, m, n, k = gemm.extents
    item_bytes = dtype_bytes(gemm.a.dtype)
    steps = -(-k // FRAGMENT)
    count = windows.images * -(-windows.rows // tiling.rows) * -(-windows.columns // tiling.columns) * -(-n // tiling.block_n)
    pixels, channels = tiling.fragments
    image = windows.pixels(tiling.rows, tiling.columns) * windows.channels
    copied_bytes = (image + steps * FRAGMENT * tiling.block_n) * item_bytes
    results = tiling.rows * tiling.columns * tiling.block_n
    # A lane takes each of its elements of a fragment of pixels by itself.
    taken = tiling.warps * steps * (pixels * LANE_ELEMENTS + channels * FRAGMENT * FRAGMENT * item_bytes / gpu.smem_bytes_per_clock_per_sm)
    multiply = results * steps * FRAGMENT / multiplies_per_cycle(gpu, gemm.a.dtype, gemm.accum_dtype)
    registers = pixels * channels * 8 + 4 * (pixels + channels) + OTHER_REGISTERS
    resident = occupancy(gpu, tiling.warps * gpu.warp_size, registers, smem_bytes(windows, gemm, tiling))
    if not resident:
        return math.inf
    stored = results * out_bytes(gemm) * (1 if tiling.smem_epilogue else 2)
    # Lanes alone store half of what L2 takes in one go.
    single = (1 - tiling.smem_epilogue) * results * out_bytes(gemm) / SM_BYTES_PER_CYCLE
    cycles = multiply * (MULTIPLIED_TOGETHER + MULTIPLIED_ALONE / resident) + TAKEN_SHARE * taken + single
    sm_secs = -(-count // gpu.sm_count) * cycles / (gpu.clock_hz * SUSTAINED_CLOCK)
    least_bytes = gemm.a.size_bytes + gemm.b.size_bytes + m * n * out_bytes(gemm)
    l2_secs = count * (copied_bytes + stored) / gpu.l2_bytes_per_s
    return together(sm_secs, l2_secs, least_bytes / gpu.dram_bytes_per_s) + gpu.launch_secs
