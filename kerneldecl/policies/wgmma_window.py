"""Owns which tiles of a convolution of images with few channels on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.analysis.hopper_limits import (
    EPILOGUE_BUFFER_BYTES,
    MAX_TMA_BOX,
    MMA_TILE_ROWS,
    RESERVED_SMEM_BYTES,
    SMEM_BOX_ALIGN_BYTES,
    WARPGROUP_THREADS,
)
from kerneldecl.analysis.params import WindowParams
from kerneldecl.analysis.tensor_cores import K_BYTES
from kerneldecl.model import Arch, Block, IterSpace, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import Estimate
from kerneldecl.policies.gpu.tensor_core_model import SUSTAINED_CLOCK, TENSOR_CORE_OVERLAP
from kerneldecl.policies.gpu.time_model import p_norm
from kerneldecl.policies.hopper.convolution import ALIGNED_ITEMS, ITEM_BYTES, ConvPolicy, ConvProblem, ImageReduction
from kerneldecl.policies.hopper.operands import first_reason
from kerneldecl.policies.hopper.time_model import launch_secs

TEMPLATES = ("wgmma_window",)
KINDS = ("cuda",)
HAS_TRACES = False

TILE_W_CHOICES = (16, 32, 64)
MMA_TILES_CHOICES = (1, 2, 4)
STAGE_CHOICES = (2, 3, 4)
FIXED_BLOCK_N = (64, 128)
"""Widths of tiles to try besides the one that covers all filters; no tile is wider than the last of these."""
FILTERS_UNIT = 8
"""Filters of which `block_n` is a multiple."""
MAX_BLOCKS = 8
"""CTAs on an SM at most."""
BLOCKS_TRIED = 3
"""Numbers of CTAs on an SM to try, the most that fit and the next lower ones."""
ACCUM_DTYPE = "float32"
WGMMA_K = K_BYTES // ITEM_BYTES
"""Elements of k that one wgmma multiplies."""
FRAGMENT_REGISTERS = 4
"""Registers of a thread for a fragment of A, of `WGMMA_K` elements of k."""
HELD_FRAGMENTS = 4
"""Fragments of A that a thread should have registers for; with fewer, one wgmma waits for another."""
OTHER_REGISTERS = 48
"""Registers of a thread besides fragments and accumulators, as in the template."""

# Fitted to 24 tilings of a 7 x 7 convolution of 3 channels (H200, 2026-11), which ncu found bound by shared memory.

FRAGMENT_LOAD_CYCLES = 5.4
"""Cycles in which shared memory serves one load of all threads of a warpgroup, with bank conflicts."""
SMEM_RATE_FRACTION = 0.85
"""Part of shared memory's peak rate that is reached."""
MMA_TILE_EDGE_CYCLES = 1700.0
"""Cycles of a 64-row MMA tile that no other instruction of its CTA hides: the first loads, the last wgmma, its epilogue."""
TILE_CYCLES = 60.0
"""Cycles of a tile besides its MMA tiles: a barrier, and the next TMA load."""
WEIGHTS_SECS = 2.5e-6
"""Seconds until the weights are in shared memory."""


class Dimension(NamedTuple):
    """How receptive fields cover one dimension of an image."""

    outputs: int
    stride: int
    taps: int
    dilation: int


