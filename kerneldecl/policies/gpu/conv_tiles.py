"""Owns the sliding windows of convolutions, and which tiles of an image tensor cores should convolve at once out of shared memory.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.params import CONV_TC_MAX_K_TILES, PERMUTED_ROWS, ConvTcParams
from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.model import Access, Block, Gpu, IterSpace, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import Estimate, epilogue_smem_bytes, out_bytes
from kerneldecl.policies.gpu.tensor_core_model import SUSTAINED_CLOCK, TENSOR_CORE_OVERLAP, multiplies_per_cycle, residual_cycles
from kerneldecl.policies.gpu.time_model import SM_BYTES_PER_CLOCK, occupancy, p_norm

ROWS = (1, 2, 4, 8, 16)
CHANNELS = (16, 32, 64, 128)
WARPS = ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (8, 1), (4, 2), (1, 7), (2, 7), (1, 3), (1, 5), (1, 6))
"""Warps of a block along rows and along columns of the image."""
LANE_ELEMENTS = 8
"""Elements of a fragment of 16 x 16 that a lane holds."""
MULTIPLY_SLOWDOWN, MULTIPLY_SLOWDOWN_ALONE = 2.35, 0.77
"""How much longer multiplying takes than tensor cores need, since each mma.sync waits for its elements; and in addition, where no other
block is on the SM. With FRAGMENT_LOAD_SHARE, fitted to 27 tilings of a 7 x 7 convolution of 3 channels on an H200, within 7 %."""
FRAGMENT_LOAD_SHARE = 0.43
"""Fraction of the time of loads from shared memory that does not overlap with multiplying."""
BOUNDED_RESULT_CYCLES = 100.0
"""Cycles in which a thread stores a result of a tile that reaches beyond the image: each is a branch that loads do not cross. As the next
ones, fitted to 60 tilings of 3 x 3 convolutions of 3 channels, which took 12 to 400 (H200, 2026-11)."""
BOUNDED_ROW_FACTOR, SINGLE_ROW_FACTOR, WHOLE_ROW_FACTOR, UNEVEN_WARPS_FACTOR = 1.6, 0.5, 0.2, 3.0
"""Ratio of these cycles where rows reach beyond the image, too; where a tile is one row; where it has whole rows; and where the warps are
no power of 2, so that indices are divided by them."""
TURN_CYCLES, BLOCK_CYCLES = 600.0, 150.0
"""Cycles in which an SM's blocks wait for their pixels and weights before they multiply, and those that each block takes of an SM. Fitted,
as the next one, to 240 tilings of 15 convolutions of 3 channels (H200, 2026-11)."""
PIXEL_COPY_CYCLES, WEIGHT_COPY_CYCLES = 0.1, 0.04
"""Cycles of an SM to copy an element of the image, each by itself, and a vector of weights."""
MAX_FRAGMENTS = 16
"""Accumulator fragments of a warp at most: 128 registers per thread."""
OTHER_REGISTERS = 40
"""Registers of a thread besides accumulators and fragments: addresses and counters."""
MAX_COLUMN_FRAGMENTS = 8
"""Fragments of 16 output pixels side by side in a block's tile at most."""


