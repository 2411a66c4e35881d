"""Owns the reading of a GEMM of 8-bit values whose scales vary along k: those of B have blocks or groups, those of A groups or whole rows.

Knows nothing of tiles, instructions or targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import tvm
from tvm import te

from kerneldecl.analysis.block_scales import BLOCK, DTYPES
from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.templates.hopper.read_gemm import GemmProblem, Matrix, read_gemm
from kerneldecl.templates.hopper.split_stages import fresh_of, split_stages


class ScaledOperands(NamedTuple):
    """A GEMM without a batch, both of whose operands come out of stages of values and scales."""

    gemm: GemmProblem
    """The GEMM of what the stages compute, its last two parameters."""
    rest: Any
    """The function without the stages."""
    a: Any
    """Stage (values, scales, result) of A."""
    b: Any


class BlockScaledGemm(NamedTuple):
    """C[m, n] = epilogue(sum over k of A[m, k] * a_scales[k / 128, m] * B[n, k] * b_scales[n / 128, k / 128]).

    a_scales may be [m] instead, b_scales [k / group, n], or [n] where those of a vary along k.
    """

    gemm: GemmProblem
    """The GEMM of the values as they are stored."""
    a_scales: Any
    b_scales: Any
    b_group: int
    """Elements along k that share a scale of a column; 0 where B has blocks, or scales that do not vary along k."""


def read_scaled_operands(mod: tvm.IRModule) -> ScaledOperands | None:
    """Return the GEMM and the stages of its operands, None where a module's function is no such GEMM."""
    split = split_stages(mod["main"], 2)
    if split is None or any(len(stage.params) != 3 for stage in split[0]):
        return None
    stages, rest = split
    gemm = read_gemm(canonical_module(rest))
    if gemm is None or gemm.extents[0] != 1:
        return None
    results = gemm.func_params[-2:]
    at = [next((i for i, result in enumerate(results) if result.same_as(matrix.buffer)), None) for matrix in (gemm.a, gemm.b)]
    if sorted(at, key=str) != [0, 1]:
        return None
    return ScaledOperands(gemm, rest, *(stages[i] for i in at if i is not None))


def read_block_scaled(mod: tvm.IRModule) -> BlockScaledGemm | None:
    """Return the GEMM with scales of blocks that a module's function is, None where it is another computation."""
    if (scaled := read_scaled_operands(mod)) is None:
        return None
    gemm, rest, a, b = scaled
    _, m, n, k = gemm.extents
    dtype = str(a.params[0].dtype)
    if dtype not in DTYPES or k % BLOCK or str(b.params[0].dtype) != dtype:
        return None
    b_group = _group_of(b, n, k, dtype)
    varies = len(a.params[1].shape) > 1 or len(b.params[1].shape) > 1
    known = {match_digest(groups_stage(m, k, dtype, BLOCK)), match_digest(rows_stage(m, k, dtype))}
    if b_group is None or not varies or match_digest(a) not in known:
        return None
    a_values, a_scales = fresh_of(gemm, rest, a.params[:2])
    b_values, b_scales = fresh_of(gemm, rest, b.params[:2])
    stored = [Matrix(buffer=values, dtype=dtype, rows=(rows, k), columns=(k, 1)) for values, rows in ((a_values, m), (b_values, n))]
    return BlockScaledGemm(replace(gemm, func_params=gemm.func_params[:-2], a=stored[0], b=stored[1]), a_scales, b_scales, b_group)


def _group_of(stage: Any, n: int, k: int, dtype: str) -> int | None:
    """Return the elements along k that share a scale of B's columns, 0 where none do or there are blocks; None of another stage."""
    if match_digest(stage) in {match_digest(_blocks(n, k, dtype)), match_digest(rows_stage(n, k, dtype))}:
        return 0
    shape = [int(extent) for extent in stage.params[1].shape]
    if len(shape) < 2 or shape[1] != n or k % (shape[0] * BLOCK):
        return None
    group = k // shape[0]
    return group if match_digest(stage) == match_digest(groups_stage(n, k, dtype, group)) else None


def groups_stage(rows: int, k: int, dtype: str, group: int) -> Any:
    """Return the stage that multiplies values by a scale for each group of elements of a row."""
    return _stage((rows, k), dtype, (k // group, rows), lambda row, at: (at // group, row))


def rows_stage(m: int, k: int, dtype: str) -> Any:
    """Return the stage that multiplies values by a scale for each row."""
    return _stage((m, k), dtype, (m,), lambda row, _: (row,))


def _blocks(n: int, k: int, dtype: str) -> Any:
    """Return the stage that multiplies values by a scale for each 128 x 128 block."""
    return _stage((n, k), dtype, (-(-n // BLOCK), k // BLOCK), lambda row, at: (row // BLOCK, at // BLOCK))


def _stage(shape: tuple[int, int], dtype: str, scales: tuple[int, ...], place: Callable[[Any, Any], tuple[Any, ...]]) -> Any:
    """Return the stage that multiplies values by the scales that stand at places."""
    values, scale = te.placeholder(shape, dtype), te.placeholder(scales, "float32")
    result = te.compute(shape, lambda row, at: values(row, at).astype("float32") * scale(*place(row, at)))
    return canonical_module(te.create_prim_func([values, scale, result], index_dtype_override="int64"))["main"]
