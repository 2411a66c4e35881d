"""Owns convolutions in groups of channels as policies see them: sizes read from an iteration space, and the parameters of their kernel.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.tensor_cores import FRAGMENT, accumulators, first_capability
from kerneldecl.model import Access, Block, Candidate, Gpu, IterSpace, dtype_bytes

ITEM_BYTES = 2
"""Bytes of an element of the image: mma.sync takes pairs of them."""
N_TILE = 8
"""Output channels that one mma.sync m16n8k16 multiplies."""
K_STEP = 8
"""Terms of the reduction in one register of each operand's fragments; mma.sync takes two such steps."""
PIECE = VECTOR_BYTES // ITEM_BYTES
"""Elements of 16 bytes."""
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""
MAX_TERMS = 1152
"""Terms of one result's reduction at most: the kernel's loop over them is unrolled."""
HELD_WEIGHTS = 80
"""Registers of weights that a thread holds at most; beyond that, it loads them from shared memory for each pixel."""
MAX_ACCUMULATORS = 128
"""Accumulators of a thread at most."""


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


class GroupedConvParams(NamedTuple):
    """The parameters of `gpu_grouped_conv2d`."""

    rows: int
    """Rows and columns of a thread block's rectangle of output pixels."""
    columns: int
    block_n: int
    """Output channels of a thread block: those of whole groups, or a part of one group's."""
    warps_m: int
    """Warps along the pixels, and along the channels, of the block."""
    warps_n: int
    fragments: int
    """Fragments of 16 pixels that a warp multiplies at once."""

    @property
    def threads(self) -> int:
        return self.warps_m * self.warps_n * WARP_LANES

    @property
    def warp_tiles(self) -> int:
        """Return the tiles of 8 output channels of a warp."""
        return self.block_n // (N_TILE * self.warps_n)

    def block_groups(self, sizes: GroupedConvSizes) -> int:
        """Return of how many groups a thread block reads channels."""
        return max(1, self.block_n // sizes.filters)

    def pixel_fragments(self) -> int:
        """Return the fragments of 16 pixels of a thread block."""
        return -(-self.rows * self.columns // FRAGMENT)

    def phases(self, sizes: GroupedConvSizes) -> int:
        """Return of how many groups a tile of 8 output channels has some at most: each is multiplied by itself."""
        return max(-(-N_TILE // sizes.filters), 1 if sizes.filters % N_TILE == 0 or N_TILE % sizes.filters == 0 else 2)

    def holds_weights(self, sizes: GroupedConvSizes) -> bool:
        """Say whether a thread keeps all its weights in registers."""
        return self.warp_tiles * (sizes.steps + sizes.steps % 2) <= HELD_WEIGHTS

    def accumulators(self, sizes: GroupedConvSizes) -> int:
        return self.fragments * self.warp_tiles * self.phases(sizes) * 4

    # ---- shared memory

    def pitch(self, sizes: GroupedConvSizes) -> int:
        """Return the elements from a pixel to the next: an odd number of 16 bytes, so that ldmatrix reads eight from different banks."""
        return odd_pieces(self.block_groups(sizes) * sizes.channels)

    def line(self, sizes: GroupedConvSizes) -> int:
        """Return the pixels of a row in shared memory, where those of equal remainder by the stride lie together."""
        stride = sizes.columns.stride
        return -(-sizes.columns.span(self.columns) // stride) * stride

    def image_bytes(self, sizes: GroupedConvSizes) -> int:
        return sizes.rows.span(self.rows) * self.line(sizes) * self.pitch(sizes) * ITEM_BYTES

    def weight_bytes(self, sizes: GroupedConvSizes) -> int:
        return sizes.terms * odd_pieces(self.block_n) * ITEM_BYTES

    def staging_pitch(self, sizes: GroupedConvSizes) -> int:
        """Return the elements from a row of a warp's results to the next."""
        return self.warp_tiles * N_TILE + VECTOR_BYTES // dtype_bytes(sizes.out_dtype)

    def staging_bytes(self, sizes: GroupedConvSizes) -> int:
        return self.warps_m * self.warps_n * FRAGMENT * self.staging_pitch(sizes) * dtype_bytes(sizes.out_dtype)

    def smem_bytes(self, sizes: GroupedConvSizes) -> int:
        """Return a thread block's shared memory: its part of the image, its weights, and a fragment of results for each warp."""
        return self.image_bytes(sizes) + self.weight_bytes(sizes) + self.staging_bytes(sizes)

    def fits(self, sizes: GroupedConvSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        if min(self) < 1 or self.threads > gpu.max_threads_per_block or self.block_n % (N_TILE * self.warps_n):
            return False
        filters, warp_n = sizes.filters, self.warp_tiles * N_TILE
        is_whole = self.block_n % filters == 0 or filters % self.block_n == 0
        # Warps have the same tiles of different groups, or tiles of one group.
        is_alike = warp_n % math.lcm(filters, N_TILE) == 0 or filters % warp_n == 0
        return (
            is_whole
            and is_alike
            and sizes.groups * filters % self.block_n == 0
            and self.rows <= sizes.rows.results
            and self.columns <= sizes.columns.results
            and self.accumulators(sizes) <= MAX_ACCUMULATORS
            and self.smem_bytes(sizes) <= gpu.smem_per_block_optin_bytes
        )

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_grouped_conv2d", self._asdict())


def odd_pieces(elements: int) -> int:
    """Return so many elements, or a few more: an odd number of 16 bytes."""
    return (-(-elements // PIECE) | 1) * PIECE


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


def grouped_conv_of(space: IterSpace) -> GroupedConvSizes | None:
    """Return the sizes of the convolution in groups that an iteration space is, None where it is none.

    Its one reduction reads an image [n, h, w, c] at a channel that f // filters * channels + c is, and weights of the axes f and c.
    """
    reductions = [block for block in space.blocks if block.is_reduction]
    if len(reductions) != 1 or len(reductions[0].reads) != 2 or not reductions[0].is_multiply_accumulate:
        return None
    [block] = reductions
    image = next((read for read in block.reads if len(read.index) == 4 and read.index[3] is None), None)
    weights = next((read for read in block.reads if read is not image and None not in read.index), None)
    [out] = block.writes
    if image is None or weights is None or len(out.shape) != 4 or len(out.index[3] or ()) != 1:
        return None
    return _sizes(space, block, (image, weights, out))


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
    return Side(stored.shape[dim], out.shape[dim], taps, next(iter(spatial), 1), dilation)


def _is_source(block: Block, image: Access) -> bool:
    """Say whether a block writes the image that the reduction reads: it pads it."""
    return any(write.operand == image.operand for write in block.writes) and len(block.reads) == 1