@dataclass(frozen=True)
class SlidingWindow:
    """How a convolution's output pixels map to its image: strides, and how far a receptive field extends beyond its first pixel."""

    images: int
    rows: int
    """Rows of the output."""
    columns: int
    row_stride: int
    column_stride: int
    row_halo: int
    """Rows of the image in a receptive field, beyond the first one."""
    column_halo: int
    channels: int
    """Input channels."""
    filter_rows: int
    """Extent of the first reduced axis."""

    def pixels(self, rows: int, columns: int) -> int:
        """Return the pixels that so many rows and columns of the output read; the padded end of the reduction may read one row more."""
        return ((rows - 1) * self.row_stride + self.row_halo + 2) * ((columns - 1) * self.column_stride + self.column_halo + 1)

    def tiles(self, rows: int, columns: int) -> int:
        """Return how many tiles of so many rows and columns all images' outputs have."""
        return self.images * -(-self.rows // rows) * -(-self.columns // columns)


def sliding_window_of(space: IterSpace, gemm: Contraction) -> SlidingWindow | None:
    """Return how a convolution maps to its image, None for GEMMs in which no image with overlapping windows is an operand."""
    if gemm.batch or len(gemm.m) != 3 or len(gemm.n) != 1 or len(gemm.k) < 2:
        return None
    block = next(block for block in space.blocks if block.is_reduction)
    image = block.reads[gemm.a.position]
    found = [_stride_and_halo(block, image, axis, gemm.k) for axis in gemm.m]
    if None in found:
        return None
    (_, image_halo), (row_stride, row_halo), (column_stride, column_halo) = (pair or (0, 0) for pair in found)
    if image_halo or not row_halo + column_halo:
        return None
    images, rows, columns = (block.axes[axis].extent for axis in gemm.m)
    return SlidingWindow(
        images=images,
        rows=rows,
        columns=columns,
        row_stride=row_stride,
        column_stride=column_stride,
        row_halo=row_halo,
        column_halo=column_halo,
        channels=image.shape[-1],
        filter_rows=block.axes[gemm.k[0]].extent,
    )


def _stride_and_halo(block: Block, image: Access, axis: int, reduced: tuple[int, ...]) -> tuple[int, int] | None:
    """Return an output axis's stride in the image and the extent of the reduction in its dimension.

    None where the axis shares its dimension with another output axis, or is in none.
    """
    if block.axes[axis].extent == 1:  # such as one image: no index has it
        return 0, 0
    for index in image.index:
        strides = dict(index or ())
        if axis in strides:
            others = strides.keys() - {axis}
            halo = sum((block.axes[other].extent - 1) * strides[other] for other in others)
            return (strides[axis], halo) if others <= set(reduced) else None
    return None


def estimates(window: SlidingWindow, gemm: Contraction, gpu: Gpu, *, loads_residual: bool = False) -> Iterator[Estimate]:
    """Yield the tilings that fit a GPU's shared memory, with their times."""
    for tiling in tilings(window, gemm):
        if smem_bytes(window, gemm, tiling) <= gpu.smem_per_block_optin_bytes:
            secs = _secs(window, gemm, tiling, gpu, loads_residual=loads_residual)
            yield Estimate(tiling, secs, (tiling.rows, tiling.columns, tiling.block_n))


def tilings(window: SlidingWindow, gemm: Contraction) -> Iterator[ConvTcParams]:
    """Yield the search space: tiles that hardly reach beyond the image, cut into warps whose accumulators fit registers."""
    _, _, n, k = gemm.extents
    if -(-k // FRAGMENT) > CONV_TC_MAX_K_TILES:
        return
    whole = -(-window.columns // FRAGMENT)
    columns = [FRAGMENT * count for count in range(1, MAX_COLUMN_FRAGMENTS + 1) if whole % count == 0]
    blocks_n = [size for size in CHANNELS if size < 2 * n] or [FRAGMENT]
    tiles = itertools.product(ROWS, columns, blocks_n[-2:], WARPS, (1, 2, 4), (0, 1))
    for rows, column, block_n, (warps_rows, warps_columns), warps_n, smem_epilogue in tiles:
        if rows % warps_rows or column % (FRAGMENT * warps_columns) or block_n % (FRAGMENT * warps_n) or rows >= 2 * window.rows:
            continue
        tiling = ConvTcParams(
            rows=rows,
            columns=column,
            block_n=block_n,
            warps_rows=warps_rows,
            warps_columns=warps_columns,
            warps_n=warps_n,
            smem_epilogue=smem_epilogue,
        )
        if 2 <= tiling.warps <= 16 and math.prod(_warp_fragments(tiling)) <= MAX_FRAGMENTS:
            yield tiling


def _warp_fragments(tiling: ConvTcParams) -> tuple[int, int]:
    """Return the accumulator fragments of a warp along pixels and along channels."""
    pixels = tiling.rows // tiling.warps_rows * (tiling.columns // tiling.warps_columns // FRAGMENT)
    return pixels, tiling.block_n // tiling.warps_n // FRAGMENT


def smem_bytes(window: SlidingWindow, gemm: Contraction, tiling: ConvTcParams) -> int:
    """Return the shared memory of a block: its part of the image and the weights, or in their place the results of its epilogue."""
    item_bytes = dtype_bytes(gemm.a.dtype)
    k = -(-gemm.extents[3] // FRAGMENT) * FRAGMENT
    weights = k * (tiling.block_n if tiling.block_n in PERMUTED_ROWS else tiling.block_n + 40) * item_bytes
    image = window.pixels(tiling.rows, tiling.columns) * window.channels * item_bytes
    return max(weights + image, tiling.smem_epilogue * epilogue_smem_bytes(gemm, tiling.rows * tiling.columns, tiling.block_n))


def _secs(window: SlidingWindow, gemm: Contraction, tiling: ConvTcParams, gpu: Gpu, *, loads_residual: bool) -> float:
    _, m, n, k = gemm.extents
    item_bytes = dtype_bytes(gemm.a.dtype)
    k_tiles = -(-k // FRAGMENT)
    blocks = window.tiles(tiling.rows, tiling.columns) * -(-n // tiling.block_n)
    pixels, channels = _warp_fragments(tiling)
    image = window.pixels(tiling.rows, tiling.columns) * window.channels
    copied_bytes = (image + k_tiles * FRAGMENT * tiling.block_n) * item_bytes
    results = tiling.rows * tiling.columns * tiling.block_n
    # A lane loads each of its elements of a fragment of pixels by itself.
    weights_cycles = channels * FRAGMENT * FRAGMENT * item_bytes / gpu.smem_bytes_per_clock_per_sm
    loads = tiling.warps * k_tiles * (pixels * LANE_ELEMENTS + weights_cycles)
    multiply = results * k_tiles * FRAGMENT / multiplies_per_cycle(gpu, gemm.a.dtype, gemm.accum_dtype)
    registers = pixels * channels * 8 + 4 * (pixels + channels) + OTHER_REGISTERS
    resident = occupancy(gpu, tiling.warps * gpu.warp_size, registers, smem_bytes(window, gemm, tiling))
    if not resident:
        return math.inf
    stored_bytes = results * out_bytes(gemm) * (1 if tiling.smem_epilogue else 2)
    # Without an epilogue through shared memory, lanes store half of what L2 takes at once.
    stores = (1 - tiling.smem_epilogue) * results * out_bytes(gemm) / SM_BYTES_PER_CLOCK
    cycles = multiply * (MULTIPLY_SLOWDOWN + MULTIPLY_SLOWDOWN_ALONE / resident) + FRAGMENT_LOAD_SHARE * loads + stores
    sm_blocks = -(-blocks // gpu.sm_count)
    cycles += BLOCK_CYCLES + PIXEL_COPY_CYCLES * image + WEIGHT_COPY_CYCLES * k_tiles * FRAGMENT * tiling.block_n / gemm.b.vector()
    turn_cycles = TURN_CYCLES + _bounded_store_cycles(window, n, tiling)
    if loads_residual:
        turn_cycles += residual_cycles(results / (tiling.warps * WARP_LANES), is_through_smem=bool(tiling.smem_epilogue))
    cycles = sm_blocks * cycles + -(-sm_blocks // resident) * turn_cycles
    sm_secs = cycles / (gpu.clock_hz * SUSTAINED_CLOCK)
    min_bytes = gemm.a.size_bytes + gemm.b.size_bytes + m * n * out_bytes(gemm)
    l2_secs = blocks * (copied_bytes + stored_bytes) / gpu.l2_bytes_per_s
    return p_norm(sm_secs, l2_secs, min_bytes / gpu.dram_bytes_per_s, exponent=TENSOR_CORE_OVERLAP) + gpu.launch_secs


def _bounded_store_cycles(window: SlidingWindow, filters: int, tiling: ConvTcParams) -> float:
    """Return the cycles in which a thread stores its results of a tile, one after the other; 0 where no tile reaches beyond the image."""
    is_row_bounded = window.rows % tiling.rows > 0
    if not is_row_bounded and window.columns % tiling.columns == 0 and filters % tiling.block_n == 0:
        return 0.0
    if is_row_bounded:
        factor = BOUNDED_ROW_FACTOR
    elif tiling.columns >= window.columns:
        factor = WHOLE_ROW_FACTOR
    else:
        factor = SINGLE_ROW_FACTOR if tiling.rows == 1 else 1.0
    factor *= UNEVEN_WARPS_FACTOR if tiling.warps.bit_count() > 1 else 1.0
    return factor * BOUNDED_RESULT_CYCLES * tiling.rows * tiling.columns * tiling.block_n / (tiling.warps * WARP_LANES)
