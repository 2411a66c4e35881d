"""Owns convolutions in groups of channels as policies see them: sizes read from an iteration space, and the parameters of their kernel.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.images import IMAGE_RANK, with_row
from kerneldecl.analysis.tensor_cores import accumulators, first_capability
from kerneldecl.model import Access, Block, Gpu, IterSpace, dtype_bytes

ITEM_BYTES = 2
"""Bytes of an element of the image: mma.sync takes pairs of them."""
N_TILE = 8
"""Output channels that one mma.sync m16n8k16 multiplies."""
K_STEP = 8
"""Terms of the reduction in one register of each operand's fragments; mma.sync takes two such steps."""
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""
MAX_TERMS = 1152
"""Terms of one result's reduction at most: the kernel's loop over them is unrolled."""
SIMT_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes that CUDA cores convolve, in float32."""


class Side(NamedTuple):
    """One side of an image under a sliding window."""

    image: int
    results: int
    taps: int
    stride: int
    dilation: int

    def span(self, results: int) -> int:
        """Return the pixels under the windows of so many neighbouring results."""
        return (results - 1) * self.stride + (self.taps - 1) * self.dilation + 1


class GroupedConvSizes(NamedTuple):
    """Sizes of a convolution in groups."""

    images: int
    rows: Side
    columns: Side
    groups: int
    channels: int
    """Input channels of a group."""
    filters: int
    """Output channels of a group."""
    dtype: str
    accum_dtype: str
    out_dtype: str

    @property
    def item_bytes(self) -> int:
        return dtype_bytes(self.dtype)

    @property
    def is_depthwise(self) -> bool:
        """Say whether each channel is a group of its own, with one filter."""
        return self.channels == self.filters == 1

    @property
    def terms(self) -> int:
        """Return the products that one result is the sum of."""
        return self.rows.taps * self.columns.taps * self.channels

    @property
    def steps(self) -> int:
        return -(-self.terms // K_STEP)

    @property
    def image_elements(self) -> int:
        return self.images * self.rows.image * self.columns.image * self.groups * self.channels

    @property
    def out_elements(self) -> int:
        return self.images * self.rows.results * self.columns.results * self.groups * self.filters


def why_not(sizes: GroupedConvSizes, gpu: Gpu) -> str:
    """Return why the kernel does not compute such a convolution, as a sentence; empty where it does."""
    reasons = (
        (sizes.accum_dtype != "float32" or "float32" not in accumulators("mma.sync", sizes.dtype), "mma.sync does not take its dtypes"),
        (dtype_bytes(sizes.dtype) != ITEM_BYTES, "its elements do not have 16 bits"),
        (gpu.compute_capability < first_capability("mma.sync") or not gpu.async_copy, "the GPU has no mma.sync m16n8k16 or no cp.async"),
        (sizes.channels % 2 or sizes.filters % 2, f"a group has {sizes.channels} input and {sizes.filters} output channels: not even"),
        (sizes.groups * sizes.filters % N_TILE, f"{sizes.groups * sizes.filters} output channels are no multiple of {N_TILE}"),
        (sizes.terms > MAX_TERMS, f"a result is the sum of {sizes.terms} products: {MAX_TERMS} at most"),
        (max(sizes.image_elements, sizes.out_elements) >= MAX_OFFSET, f"it has {MAX_OFFSET} elements or more"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def why_not_simt(sizes: GroupedConvSizes, gpu: Gpu) -> str:  # noqa: ARG001  as of the kernel on tensor cores
    """Return why the kernel for CUDA cores does not compute such a convolution, as a sentence; empty where it does."""
    is_known = sizes.accum_dtype == "float32" and sizes.dtype in SIMT_DTYPES and sizes.out_dtype in SIMT_DTYPES
    reasons = (
        (not is_known, f"{sizes.dtype} with {sizes.accum_dtype} sums and {sizes.out_dtype} results is not computed so"),
        (max(sizes.image_elements, sizes.out_elements) >= MAX_OFFSET, f"it has {MAX_OFFSET} elements or more"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def grouped_conv_of(space: IterSpace) -> GroupedConvSizes | None:
    """Return the sizes of the convolution in groups that an iteration space is, None where it is none.

    Its one reduction reads an image [n, h, w, c] at a channel that f // filters * channels + c is, or f where each has one, and weights
    of the axes f and c.
    """
    reductions = [block for block in space.blocks if block.is_reduction]
    if len(reductions) != 1 or len(reductions[0].reads) != 2 or not reductions[0].is_multiply_accumulate:
        return None
    [block] = reductions
    out, *reads = (with_row(access) for access in (*block.writes, *block.reads))
    image = next((read for read in reads if len(read.index) == IMAGE_RANK and _is_channel(block, read, out)), None)
    weights = next((read for read in reads if read is not image and None not in read.index), None)
    if image is None or weights is None or len(out.shape) != IMAGE_RANK or len(out.index[3] or ()) != 1:
        return None
    return _sizes(space, block, (image, weights, out))


def _is_channel(block: Block, read: Access, out: Access) -> bool:
    """Say whether an operand's last index may be that of a group's channel, and the others those of a pixel."""
    pixel = {axis for index in read.index[:3] for axis, _ in index or ()}
    is_image = any(block.axes[axis].kind == "spatial" for axis in pixel)
    return is_image and (read.index[3] is None or (read.index[3] == out.index[-1] and len(read.index[3]) == 1))


def _sizes(space: IterSpace, block: Block, accesses: tuple[Access, Access, Access]) -> GroupedConvSizes | None:
    image, weights, out = accesses
    [(filter_axis, _)] = out.index[3] or ()
    sides = [_side(space, block, image, out, dim) for dim in (1, 2)]
    windows = {axis for dim in (1, 2) for axis, _ in image.index[dim] or ()}
    of_weights = [axis for index in weights.index for axis, _ in index or ()]
    others = [at for at in of_weights if block.axes[at].kind == "reduce" and at not in windows and block.axes[at].extent > 1]
    channels = math.prod(block.axes[at].extent for at in others)
    filters, whole = block.axes[filter_axis].extent, image.shape[3]
    if None in sides or whole % channels or filters % (whole // channels) or whole == channels:
        return None
    rows, columns = (side for side in sides if side is not None)
    return GroupedConvSizes(
        images=out.shape[0],
        rows=rows,
        columns=columns,
        groups=whole // channels,
        channels=channels,
        filters=filters // (whole // channels),
        dtype=image.dtype,
        accum_dtype=out.dtype,
        out_dtype=space.blocks[-1].writes[0].dtype,
    )


def _side(space: IterSpace, block: Block, image: Access, out: Access, dim: int) -> Side | None:
    """Return how the window moves along a dimension; None where its index is not one of the result's and one reduced."""
    terms = {at: step for at, step in image.index[dim] or () if block.axes[at].extent > 1}
    spatial = [step for at, step in terms.items() if block.axes[at].kind == "spatial"]
    reduced = [(block.axes[at].extent, step) for at, step in terms.items() if block.axes[at].kind == "reduce"]
    if image.index[dim] is None or len(spatial) > 1 or len(reduced) > 1 or min(terms.values(), default=1) < 1:
        return None
    taps, dilation = next(iter(reduced), (1, 1))
    stored = next((access for each in space.blocks for access in each.reads if each is not block and _is_source(each, image)), image)
    return Side(with_row(stored).shape[dim], out.shape[dim], taps, next(iter(spatial), 1), dilation)


def _is_source(block: Block, image: Access) -> bool:
    """Say whether a block writes the image that the reduction reads: it pads it."""
    return any(write.operand == image.operand for write in block.writes) and len(block.reads) == 1
