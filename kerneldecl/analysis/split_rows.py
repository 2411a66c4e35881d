"""Owns functions of long rows as policies see them: sizes read from an iteration space, and the parameters of kernels that split rows.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from kerneldecl.analysis.gpu_limits import FIRST_CLUSTER_CAPABILITY, MAX_CLUSTER, VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Gpu, IterSpace, dtype_bytes

RowKind = Literal["softmax", "layer_norm", "rms_norm", "reduce"]
STATISTICS: dict[RowKind, int] = {"softmax": 2, "layer_norm": 2, "rms_norm": 1, "reduce": 1}
"""Numbers that a part of a row leaves: the maximum and the sum of powers; two sums; the sum of squares; what is reduced."""
SOFTMAX_FLOPS = (1, 2, 1, 1)
"""Operations of an element in the blocks of a softmax: compared, a power of the distance, added, divided. Scaled elements have more."""
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""
MAX_KEPT = 32
"""Elements that one thread keeps in registers at most, each in one of its own."""
MAX_PARTS = 1024
"""Parts of one row at most: each of them reads what all have left."""


class RowSizes(NamedTuple):
    """Sizes of one function of rows."""

    kind: RowKind
    rows: int
    columns: int
    dtype: str
    out_dtype: str

    @property
    def most_width(self) -> int:
        """Return how many neighbours a thread can access at once: a power of two."""
        return VECTOR_BYTES // max(dtype_bytes(self.dtype), dtype_bytes(self.out_dtype))


class SplitRowsParams(NamedTuple):
    """The parameters of `gpu_split_rows`."""

    width: int
    """Elements of one access. Rows that it does not divide begin and end within a vector, and are ragged."""
    threads: int
    """Threads of a block, whole warps."""
    parts: int
    """Thread blocks that share a row."""
    cluster: int
    """How many of those exchange what they find through shared memory: all, in one kernel, or 1, for two kernels."""

    @property
    def warps(self) -> int:
        return self.threads // WARP_LANES

    def is_ragged(self, sizes: RowSizes) -> bool:
        return sizes.columns % self.width != 0

    def vectors(self, sizes: RowSizes) -> int:
        """Return how many aligned vectors a row touches, wherever within one it begins."""
        return -(-(sizes.columns + (self.width - 1 if self.is_ragged(sizes) else 0)) // self.width)

    def steps(self, sizes: RowSizes) -> int:
        """Return the vectors of one thread."""
        return -(-self.vectors(sizes) // (self.parts * self.threads))

    def slots(self) -> int:
        """Return how many warps exchange what they have found."""
        return self.warps * self.cluster

    def smem_bytes(self, sizes: RowSizes) -> int:
        return 4 * STATISTICS[sizes.kind] * self.slots()

    def fits(self, sizes: RowSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built, of which every thread block has a part of its row."""
        if min(self) < 1 or self.threads % WARP_LANES or self.threads > gpu.max_threads_per_block or sizes.most_width % self.width:
            return False
        steps = self.steps(sizes)
        return (
            self.cluster in {1, self.parts}
            and self.cluster <= max_cluster(gpu)
            and self.parts <= MAX_PARTS
            and steps * self.width <= MAX_KEPT
            and (self.parts - 1) * steps * self.threads < self.vectors(sizes)
        )


def max_cluster(gpu: Gpu) -> int:
    """Return the thread blocks of a cluster at most; 1 for a GPU without clusters."""
    return MAX_CLUSTER if gpu.compute_capability >= FIRST_CLUSTER_CAPABILITY else 1


def takes(sizes: RowSizes) -> bool:
    """Say whether the kernels compute such rows."""
    dtypes = {"float16", "bfloat16", "float32"}
    return {sizes.dtype, sizes.out_dtype} <= dtypes and sizes.rows * sizes.columns < MAX_OFFSET


def _reduced(space: IterSpace) -> RowSizes | None:
    """Return the sizes of a reduction over the last axes."""
    reduction, result = space.blocks[0], space.blocks[-1].writes[0]
    read, extents = reduction.reads[0], tuple(axis.extent for axis in reduction.axes)
    rows = [axis.extent for axis in reduction.axes if axis.kind == "spatial"]
    is_in_order = read.index == tuple(((at, 1),) for at in range(len(extents))) and extents[: len(rows)] == tuple(rows)
    if len(reduction.reads) != 1 or read.shape != extents or not is_in_order or result.shape != tuple(rows):
        return None
    return RowSizes("reduce", math.prod(rows), math.prod(extents[len(rows) :]), read.dtype, result.dtype)


def row_sizes_of(space: IterSpace) -> RowSizes | None:
    """Return the sizes of the function of rows that an iteration space may be, None where it is none; the template reads it in full.

    Its blocks are those of `compiler.rowwise`.
    """
    kinds, inputs = tuple(block.is_reduction for block in space.blocks), len(space.inputs)
    if kinds in {(True,), (True, False)} and inputs == 1:
        return _reduced(space)
    kind: RowKind
    if kinds == (True, False, True, False) and inputs == 1 and tuple(block.flops_per_point for block in space.blocks) == SOFTMAX_FLOPS:
        kind = "softmax"
    elif kinds == (True, False, True, False) and inputs == 3:
        kind = "layer_norm"
    elif kinds == (False, False, True, False, False, False, False) and inputs == 2:
        kind = "rms_norm"
    else:
        return None
    accesses = {access.operand: access for block in space.blocks for access in (*block.reads, *block.writes)}
    x, y = accesses[space.inputs[0]], accesses[space.outputs[0]]
    reduction = next(block for block in space.blocks if block.is_reduction)
    if x.shape != y.shape or [axis.kind for axis in reduction.axes] != ["spatial"] * (len(x.shape) - 1) + ["reduce"]:
        return None
    if tuple(axis.extent for axis in reduction.axes) != x.shape:
        return None
    return RowSizes(kind, math.prod(x.shape[:-1]), x.shape[-1], x.dtype, y.dtype)
