"""Owns elementwise functions whose rows are no whole vectors as policies see them: sizes read from an iteration space, and parameters.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Access, Gpu, IterSpace, dtype_bytes

DTYPES = frozenset({"float16", "bfloat16", "float32", "int8", "uint8", "int32", "int64"})
"""Of all arguments."""
MAX_INPUTS, MAX_GATHERED = 5, 4
MAX_WIDTH, MAX_GATHERED_WIDTH = 16, 8
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""


class UnalignedSizes(NamedTuple):
    """Sizes of a function whose result is written in vectors over flat memory."""

    elements: int
    columns: int
    """Elements of a row of the result, of as many axes as operands read alike, or as hold a vector."""
    element_bytes: int
    """Bytes of an element of the widest argument that is read or written in vectors."""
    flat: int
    """Inputs that are read in vectors, at the places of the result."""
    per_row: int
    """Reads that are alike along a row: two for each vector."""
    per_column: int
    """Reads that depend on the place in a row alone: one for each element of a vector, for all rows of a thread."""
    gathered: int
    """Other reads: one for each element."""
    gathered_bytes: int
    """Bytes of an element of the widest of them."""
    trailing: int
    """Axes of a row."""

    @property
    def width(self) -> int:
        """Return the elements of one access."""
        most = MAX_GATHERED_WIDTH if self.gathered + self.per_column else MAX_WIDTH
        return min(most, VECTOR_BYTES // self.element_bytes)

    @property
    def vectors(self) -> int:
        return self.elements // self.width

    @property
    def rest(self) -> int:
        """Return the elements behind the last whole vector."""
        return self.elements % self.width

    @property
    def period(self) -> int:
        """Return after how many vectors one begins at the same place of a row again, 1 where no read depends on that place."""
        if self.columns == self.elements and not self.per_column + self.gathered:
            return 1
        return self.columns // math.gcd(self.columns, self.width)


class UnalignedParams(NamedTuple):
    """The parameters of `gpu_unaligned_elementwise`."""

    threads: int
    unroll: int
    """Vectors of a thread, all at the same place of a row."""

    def fits(self, sizes: UnalignedSizes, gpu: Gpu) -> bool:
        is_block = self.threads % WARP_LANES == 0 and 0 < self.threads <= gpu.max_threads_per_block
        return is_block and 1 <= self.unroll <= 8 and (self.unroll - 1) * self.stride(sizes) < max(1, sizes.vectors)

    def stride(self, sizes: UnalignedSizes) -> int:
        """Return how many vectors a thread's vectors are apart: whole periods, so that what depends on columns alone is read once."""
        if self.unroll == 1:
            return max(1, sizes.vectors)
        return sizes.period * -(-sizes.vectors // (self.unroll * sizes.period))

    def grid(self, sizes: UnalignedSizes) -> int:
        """Return the thread blocks: a thread for each vector up to the stride, and one for the elements behind the last vector."""
        return -(-(self.stride(sizes) + (sizes.rest > 0)) // self.threads)


def unaligned_sizes_of(space: IterSpace) -> UnalignedSizes | None:
    """Return the sizes of the function that an iteration space is, None where it is none that the kernels compute."""
    if len(space.outputs) != 1 or any(block.is_reduction or len(block.writes) != 1 for block in space.blocks):
        return None
    shape = space.blocks[-1].writes[0].shape
    same = tuple(((axis, 1),) for axis in range(len(shape)))
    if not shape or any((block.writes[0].shape, block.writes[0].index) != (shape, same) for block in space.blocks):
        return None
    reads = list(dict.fromkeys(access for block in space.blocks for access in block.reads if access.operand in space.inputs))
    produced = [access for block in space.blocks for access in block.reads if access.operand not in space.inputs]
    if any((access.shape, access.index) != (shape, same) for access in produced):
        return None
    used = [_axes(access, len(shape)) for access in reads]
    is_flat = [(access.shape, access.index) == (shape, same) for access in reads]
    others = set[int]().union(*(axes for axes, flat in zip(used, is_flat, strict=True) if not flat))
    out = space.blocks[-1].writes[0]
    vectors = [out, *(access for access, flat in zip(reads, is_flat, strict=True) if flat)]
    element_bytes = max(dtype_bytes(access.dtype) for access in vectors)
    trailing = _trailing(shape, len(shape) - 1 - max(others, default=-1), VECTOR_BYTES // element_bytes)
    last = set(range(len(shape) - trailing, len(shape)))
    kinds = [(access, axes & last, axes - last) for access, axes, flat in zip(reads, used, is_flat, strict=True) if not flat]
    gathered = [access for access, columns, rows in kinds if columns and (rows or None in access.index)]
    sizes = UnalignedSizes(
        elements=math.prod(shape),
        columns=math.prod(shape[len(shape) - trailing :]),
        element_bytes=element_bytes,
        flat=sum(is_flat),
        per_row=sum(not columns for _, columns, _ in kinds),
        per_column=len(kinds) - len(gathered) - sum(not columns for _, columns, _ in kinds),
        gathered=len(gathered),
        gathered_bytes=max((dtype_bytes(access.dtype) for access in gathered), default=0),
        trailing=trailing,
    )
    return sizes if _takes(sizes, space) else None


def _trailing(shape: tuple[int, ...], unused: int, width: int) -> int:
    """Return the axes of a row: those that vectors alone are read along, at least one, and as many as hold a vector."""
    trailing = max(1, unused)
    while trailing < len(shape) and math.prod(shape[-trailing:]) < width:
        trailing += 1
    return trailing


def _axes(access: Access, count: int) -> set[int]:
    """Return the axes that an operand's place may depend on: all of them where an index is not known to be affine."""
    if None in access.index:
        return set(range(count))
    return {axis for index in access.index for axis, _ in index or ()}


def _takes(sizes: UnalignedSizes, space: IterSpace) -> bool:
    """Say whether the kernels compute functions of such sizes."""
    arguments = [access for block in space.blocks for access in (*block.reads, *block.writes)]
    are_held = all(access.dtype in DTYPES and math.prod(access.shape) < MAX_OFFSET for access in arguments)
    return are_held and len(space.inputs) <= MAX_INPUTS and sizes.gathered <= MAX_GATHERED and sizes.vectors > 0
