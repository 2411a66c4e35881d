"""Owns pooling as policies see it: sizes read from an iteration space, and the parameters of the kernel for channels last.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Access, Block, Gpu, IterSpace, dtype_bytes

DTYPES = frozenset({"float16", "bfloat16", "float32"})
FIRST_CAPABILITY = (8, 0)
"""First compute capability with max.NaN of float16, bfloat16 and float32, and with bfloat16x2 (PTX ISA, section max)."""
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""
MIN_ACCESS_BYTES = 4
MAX_UNROLLED = 256
"""Vectors that a thread combines at most: all of its loops are unrolled."""


class PoolSizes(NamedTuple):
    """Sizes of windows over images [images, rows, columns, channels], or [images, channels, rows, columns]."""

    images: int
    image_rows: int
    image_columns: int
    channels: int
    out_rows: int
    out_columns: int
    window_rows: int
    window_columns: int
    stride_rows: int
    stride_columns: int
    step_rows: int
    """Rows from an element of a window to the next: the dilation."""
    step_columns: int
    dtype: str
    accum: str
    """What maxima or sums are computed in."""
    out_dtype: str
    channels_first: bool

    @property
    def elements(self) -> int:
        """Return the elements of the larger of input and output."""
        return self.images * self.channels * max(self.image_rows * self.image_columns, self.out_rows * self.out_columns)

    @property
    def vector(self) -> int:
        """Return the channels of the widest access."""
        return math.gcd(self.channels, VECTOR_BYTES // dtype_bytes(self.dtype))


class PoolParams(NamedTuple):
    """The parameters of `gpu_pool`."""

    threads: int
    width: int
    """Channels of a thread, of one access."""
    column: int
    """Output pixels of a column of a thread."""
    strip: int
    """Output pixels of a row of a thread."""
    ahead: int
    """Rows of its input that a thread loads before it uses the first."""

    def rows(self, sizes: PoolSizes) -> int:
        """Return the rows of the input that a thread reads."""
        return (self.column - 1) * sizes.stride_rows + (sizes.window_rows - 1) * sizes.step_rows + 1

    def columns(self, sizes: PoolSizes) -> int:
        """Return the columns of the input that a thread reads."""
        return (self.strip - 1) * sizes.stride_columns + (sizes.window_columns - 1) * sizes.step_columns + 1

    def turns(self, sizes: PoolSizes) -> int:
        """Return how many threads have something to do."""
        bands, strips = -(-sizes.out_rows // self.column), -(-sizes.out_columns // self.strip)
        return sizes.images * bands * strips * (sizes.channels // self.width)

    def blocks(self, sizes: PoolSizes) -> int:
        return -(-self.turns(sizes) // self.threads)

    def fits(self, sizes: PoolSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        return (
            takes(sizes, gpu)
            and min(self) >= 1
            and self.threads % WARP_LANES == 0
            and self.threads <= gpu.max_threads_per_block
            and sizes.vector % self.width == 0
            and self.width * dtype_bytes(sizes.dtype) >= MIN_ACCESS_BYTES
            and self.column <= sizes.out_rows
            and self.strip <= sizes.out_columns
            and self.rows(sizes) * self.strip * sizes.window_columns <= MAX_UNROLLED
            and self.turns(sizes) + self.threads < MAX_OFFSET
        )


def takes(sizes: PoolSizes, gpu: Gpu) -> bool:
    """Say whether the kernel for channels last pools such images on a GPU."""
    has_vectors = sizes.vector * dtype_bytes(sizes.dtype) >= MIN_ACCESS_BYTES
    has_maxima = gpu.compute_capability >= FIRST_CAPABILITY
    return not sizes.channels_first and sizes.out_dtype == sizes.dtype and has_vectors and has_maxima and computes(sizes)


def computes(sizes: PoolSizes) -> bool:
    """Say whether kernels take the dtypes, and 32 bits the offsets of all elements."""
    return {sizes.dtype, sizes.out_dtype} <= DTYPES and sizes.elements < MAX_OFFSET


def pool_of(space: IterSpace) -> PoolSizes | None:
    """Return the sizes of the pooling that an iteration space may be, None where it is none.

    Its reduction's axes are images, rows, columns, channels, the latter last or second, and a window's rows and columns; its one input
    is images.
    """
    reducing = [block for block in space.blocks if block.is_reduction]
    if len(reducing) != 1 or len(space.inputs) != 1 or len(space.outputs) != 1:
        return None
    (block,) = reducing
    image = next((access for each in space.blocks for access in each.reads if access.operand == space.inputs[0]), None)
    if image is None or len(block.reads) != 1 or len(block.axes) != 6 or block.flops_per_point != 1:
        return None
    out_dtype = next(access.dtype for each in space.blocks for access in each.writes if access.operand == space.outputs[0])
    layouts = (_sizes(block, block.reads[0], image, out_dtype, channels_first=first) for first in (False, True))
    return next((sizes for sizes in layouts if sizes is not None), None)


def _sizes(block: Block, read: Access, image: Access, out_dtype: str, *, channels_first: bool) -> PoolSizes | None:
    axes, (out,) = block.axes, block.writes
    if tuple(axis.kind for axis in axes) != ("spatial",) * 4 + ("reduce",) * 2 or len(image.shape) != 4 or len(read.index) != 4:
        return None
    row, column, channel = (2, 3, 1) if channels_first else (1, 2, 3)
    down, along = _steps(read.index[row], row, 4), _steps(read.index[column], column, 5)
    if down is None or along is None:
        return None
    if not all(map(_is_axis, (read.index[0], read.index[channel], *out.index), (0, channel, *range(4)))):
        return None
    images, channels = image.shape[0], image.shape[channel]
    if (axes[0].extent, axes[channel].extent) != (images, channels):
        return None
    return PoolSizes(
        images=images,
        image_rows=image.shape[row],
        image_columns=image.shape[column],
        channels=channels,
        out_rows=axes[row].extent,
        out_columns=axes[column].extent,
        window_rows=axes[4].extent,
        window_columns=axes[5].extent,
        stride_rows=down[0],
        stride_columns=along[0],
        step_rows=down[1],
        step_columns=along[1],
        dtype=image.dtype,
        accum=out.dtype,
        out_dtype=out_dtype,
        channels_first=channels_first,
    )


def _is_axis(index: tuple[tuple[int, int], ...] | None, axis: int) -> bool:
    """Say whether an index is an axis, which is none where its extent is 1."""
    return index in {((axis, 1),), ()}


def _steps(index: tuple[tuple[int, int], ...] | None, axis: int, tap: int) -> tuple[int, int] | None:
    """Return the stride and the dilation of an index by an output axis and an axis of the window; None for other indices."""
    if index is None or {at for at, _ in index} - {axis, tap}:
        return None
    steps = dict(index)
    stride, step = steps.get(axis, 1), steps.get(tap, 1)
    return (stride, step) if min(stride, step) >= 1 else None
