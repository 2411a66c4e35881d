"""Owns grouped GEMM as a computation: its canonical TensorIR, and the recognition of a function that is one.

Knows nothing of schedules, targets, or who declares it. A function is recognised by its canonical text.

A row belongs to the group whose number is the count of offsets that are not above it, so that any offsets name a group or none; or, with
places for each group, to a group that has more than its number of rows. Rows of no group give zero, whatever A holds there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of

ACCUM_DTYPE = "float32"
LAYOUTS = ("nt", "nn")
SCALE_BLOCK = 128
"""Elements of k, and columns of B, that share a scale of float8."""


@dataclass(frozen=True)
class GroupedSpec:
    """One grouped GEMM."""

    rows: int
    """Rows of all groups; places for each group with `is_masked`."""
    groups: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    layout: str = "nt"
    is_masked: bool = False

    @property
    def is_scaled(self) -> bool:
        """Say whether operands have scales."""
        return self.dtype.startswith("float8")

    @property
    def places(self) -> int:
        """Return the rows of A and C."""
        return self.rows * (self.groups if self.is_masked else 1)

    @property
    def scale_steps(self) -> int:
        """Return how many scales a row of A has."""
        return -(-self.k // SCALE_BLOCK)

    @property
    def arguments(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Return name, shape and dtype of all arguments in order; the last one is the result."""
        outer = (self.groups, self.rows) if self.is_masked else (self.rows,)
        of_b = (self.n, self.k) if self.layout == "nt" else (self.k, self.n)
        scales = (("A_scale", (*outer, self.scale_steps)), ("B_scale", (self.groups, -(-self.n // SCALE_BLOCK), self.scale_steps)))
        a_scale, b_scale = ([(name, shape, ACCUM_DTYPE)] if self.is_scaled else [] for name, shape in scales)
        return [
            ("A", (*outer, self.k), self.dtype),
            *a_scale,
            ("B", (self.groups, *of_b), self.dtype),
            *b_scale,
            ("counts" if self.is_masked else "offsets", (self.groups,), "int32"),
            ("C", (*outer, self.n), self.out_dtype),
        ]


def matmul_grouped(spec: GroupedSpec) -> list[Any]:
    """Return the computation in TE, with arguments as `GroupedSpec.arguments` has them."""
    inputs = [te.placeholder(shape, dtype, name) for name, shape, dtype in spec.arguments[:-1]]
    by_name, sizes = {tensor.op.name: tensor for tensor in inputs}, inputs[-1]
    outer, zero = inputs[0].shape[:-1], tirx.const(0.0, ACCUM_DTYPE)

    def number(row: Any) -> Any:
        g = te.reduce_axis((0, spec.groups), "g")
        return te.sum((sizes(g) <= row).astype("int32"), axis=g)

    numbers = None if spec.is_masked else te.compute((spec.rows,), number, name="group")

    def total(*index: Any) -> Any:
        *row, column = index
        k = te.reduce_axis((0, spec.k), "k")
        group = row[0] if numbers is None else numbers(*row)
        is_there = row[1] < sizes(group) if numbers is None else group < spec.groups
        return te.sum(tirx.if_then_else(is_there, _product(spec, by_name, tuple(row), group, column, k), zero), axis=k)

    sums = te.compute((*outer, spec.n), total, name="C" if spec.out_dtype == ACCUM_DTYPE else "sums")
    if spec.out_dtype == ACCUM_DTYPE:
        return [*inputs, sums]
    return [*inputs, te.compute(sums.shape, lambda *index: sums(*index).astype(spec.out_dtype), name="C")]


def _product(spec: GroupedSpec, by_name: dict[str, Any], row: tuple[Any, ...], group: Any, column: Any, k: Any) -> Any:
    """Return one term of an element of C."""
    a, b = by_name["A"], by_name["B"]
    lhs, rhs = _wide(a(*row, k)), _wide(b(group, column, k) if spec.layout == "nt" else b(group, k, column))
    if not spec.is_scaled:
        return lhs * rhs
    step = k // SCALE_BLOCK
    return (lhs * by_name["A_scale"](*row, step)) * (rhs * by_name["B_scale"](group, column // SCALE_BLOCK, step))


def _wide(value: Any) -> Any:
    return value if str(value.ty.dtype) == ACCUM_DTYPE else value.astype(ACCUM_DTYPE)


def matmul_grouped_func(spec: GroupedSpec) -> Any:
    """Return the computation as a PrimFunc."""
    return te.create_prim_func(matmul_grouped(spec), index_dtype_override="int64")


def read_matmul_grouped(mod: tvm.IRModule) -> GroupedSpec | None:
    """Return the grouped GEMM that a canonical module's `main` computes, None if it is none."""
    text = canonical_text(mod)
    found = _candidates(mod["main"])
    return next((spec for spec in found if canonical_text(canonical_module(matmul_grouped_func(spec))) == text), None)


def _candidates(func: Any) -> Iterator[GroupedSpec]:
    """Yield the grouped GEMMs that a function with these parameters may compute."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    if len(args) not in (4, 6) or len(args[-2][0]) != 1 or len(args[0][0]) not in (2, 3):
        return
    (a, dtype), ((groups,), _), (c, out_dtype) = args[0], args[-2], args[-1]
    for layout in LAYOUTS:
        spec = GroupedSpec(
            rows=a[-2], groups=groups, n=c[-1], k=a[-1], dtype=dtype, out_dtype=out_dtype, layout=layout, is_masked=len(a) == 3
        )
        if [(shape, each) for _, shape, each in spec.arguments] == args:
            yield spec