class Convolution(NamedTuple):
    """The sizes of a convolution."""

    images: int
    rows: Dimension
    columns: Dimension
    channels: int
    width: int
    """Pixels of a row of the image."""

    @property
    def line_pairs(self) -> int:
        """Return the pairs of elements that cover a row of a receptive field, which may begin in the middle of one."""
        return (self.columns.taps * self.channels + 2) // 2

    @property
    def wgmmas(self) -> int:
        """Return the wgmmas, one after the other, that multiply a receptive field."""
        return -(-self.rows.taps * self.line_pairs * 2 // WGMMA_K)


Problem = ConvProblem[Convolution]


def _why_not_tiled(problem: Problem, _space: IterSpace, _arch: Arch) -> str:
    conv, gemm = problem.conv, problem.gemm
    is_16_bit = dtype_bytes(gemm.a.dtype) == ITEM_BYTES
    are_filters_aligned = not gemm.b.is_k_last and gemm.b.vector() == ALIGNED_ITEMS
    reasons = (
        (not is_16_bit or gemm.accum_dtype != ACCUM_DTYPE, f"its operands do not have 16 bits, or its accumulators are not {ACCUM_DTYPE}"),
        (conv.columns.dilation > 1, "its filters are dilated along rows"),
        (conv.width * conv.channels % ALIGNED_ITEMS != 0, "rows of its images are not multiples of 16 bytes"),
        (not are_filters_aligned, f"its weights do not have multiples of {ALIGNED_ITEMS} filters contiguous"),
    )
    return first_reason(gemm, problem.gpu, reasons)


def convolution_of(reduction: ImageReduction, gemm: Contraction) -> Convolution | None:
    """Return the sizes of a convolution over images; None for other computations."""
    block, image, source = reduction
    dims = [_dimension(block, tuple(index or ()), gemm) for index in image.index[:3]]
    channels = [
        axis for axis, coefficient in image.index[3] or () if block.axes[axis].extent > 1 and (axis not in gemm.k or coefficient == 1)
    ]
    read = [dim for dim in dims if dim is not None]
    if len(read) < len(dims) or len(channels) > 1 or any(axis not in gemm.k for axis in channels):
        return None
    images, rows, columns = read
    if (images.stride, images.taps) != (1, 1):
        return None
    return Convolution(
        images=images.outputs,
        rows=rows,
        columns=columns,
        channels=math.prod(block.axes[axis].extent for axis in channels),
        width=source.shape[2],
    )


def _dimension(block: Block, index: tuple[tuple[int, int], ...], gemm: Contraction) -> Dimension | None:
    """Return how receptive fields cover a dimension with this index, None where several outputs' or filters' axes do."""
    terms = [(axis, coefficient) for axis, coefficient in index if block.axes[axis].extent > 1]
    spatial = [term for term in terms if term[0] in gemm.m]
    reduced = [term for term in terms if term[0] in gemm.k]
    if len(spatial) > 1 or len(reduced) > 1 or len(spatial) + len(reduced) < len(terms):
        return None
    (output, stride), (tap, dilation) = (next(iter(found), (-1, 1)) for found in (spatial, reduced))
    outputs, taps = (block.axes[axis].extent if axis >= 0 else 1 for axis in (output, tap))
    return Dimension(outputs, stride, taps, dilation)


def estimates(problem: Problem) -> Iterator[Estimate]:
    """Yield every tiling that fits, with its predicted time."""
    for tile_w, mma_tiles, block_n in itertools.product(TILE_W_CHOICES, MMA_TILES_CHOICES, _block_n_choices(problem.filters)):
        if mma_tiles * MMA_TILE_ROWS % tile_w:
            continue
        tile = WindowParams(tile_w=tile_w, mma_tiles=mma_tiles, block_n=block_n, stages=min(STAGE_CHOICES), blocks=1)
        is_too_tall = tile.tile_h >= 2 * problem.conv.rows.outputs
        if max(_box(problem.conv, tile)) > MAX_TMA_BOX or is_too_tall:
            continue
        for stages, blocks in _pipelines(problem, tile):
            tiling = tile._replace(stages=stages, blocks=blocks)
            yield Estimate(tiling, _secs(problem, tiling), (tile_w, mma_tiles, block_n))


def _pipelines(problem: Problem, tile: WindowParams) -> Iterator[tuple[int, int]]:
    """Yield numbers of stages, and of CTAs on an SM, whose shared memory and registers fit."""
    gpu = problem.gpu
    registers = tile.block_n // 2 + FRAGMENT_REGISTERS * min(problem.conv.wgmmas, HELD_FRAGMENTS) + OTHER_REGISTERS
    for stages in STAGE_CHOICES:
        used = smem_bytes(problem, tile._replace(stages=stages))
        if used > gpu.smem_per_block_optin_bytes:
            continue
        by_smem = gpu.smem_per_sm_bytes // (used + gpu.smem_reserved_per_block_bytes)
        most = min(MAX_BLOCKS, by_smem, gpu.registers_per_sm // (registers * WARPGROUP_THREADS))
        yield from ((stages, blocks) for blocks in range(max(1, most - BLOCKS_TRIED + 1), most + 1))


def _block_n_choices(filters: int) -> list[int]:
    covering = min(max(FIXED_BLOCK_N), -(-filters // FILTERS_UNIT) * FILTERS_UNIT)
    return sorted({covering, *(width for width in FIXED_BLOCK_N if width <= covering)})


def _box(conv: Convolution, tiling: WindowParams) -> tuple[int, int]:
    """Return the rows of an image, and the elements of each, that a tile's receptive field covers at most."""
    rows, columns = conv.rows, conv.columns
    lines = (tiling.tile_h - 1) * rows.stride + (rows.taps - 1) * rows.dilation + 1
    elements = ALIGNED_ITEMS + (tiling.tile_w - 1) * columns.stride * conv.channels + 2 * conv.line_pairs
    return lines, -(-elements // ALIGNED_ITEMS) * ALIGNED_ITEMS


def smem_bytes(problem: Problem, tiling: WindowParams) -> int:
    """Return the least shared memory of a CTA: weights, stages, an epilogue buffer."""
    weights = -(-tiling.block_n // MMA_TILE_ROWS) * problem.conv.wgmmas * WGMMA_K * MMA_TILE_ROWS * ITEM_BYTES
    # The box is aligned in its stage.
    stage = math.prod(_box(problem.conv, tiling)) * ITEM_BYTES + SMEM_BOX_ALIGN_BYTES
    epilogue = EPILOGUE_BUFFER_BYTES if dtype_bytes(problem.out_dtype) == ITEM_BYTES else 0
    return weights + tiling.stages * stage + epilogue + RESERVED_SMEM_BYTES


def _secs(problem: Problem, tiling: WindowParams) -> float:
    """Return the time: each SM multiplies, and moves fragments, weights and results; DRAM overlaps with that."""
    conv, gpu = problem.conv, problem.gpu
    filter_tiles = -(-problem.filters // tiling.block_n)
    tiles = conv.images * -(-conv.rows.outputs // tiling.tile_h) * -(-conv.columns.outputs // tiling.tile_w)
    cycles = tiling.mma_tiles * _mma_tile_cycles(problem, tiling) + TILE_CYCLES
    waves = -(-tiles // max(1, tiling.blocks * gpu.sm_count // filter_tiles))
    sm_secs = waves * tiling.blocks * cycles / (gpu.clock_hz * SUSTAINED_CLOCK)
    gemm = problem.gemm
    results = gemm.extents[1] * gemm.extents[2] * dtype_bytes(problem.out_dtype)
    dram_secs = (gemm.a.size_bytes + gemm.b.size_bytes + results) / gpu.dram_bytes_per_s
    return p_norm(sm_secs, dram_secs, exponent=TENSOR_CORE_OVERLAP) + WEIGHTS_SECS + launch_secs(gpu, has_pdl=True)


def _mma_tile_cycles(problem: Problem, tiling: WindowParams) -> float:
    """Return the cycles of a 64-row MMA tile. Few CTAs on an SM do not hide each other's waits."""
    wgmmas, gpu = problem.conv.wgmmas, problem.gpu
    flops = 2 * MMA_TILE_ROWS * tiling.block_n * wgmmas * WGMMA_K
    multiply = flops * gpu.sm_count * gpu.clock_hz / gpu.tensor_rate(problem.gemm.a.dtype)
    load = FRAGMENT_REGISTERS * FRAGMENT_LOAD_CYCLES * wgmmas
    weights = wgmmas * WGMMA_K * tiling.block_n * ITEM_BYTES / gpu.smem_bytes_per_clock_per_sm
    store = MMA_TILE_ROWS * tiling.block_n * dtype_bytes(problem.out_dtype) * 2 / gpu.smem_bytes_per_clock_per_sm
    smem = (load + weights + store) / SMEM_RATE_FRACTION
    alone = multiply + smem + MMA_TILE_EDGE_CYCLES
    return max(p_norm(multiply, smem, exponent=TENSOR_CORE_OVERLAP), alone / tiling.blocks)


POLICY = ConvPolicy(convolution_of, _why_not_tiled, estimates)
propose, proposals, why_not = POLICY.propose, POLICY.proposals, POLICY.why_not
