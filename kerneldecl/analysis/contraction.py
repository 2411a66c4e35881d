"""Owns the reading of an iteration space as a GEMM: which axes are its m, n, k and batch, which operand is A and which is B.

Knows nothing of TVM, templates, policies or any one operator: a convolution is a GEMM whose m and k are several axes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kerneldecl.analysis.tensor_cores import FRAGMENT, accumulators, shape_of
from kerneldecl.model import Access, Block, Gpu, IterSpace, dtype_bytes

Terms = tuple[tuple[int, int], ...]
"""An affine index: axes with their coefficients."""
IS_GEMV = "it is a matrix-vector multiplication (GEMV), which memory alone limits"
NOT_MULTIPLY_ACCUMULATE = "its reduction is not a multiply-accumulate"


@dataclass(frozen=True)
class Operand:
    """One operand of a GEMM."""

    position: int
    """The operand's place among the block's reads."""
    dtype: str
    shape: tuple[int, ...]
    is_k_last: bool
    """True where neighbours along k are neighbours in memory, rather than neighbours along m (or n)."""
    contiguous: int
    """Contiguous elements: each stretch of them is a multiple of this long, and begins a multiple of this after the one before."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * dtype_bytes(self.dtype)

    def vector(self) -> int:
        """Return how many elements one load of at most 16 bytes can take."""
        return math.gcd(self.contiguous, 16 // dtype_bytes(self.dtype))


@dataclass(frozen=True)
class Contraction:
    """A block that is a GEMM, batched or not. Axes are positions in the block, in its order."""

    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    a: Operand
    """The operand that m indexes."""
    b: Operand
    extents: tuple[int, int, int, int]
    """Extents of batch, m, n, k."""
    accum_dtype: str
    out_contiguous: int
    """Contiguous elements of the result along n, as an operand's `contiguous`."""
    is_plain: bool
    """Whether a point is one multiplication and one addition, and nothing else."""

    @property
    def layout(self) -> str:
        """Return nn, nt, tn or tt, BLAS's name for how both operands are stored."""
        return ("n" if self.a.is_k_last else "t") + ("t" if self.b.is_k_last else "n")


def contraction_of(space: IterSpace) -> Contraction | str:
    """Return the GEMM that a function's one reduction is, or a sentence that says why it is none."""
    reductions = [block for block in space.blocks if block.is_reduction]
    if len(reductions) != 1:
        return f"it has {len(reductions) or 'no'} reductions; a GEMM has one"
    return _read(space, reductions[0])


def dequantised_operands(space: IterSpace) -> frozenset[int]:
    """Return the positions of the operands of a function's only reduction that it computes before, from elements of 8 bits."""
    at = next(i for i, block in enumerate(space.blocks) if block.is_reduction)
    dequantising = [
        block
        for block in space.blocks[:at]
        if block.flops_per_point and min(dtype_bytes(read.dtype) for read in block.reads) < dtype_bytes(block.writes[0].dtype)
    ]
    computed = {block.writes[0].operand for block in dequantising}
    return frozenset(position for position, access in enumerate(space.blocks[at].reads) if access.operand in computed)


def why_no_tensor_cores(gemm: Contraction, gpu: Gpu) -> str:
    """Return why mma.sync does not take a GEMM, as a sentence; empty where it does."""
    _, m, n, k = gemm.extents
    dtype, other = gemm.a.dtype, gemm.b.dtype
    has_shape = shape_of("mma.sync", dtype, gpu.compute_capability) is not None
    capability = "{}.{}".format(*gpu.compute_capability)
    reasons = (
        (not gemm.is_plain, NOT_MULTIPLY_ACCUMULATE),
        (dtype != other, f"its operands differ in dtype: {dtype} and {other}"),
        (gemm.accum_dtype not in accumulators("mma.sync", dtype), f"there is no mma.sync of {dtype} with {gemm.accum_dtype} accumulators"),
        (not has_shape or not gpu.ldmatrix, f"compute capability {capability} has no mma.sync of {dtype} with ldmatrix"),
        (not gpu.tensor_rate(dtype), f"the GPU's tensor cores do not take {dtype}"),
        (min(m, n) == 1, IS_GEMV),
        (max(m, n) < FRAGMENT // 2, f"it has {m} rows and {n} columns; tensor cores multiply {FRAGMENT} x {FRAGMENT} at least"),
        (k < FRAGMENT, f"k is {k}; tensor cores take {FRAGMENT} at once"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def _read(space: IterSpace, block: Block) -> Contraction | str:
    if reason := _why_not_two_operands(block):
        return reason
    first, second, out = (set(_axes_of(access) or ()) for access in (*block.reads, *block.writes))
    kinds = [axis.kind for axis in block.axes]
    spatial = [at for at, kind in enumerate(kinds) if kind == "spatial"]
    # The operand with the output's fastest axis is B; where that axis has extent 1, no operand has it.
    outer_to_inner = [at for at in _axes_of(block.writes[0]) or () if (at in first) != (at in second)]
    is_second = not outer_to_inner or outer_to_inner[-1] in second
    a, b = (first, second) if is_second else (second, first)
    k = tuple(at for at, kind in enumerate(kinds) if kind == "reduce")
    long_k = [at for at in k if block.axes[at].extent > 1]
    if any((at in a) != (at in b) for at in long_k):
        return "a reduced axis indexes only one operand"
    groups = _groups(block, spatial, a, b)
    if groups is None or not out.issuperset(at for at in spatial if block.axes[at].extent > 1):
        return "an output axis indexes no operand"
    batch, m, n = groups
    positions = (0, 1) if is_second else (1, 0)
    if not m or not n or (batch and _has_no_rows(block, block.reads[positions[0]], (*batch, *m, *k), m)):
        return IS_GEMV
    return Contraction(
        batch=batch,
        m=m,
        n=n,
        k=k,
        a=_operand(space, block, positions[0], (m, k)),
        b=_operand(space, block, positions[1], (n, k)),
        extents=(_extent(block, batch), _extent(block, m), _extent(block, n), _extent(block, k)),
        accum_dtype=block.writes[0].dtype,
        out_contiguous=_contiguous(block, block.writes[0], n),
        is_plain=block.flops_per_point == 2 and block.is_multiply_accumulate,
    )


def _why_not_two_operands(block: Block) -> str:
    """Return why a reduction's operands are not those of a GEMM, as a sentence; empty where they may be."""
    if len(block.reads) != 2 or len(block.writes) != 1:
        return f"its reduction reads {len(block.reads)} operand{'s' * (len(block.reads) != 1)}; a GEMM has two"
    if block.reads[0].operand == block.reads[1].operand:
        return f"both its operands are {block.reads[0].operand}; a GEMM has two"
    if any(_axes_of(access) is None for access in (*block.reads, *block.writes)):
        return "an operand has an index that is not affine in the axes"
    return ""


def _axes_of(access: Access) -> list[int] | None:
    """Return the axes that index an operand, the fastest last; None where one of its indices is not affine."""
    if None in access.index:
        return None
    return [axis for index in access.index for axis, _ in index or ()]


def _groups(block: Block, spatial: Sequence[int], a: set[int], b: set[int]) -> tuple[tuple[int, ...], ...] | None:
    """Return the batch, m and n axes. Axes of extent 1, which no operand has, become n where that is empty, else m.

    Return None where a longer axis indexes no operand.
    """
    batch = [at for at in spatial if at in a and at in b]
    m = [at for at in spatial if at in a and at not in b]
    n = [at for at in spatial if at in b and at not in a]
    units = [at for at in spatial if at not in a and at not in b]
    if any(block.axes[at].extent > 1 for at in units):
        return None
    if units and not n:
        n.append(units.pop())
    return tuple(batch), tuple(sorted((*m, *units))), tuple(n)


def _has_no_rows(block: Block, operand: Access, axes: Sequence[int], m: Sequence[int]) -> bool:
    """Say whether the one row of A is none of its dimensions: so it is with one image's depthwise convolution, whose A is the filters."""
    return _extent(block, m) == 1 and len(operand.shape) < len(axes)


def _extent(block: Block, axes: Sequence[int]) -> int:
    return math.prod(block.axes[at].extent for at in axes)


def _operand(space: IterSpace, block: Block, position: int, groups: tuple[Sequence[int], Sequence[int]]) -> Operand:
    spatial, reduced = groups
    access = block.reads[position]
    base = stored(space, access)
    extents = {axis: block.axes[axis].extent for axis, _ in _fastest(base)}
    # Of several axes in one index, such as an output pixel and a filter element, the longer one has more contiguous elements.
    fastest = max(extents, key=lambda axis: (extents[axis], axis in reduced), default=None)
    is_k_last = fastest is None or fastest in reduced
    return Operand(
        position=position,
        dtype=access.dtype,
        shape=base.shape,
        is_k_last=is_k_last,
        contiguous=_contiguous(block, base, reduced if is_k_last else spatial),
    )


def stored(space: IterSpace, access: Access) -> Access:
    """Return an operand's access to the memory that it comes from, through transposes, padding and casts, which are never stored."""
    producers = [block for block in space.blocks if any(write.operand == access.operand for write in block.writes)]
    if len(producers) != 1 or producers[0].is_reduction or len(producers[0].reads) != 1:
        return access
    (write,), (read,) = producers[0].writes, producers[0].reads
    dims = {index[0][0]: dim for dim, index in enumerate(write.index) if index is not None and len(index) == 1 and index[0][1] == 1}
    used = [axis for index in read.index for axis, _ in index or ()]
    if None in read.index or not dims.keys() >= set(used):
        return access
    index = tuple(_substituted(terms or (), dims, access) for terms in read.index)
    return stored(space, Access(read.operand, read.shape, access.dtype, index))


def _substituted(terms: Terms, dims: Mapping[int, int], access: Access) -> Terms | None:
    """Return an index in a producer's axes as one in the axes of its consumer; `dims` are the dimensions that the axes index."""
    found: Counter[int] = Counter()
    for axis, coefficient in terms:
        inner = access.index[dims[axis]]
        if inner is None:
            return None
        for consumer_axis, factor in inner:
            found[consumer_axis] += coefficient * factor
    return tuple(sorted(found.items()))


def _fastest(access: Access) -> Terms:
    """Return the index of the last dimension that has more than one element."""
    dims = [index or () for index, size in zip(access.index, access.shape, strict=True) if size > 1]
    return dims[-1] if dims else ()


def _contiguous(block: Block, access: Access, group: Sequence[int]) -> int:
    """Return how many elements are contiguous along a group of axes: whole rows, else 1.

    Elements are loaded one by one where several axes are in one index, where there is a stride, where the axes have another
    order, and in a slice of a row, whose start may be unaligned.
    """
    last = [at for at in group if block.axes[at].extent > 1][-1:]
    row = next((size for size in reversed(access.shape) if size > 1), 1)
    is_dense = bool(last) and tuple(_fastest(access)) == ((last[0], 1),) and block.axes[last[0]].extent == row
    return row if is_dense else 1
