"""Owns the reading of an iteration space as a GEMM of values of 8 bits or less times scales.

Knows nothing of TVM, templates or policies. Whether values are exact in 16 bits and what shares a scale only the template reads in full.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from kerneldecl.analysis.contraction import Contraction, contraction_of
from kerneldecl.analysis.tensor_cores import INTEGERS, shape_of
from kerneldecl.model import Access, Gpu, IterSpace, dtype_bytes

VALUE_DTYPE = "float16"
"""Dtype in which values are multiplied: all numbers of 8 bits are exact in it."""
INTEGER_DTYPE = "int8"
"""Dtype in which integers are multiplied otherwise, if all of them are from -128 to 127: tensor cores take twice as many of it."""

ROWS_DIMENSIONS = 2
"""Dimensions of values that lie in rows, not packed."""


class ScaledSizes(NamedTuple):
    """What looks like a GEMM of scaled values."""

    gemm: Contraction
    """The GEMM of the values in VALUE_DTYPE."""
    unit: int
    """Elements along k that share all scales."""
    value_bytes: tuple[int, int]
    """Bytes of A's and B's values in memory."""
    are_integers: bool
    """Whether values may be integers from -128 to 127: int8, or 4 bits without zero points."""
    is_packed: bool = False
    """Whether B's values lie in fragments, not in rows."""
    has_narrow_scales: bool = False
    """Whether scales of 8 bits are among the factors: no copy brings those to shared memory as they are."""

    @property
    def integers(self) -> ScaledSizes:
        """Return the same with values in INTEGER_DTYPE."""
        a, b = (replace(operand, dtype=INTEGER_DTYPE) for operand in (self.gemm.a, self.gemm.b))
        return self._replace(gemm=replace(self.gemm, a=a, b=b, accum_dtype="int32"))


def scaled_of(space: IterSpace, gpu: Gpu) -> ScaledSizes | None:
    """Return what looks like a GEMM of scaled values with float32 sums, None where it does not.

    Values without scales are among them where the GPU's tensor cores do not multiply them as they are: float8 before Ada.
    """
    gemm = contraction_of(space)
    if isinstance(gemm, str) or not gemm.is_plain or gemm.accum_dtype != "float32" or gemm.extents[0] != 1:
        return None
    _, m, n, k = gemm.extents
    reduction = next(block for block in space.blocks if block.is_reduction)
    sources = [_sources(space, reduction.reads[operand.position]) for operand in (gemm.a, gemm.b)]
    shapes = [reduction.reads[operand.position].shape for operand in (gemm.a, gemm.b)]
    values = [[access for access in found if dtype_bytes(access.dtype) == 1] for found in sources]
    scales = [[access for access in found if access.dtype == "float32"] for found in sources]
    is_known = all(len(known) + len(wide) == len(found) for known, wide, found in zip(values, scales, sources, strict=True))
    if not is_known or shapes != [(m, k), (n, k)] or not all(values):
        return None
    stored = tuple(max(math.prod(access.shape) for access in found) for found in values)
    # Scales of 8 bits, and zero points, are those that are fewer than the values.
    few = [[access for access in found if math.prod(access.shape) < most] for found, most in zip(values, stored, strict=True)]
    factors = [wide + narrow for wide, narrow in zip(scales, few, strict=True)]
    if not any(factors) and (gemm.a.dtype != gemm.b.dtype or shape_of("mma.sync", gemm.a.dtype, gpu.compute_capability)):
        return None
    groups = [_group(access, rows, k) for found, rows in zip(factors, (m, n), strict=True) for access in found]
    own = replace(gemm, a=replace(gemm.a, dtype=VALUE_DTYPE), b=replace(gemm.b, dtype=VALUE_DTYPE))
    are_integers = not any(few) and all(access.dtype in {"int8", "uint8"} for found in values for access in found)
    is_packed = any(len(access.shape) > ROWS_DIMENSIONS for access in values[1] if math.prod(access.shape) == stored[1])
    # Zero points of 8 bits have scales of float32 beside them; E8M0 is read from bytes.
    has_narrow_scales = any(access.dtype not in INTEGERS or not wide for narrow, wide in zip(few, scales, strict=True) for access in narrow)
    return ScaledSizes(own, math.gcd(*groups) or k, (stored[0], stored[1]), are_integers, is_packed, has_narrow_scales)


def _sources(space: IterSpace, access: Access) -> tuple[Access, ...]:
    """Return what an operand is computed from, itself where it is an argument."""
    if access.operand in space.inputs:
        return (access,)
    return next((block.reads for block in space.blocks if block.writes[0].operand == access.operand), ())


def _group(scales: Access, rows: int, k: int) -> int:
    """Return how many elements along k share a scale: all, or as many as [groups, rows] or [blocks, groups] say."""
    if len(scales.shape) < 2:
        return k
    return k // (scales.shape[0] if scales.shape[1] == rows else scales.shape[1])
