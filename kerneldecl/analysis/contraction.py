"""Owns the reading of an iteration space as a product of matrices: which axes are its m, n, k and batch, which operand is which.

Knows nothing of TVM, templates, policies or any one operator: a convolution is a product whose m and k are several axes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kerneldecl.model import Access, Block, Gpu, IterSpace, dtype_bytes

Terms = tuple[tuple[int, int], ...]
"""An index: axes with their coefficients."""
FRAGMENT = 16
"""Least rows and columns that tensor cores multiply at once, as mma.sync is used here."""
TENSOR_SUMS = {"float16": ("float32", "float16"), "bfloat16": ("float32",), "int8": ("int32",)}
"""By dtype of the factors: the dtypes of sums that have intrinsics."""
WITH_A_VECTOR = "it is a product with a vector, which memory alone limits"
FIRST_CAPABILITY = (8, 0)
"""Of GPUs with mma.sync m16n8k16 and cp.async."""


@dataclass(frozen=True)
class Operand:
    """One operand of a product."""

    position: int
    """Among what the block reads."""
    dtype: str
    shape: tuple[int, ...]
    is_k_last: bool
    """True where neighbours along k are neighbours in memory, rather than neighbours along m (or n)."""
    run: int
    """How many elements lie side by side, each run as long and as far from the next as a multiple of this."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * dtype_bytes(self.dtype)

    def vector(self) -> int:
        """Return how many elements one load of at most 16 bytes can take."""
        return math.gcd(self.run, 16 // dtype_bytes(self.dtype))


@dataclass(frozen=True)
class Contraction:
    """A block that sums products of two operands. Axes are positions in the block, in its order."""

    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    a: Operand
    """The operand that m indexes."""
    b: Operand
    extents: tuple[int, int, int, int]
    """Of batch, m, n, k."""
    accum_dtype: str
    out_contiguous: int
    """As a factor's run: of the result along n."""
    is_plain: bool
    """True where nothing but a multiplication and an addition is done at a point."""

    @property
    def layout(self) -> str:
        """Return nn, nt, tn or tt, as BLAS names how both operands are stored."""
        return ("n" if self.a.is_k_last else "t") + ("t" if self.b.is_k_last else "n")


def contraction_of(space: IterSpace) -> Contraction | str:
    """Return the product that a function's one reduction is, or a sentence that says why it is none."""
    reductions = [block for block in space.blocks if block.is_reduction]
    if len(reductions) != 1:
        return f"it has {len(reductions) or 'no'} reductions; a product is one"
    return _read(space, reductions[0])


def why_no_tensor_cores(gemm: Contraction, gpu: Gpu) -> str:
    """Return why tensor cores do not take a product, as a sentence; empty where they do."""
    _, m, n, k = gemm.extents
    dtype, other = gemm.a.dtype, gemm.b.dtype
    is_transposed = dtype_bytes(dtype) == 1 and gemm.layout != "nt"
    reasons = (
        (not gemm.is_plain, "its reduction does something else than adding products"),
        (dtype != other, f"its operands differ in dtype: {dtype} and {other}"),
        (gemm.accum_dtype not in TENSOR_SUMS.get(dtype, ()), f"there is no intrinsic for {dtype} summed in {gemm.accum_dtype}"),
        (
            gpu.compute_capability < FIRST_CAPABILITY,
            "its GPU is older than mma.sync m16n8k16 and cp.async, which compute capability 8.0 brought",
        ),
        (not gpu.tensor_rate(dtype), f"the GPU's tensor cores do not take {dtype}"),
        (is_transposed, f"its layout is {gemm.layout}: ldmatrix cannot transpose 8-bit elements, so k must be last in both operands"),
        (min(m, n) == 1, WITH_A_VECTOR),
        (max(m, n) < FRAGMENT // 2, f"it has {m} rows and {n} columns, and tensor cores would multiply {FRAGMENT} of each"),
        (k < FRAGMENT, f"its sums have {k} terms, and tensor cores take {FRAGMENT} at once"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def _read(space: IterSpace, block: Block) -> Contraction | str:
    if objection := _objection(block):
        return objection
    first, second, out = (set(_axes_of(access) or ()) for access in (*block.reads, *block.writes))
    kinds = [axis.kind for axis in block.axes]
    spatial = [at for at, kind in enumerate(kinds) if kind == "spatial"]
    # What the output's fastest axis indexes is the right operand; where that axis has extent 1, no operand shows it.
    ranked = [at for at in _by_place(block.writes[0]) if (at in first) != (at in second)]
    is_second = not ranked or ranked[-1] in second
    a, b = (first, second) if is_second else (second, first)
    k = tuple(at for at, kind in enumerate(kinds) if kind == "reduce")
    long_k = [at for at in k if block.axes[at].extent > 1]
    if any((at in a) != (at in b) for at in long_k):
        return "one operand alone is indexed by a reduced axis"
    groups = _groups(block, spatial, a, b)
    if groups is None or not out.issuperset(at for at in spatial if block.axes[at].extent > 1):
        return "an axis of the output indexes no operand"
    batch, m, n = groups
    if not m or not n:
        return WITH_A_VECTOR
    positions = (0, 1) if is_second else (1, 0)
    return Contraction(
        batch,
        m,
        n,
        k,
        _factor(space, block, positions[0], (m, k)),
        _factor(space, block, positions[1], (n, k)),
        (_extent(block, batch), _extent(block, m), _extent(block, n), _extent(block, k)),
        block.writes[0].dtype,
        _run(block, block.writes[0], n),
        block.flops_per_point == 2 and block.is_multiply_accumulate,
    )


def _objection(block: Block) -> str:
    """Return why a reduction's operands are not those of a product; empty where they may be."""
    if len(block.reads) != 2 or len(block.writes) != 1:
        return f"its reduction reads {len(block.reads)} operand{'s' * (len(block.reads) != 1)}; a product has two"
    if block.reads[0].operand == block.reads[1].operand:
        return f"both its operands are {block.reads[0].operand}; the templates want two"
    if any(_axes_of(access) is None for access in (*block.reads, *block.writes)):
        return "an operand is indexed by something that is not linear in the axes"
    return ""


def _axes_of(access: Access) -> list[int] | None:
    """Return the axes that index an operand, None where one of its indices is not affine."""
    if None in access.index:
        return None
    return [axis for index in access.index for axis, _ in index or ()]


def _by_place(access: Access) -> list[int]:
    """Return the axes that index an operand, the fastest last."""
    return [axis for index in access.index for axis, _ in index or ()]


def _groups(block: Block, spatial: Sequence[int], a: set[int], b: set[int]) -> tuple[tuple[int, ...], ...] | None:
    """Return the batch, m and n axes. Axes of extent 1, which no operand shows, become n where it has none, else m."""
    batch = [at for at in spatial if at in a and at in b]
    m = [at for at in spatial if at in a and at not in b]
    n = [at for at in spatial if at in b and at not in a]
    units = [at for at in spatial if at not in a and at not in b]
    if any(block.axes[at].extent > 1 for at in units):
        return None
    if units and not n:
        n.append(units.pop())
    return tuple(batch), tuple(sorted((*m, *units))), tuple(n)


def _extent(block: Block, axes: Sequence[int]) -> int:
    return math.prod(block.axes[at].extent for at in axes)


def _factor(space: IterSpace, block: Block, position: int, groups: tuple[Sequence[int], Sequence[int]]) -> Operand:
    spatial, reduced = groups
    access = block.reads[position]
    base = stored(space, access)
    extents = {axis: block.axes[axis].extent for axis, _ in _fastest(base)}
    # Of several axes in one index (a window's place and the place in it) the longer one makes the longer runs.
    fastest = max(extents, key=lambda axis: (extents[axis], axis in reduced), default=None)
    is_k_last = fastest is None or fastest in reduced
    return Operand(position, access.dtype, base.shape, is_k_last, _run(block, base, reduced if is_k_last else spatial))


def stored(space: IterSpace, access: Access) -> Access:
    """Return an operand's access to the memory that it comes from, through transposes, padding and casts, which are never stored."""
    makers = [block for block in space.blocks if any(write.operand == access.operand for write in block.writes)]
    if len(makers) != 1 or makers[0].is_reduction or len(makers[0].reads) != 1:
        return access
    (write,), (read,) = makers[0].writes, makers[0].reads
    places = {index[0][0]: dim for dim, index in enumerate(write.index) if index is not None and len(index) == 1 and index[0][1] == 1}
    used = [axis for index in read.index for axis, _ in index or ()]
    if None in read.index or not places.keys() >= set(used):
        return access
    index = tuple(_substituted(terms or (), places, access) for terms in read.index)
    return stored(space, Access(read.operand, read.shape, access.dtype, index))


def _substituted(terms: Terms, places: Mapping[int, int], access: Access) -> Terms | None:
    """Return an index in a maker's axes as one in those of the block that reads what it made."""
    found: Counter[int] = Counter()
    for axis, coefficient in terms:
        inner = access.index[places[axis]]
        if inner is None:
            return None
        for reader, operand in inner:
            found[reader] += coefficient * operand
    return tuple(sorted(found.items()))


def _fastest(access: Access) -> Terms:
    """Return the index of the last dimension that has more than one element."""
    dims = [index or () for index, size in zip(access.index, access.shape, strict=True) if size > 1]
    return dims[-1] if dims else ()


def _run(block: Block, access: Access, group: Sequence[int]) -> int:
    """Return how many elements lie side by side along a group of axes.

    Several axes in one index, a stride, another order of the axes, or a part of a row, whose start may be anywhere, leave
    elements that are loaded one by one.
    """
    last = [at for at in group if block.axes[at].extent > 1][-1:]
    row = next((size for size in reversed(access.shape) if size > 1), 1)
    is_dense = bool(last) and tuple(_fastest(access)) == ((last[0], 1),) and block.axes[last[0]].extent == row
    return row if is_dense else 1
