"""Owns which tiles of a convolution of images with few channels on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from kerneldecl.analysis.contraction import Contraction, contraction_of, stored
from kerneldecl.model import Arch, Block, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first
from kerneldecl.policies.gpu.tensor_core_model import SUSTAINED_CLOCK, TENSOR_CORE_OVERLAP
from kerneldecl.policies.gpu.time_model import p_norm
from kerneldecl.policies.hopper.time_model import BUFFER_BYTES, RESERVED_BYTES, WARPGROUP, WGMMA_ROWS, launch_secs
from kerneldecl.policies.wgmma_conv2d import ALIGNED_ITEMS, MAX_BOX, is_copy, is_whole

TEMPLATES = ("wgmma_window",)
HAS_TRACES = False

WIDTHS, SLABS, STAGES = (16, 32, 64), (1, 2, 4), (2, 3, 4)
MAX_FILTERS = 128
MAX_BLOCKS = 8
ITEM_BYTES = 2
STEP = 16
LEAST_HELD = 4
"""Steps whose fragments a thread has room for, in four registers each; with less, products wait for each other."""
OTHER_REGISTERS = 48
SAME_TILE = 4
LANES_CYCLES = 5.4
"""In which shared memory serves a load of all lanes of a warpgroup: some meet others at their banks."""
SHARED_SHARE = 0.85
"""Of what shared memory could move: 24 tilings of a 7 x 7 convolution of 3 channels on an H200, which ncu found bound by it."""
EDGE_CYCLES = 1700.0
"""Of a slab that no other instruction of its block hides: the first loads, the last products, results on their way."""
TILE_CYCLES = 60.0
"""Of a tile beside its slabs: a barrier, and the next copy."""
START_SECS = 2.5e-6
"""Until the weights are there."""


class Side(NamedTuple):
    """How results walk over one side of an image."""

    results: int
    stride: int
    taps: int
    dilation: int


class Windows(NamedTuple):
    """How results look at images."""

    images: int
    rows: Side
    columns: Side
    channels: int
    width: int
    """Pixels of a row of the image."""

    @property
    def line_pairs(self) -> int:
        """Return the pairs that a row of a window takes; which may begin amid one."""
        return (self.columns.taps * self.channels + 2) // 2

    @property
    def steps(self) -> int:
        return -(-self.rows.taps * self.line_pairs * 2 // STEP)


class Tiling(NamedTuple):
    """The template's parameters."""

    tile_w: int
    mma_tiles: int
    block_n: int
    stages: int
    blocks: int

    @property
    def tile_h(self) -> int:
        return self.mma_tiles * WGMMA_ROWS // self.tile_w

    def candidate(self) -> Candidate:
        return Candidate.of("wgmma_window", self._asdict())


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what is no convolution that is taken."""
    return tuple(itertools.islice(proposals(space, arch), top_k))


def proposals(space: IterSpace, arch: Arch) -> Iterator[Proposal]:
    """Yield what `propose` returns."""
    gemm = contraction_of(space)
    if isinstance(gemm, str) or why_not(space, arch):
        return iter(())
    windows = windows_of(space, gemm)
    assert windows is not None, "why_not has asked for it"
    return best_first(estimates(windows, gemm, space.blocks[-1].writes[0].dtype, arch.the_gpu), SAME_TILE)


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why wgmma does not take a computation as windows out of shared memory, as a sentence; empty where it does."""
    gemm, gpu = contraction_of(space), arch.the_gpu
    if isinstance(gemm, str):
        return gemm
    dtype, other = gemm.a.dtype, gemm.b.dtype
    windows = windows_of(space, gemm)
    if windows is None:
        return "it is no convolution of images whose channels lie side by side"
    reasons = (
        (not gpu.wgmma_arch, "its GPU has no wgmma"),
        (not gemm.is_plain, "its reduction does something else than adding products"),
        (dtype != other, f"its operands differ in dtype: {dtype} and {other}"),
        (dtype_bytes(dtype) != ITEM_BYTES or gemm.accum_dtype != "float32", "pairs of 16 bits are loaded, and summed in float32"),
        (not gpu.tensor_rate(dtype), f"the GPU's tensor cores do not take {dtype}"),
        (windows.columns.dilation > 1, "its windows have gaps along rows"),
        (windows.width * windows.channels % ALIGNED_ITEMS != 0, "rows of its image are no multiples of 16 bytes"),
        (gemm.b.is_k_last or gemm.b.vector() != ALIGNED_ITEMS, "its filters do not lie side by side in multiples of 8"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def windows_of(space: IterSpace, gemm: Contraction) -> Windows | None:
    """Return how a convolution looks at its images, None for what is none with dimensions image, row, column, channel."""
    before = list(itertools.takewhile(lambda block: not block.is_reduction, space.blocks))
    block = space.blocks[len(before)]
    image = block.reads[gemm.a.position]
    source = stored(space, image)
    if gemm.batch or len(image.index) != 4 or not all(map(is_copy, before)) or not is_whole(source, image):
        return None
    sides = [_side(block, tuple(index or ()), gemm) for index in image.index[:3]]
    channels = [axis for axis, step in image.index[3] or () if block.axes[axis].extent > 1 and (axis not in gemm.k or step == 1)]
    known = [side for side in sides if side is not None]
    if len(known) < len(sides) or known[0][1:3] != (1, 1) or len(channels) > 1 or any(axis not in gemm.k for axis in channels):
        return None
    images, rows, columns = known
    width = source.shape[2]
    return Windows(images.results, rows, columns, math.prod(block.axes[axis].extent for axis in channels), width)


def _side(block: Block, index: tuple[tuple[int, int], ...], gemm: Contraction) -> Side | None:
    """Return how results walk over a dimension of the image, None where several axes do."""
    terms = [(axis, step) for axis, step in index if block.axes[axis].extent > 1]
    spatial = [term for term in terms if term[0] in gemm.m]
    reduced = [term for term in terms if term[0] in gemm.k]
    if len(spatial) > 1 or len(reduced) > 1 or len(spatial) + len(reduced) < len(terms):
        return None
    (walk, stride), (tap, dilation) = (next(iter(found), (-1, 1)) for found in (spatial, reduced))
    results, taps = (block.axes[axis].extent if axis >= 0 else 1 for axis in (walk, tap))
    return Side(results, stride, taps, dilation)


def estimates(windows: Windows, gemm: Contraction, out_dtype: str, gpu: Gpu) -> Iterator[Estimate]:
    """Yield every tiling that fits, with its predicted time."""
    filters = gemm.extents[2]
    for tile_w, mma_tiles, block_n in itertools.product(WIDTHS, SLABS, _columns(filters)):
        bare = Tiling(tile_w, mma_tiles, block_n, min(STAGES), 1)
        if mma_tiles * WGMMA_ROWS % tile_w or max(_box(windows, bare)) > MAX_BOX or bare.tile_h >= 2 * windows.rows.results:
            continue
        registers = block_n // 2 + 4 * min(windows.steps, LEAST_HELD) + OTHER_REGISTERS
        for stages in STAGES:
            used = smem_bytes(windows, bare._replace(stages=stages), out_dtype)
            room = gpu.smem_per_sm_bytes // (used + gpu.smem_reserved_per_block_bytes)
            most = min(MAX_BLOCKS, room, gpu.registers_per_sm // (registers * WARPGROUP))
            for blocks in range(max(1, most - 2), most + 1):
                if used <= gpu.smem_per_block_optin_bytes:
                    tiling = bare._replace(stages=stages, blocks=blocks)
                    yield Estimate(tiling, _secs(windows, gemm, tiling, out_dtype, gpu), (tile_w, mma_tiles, block_n))


def _columns(filters: int) -> list[int]:
    least = min(MAX_FILTERS, -(-filters // 8) * 8)
    return sorted({least, *(width for width in (64, 128) if width <= least)})


def _box(windows: Windows, tiling: Tiling) -> tuple[int, int]:
    """Return the rows of an image and the elements of each that a tile looks at, at most."""
    rows, columns = windows.rows, windows.columns
    lines = (tiling.tile_h - 1) * rows.stride + (rows.taps - 1) * rows.dilation + 1
    pitch = ALIGNED_ITEMS + (tiling.tile_w - 1) * columns.stride * windows.channels + 2 * windows.line_pairs
    return lines, -(-pitch // ALIGNED_ITEMS) * ALIGNED_ITEMS


def smem_bytes(windows: Windows, tiling: Tiling, out_dtype: str) -> int:
    """Return the least shared memory of a block: weights, stages, results on their way out."""
    weights = -(-tiling.block_n // WGMMA_ROWS) * windows.steps * STEP * WGMMA_ROWS * ITEM_BYTES
    stage = math.prod(_box(windows, tiling)) * ITEM_BYTES + WARPGROUP
    results = BUFFER_BYTES if dtype_bytes(out_dtype) == ITEM_BYTES else 0
    return weights + tiling.stages * stage + results + RESERVED_BYTES


def _secs(windows: Windows, gemm: Contraction, tiling: Tiling, out_dtype: str, gpu: Gpu) -> float:
    """Return the time: SMs multiply, and move fragments, weights and results; DRAM goes on beside.

    Few blocks on an SM do not hide each other's waits.
    """
    columns = -(-gemm.extents[2] // tiling.block_n)
    tiles = windows.images * -(-windows.rows.results // tiling.tile_h) * -(-windows.columns.results // tiling.tile_w)
    multiplied = 2 * WGMMA_ROWS * tiling.block_n * windows.steps * STEP
    multiply = multiplied * gpu.sm_count * gpu.clock_hz / gpu.tensor_rate(gemm.a.dtype)
    load = 4 * LANES_CYCLES * windows.steps
    weights = windows.steps * STEP * tiling.block_n * ITEM_BYTES / gpu.smem_bytes_per_clock_per_sm
    store = WGMMA_ROWS * tiling.block_n * dtype_bytes(out_dtype) * 2 / gpu.smem_bytes_per_clock_per_sm
    shared = (load + weights + store) / SHARED_SHARE
    alone = multiply + shared + EDGE_CYCLES
    cycles = tiling.mma_tiles * max(p_norm(multiply, shared, exponent=TENSOR_CORE_OVERLAP), alone / tiling.blocks) + TILE_CYCLES
    rounds = -(-tiles // max(1, tiling.blocks * gpu.sm_count // columns))
    sm_secs = rounds * tiling.blocks * cycles / (gpu.clock_hz * SUSTAINED_CLOCK)
    results = gemm.extents[1] * gemm.extents[2] * dtype_bytes(out_dtype)
    dram_secs = (gemm.a.size_bytes + gemm.b.size_bytes + results) / gpu.dram_bytes_per_s
    return p_norm(sm_secs, dram_secs, exponent=TENSOR_CORE_OVERLAP) + START_SECS + launch_secs(gpu, is_early=True)
