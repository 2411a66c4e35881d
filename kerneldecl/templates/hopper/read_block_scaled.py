"""Owns the reading of a GEMM of float8 with a scale for each 1 x 128 block of A and each 128 x 128 block of B.

Knows nothing of tiles, instructions or targets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import tvm
from tvm import te

from kerneldecl.analysis.block_scales import BLOCK, DTYPES
from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.templates.hopper.read_gemm import GemmProblem, Matrix, read_gemm
from kerneldecl.templates.hopper.split_stages import fresh_of, split_stages


class BlockScaledGemm(NamedTuple):
    """C[m, n] = epilogue(sum over k of A[m, k] * a_scales[k / 128, m] * B[n, k] * b_scales[n / 128, k / 128])."""

    gemm: GemmProblem
    """The GEMM of the values as they are stored."""
    a_scales: Any
    b_scales: Any


def read_block_scaled(mod: tvm.IRModule) -> BlockScaledGemm | None:
    """Return the GEMM with scales of blocks that a module's function is, None where it is another computation."""
    split = split_stages(mod["main"], 2)
    if split is None or any(len(stage.params) != 3 for stage in split[0]):
        return None
    stages, rest = split
    gemm = read_gemm(canonical_module(rest))
    if gemm is None or gemm.extents[0] != 1:
        return None
    _, m, n, k = gemm.extents
    results = gemm.func_params[-2:]
    at = [next((i for i, result in enumerate(results) if result.same_as(matrix.buffer)), None) for matrix in (gemm.a, gemm.b)]
    if sorted(at, key=str) != [0, 1]:
        return None
    a, b = (stages[i] for i in at if i is not None)
    dtype = str(a.params[0].dtype)
    if dtype not in DTYPES or k % BLOCK or str(b.params[0].dtype) != dtype:
        return None
    if match_digest(a) != match_digest(_rows(m, k, dtype)) or match_digest(b) != match_digest(_blocks(n, k, dtype)):
        return None
    a_values, a_scales = fresh_of(gemm, rest, a.params[:2])
    b_values, b_scales = fresh_of(gemm, rest, b.params[:2])
    stored = [Matrix(buffer=values, dtype=dtype, rows=(rows, k), columns=(k, 1)) for values, rows in ((a_values, m), (b_values, n))]
    return BlockScaledGemm(replace(gemm, func_params=gemm.func_params[:-2], a=stored[0], b=stored[1]), a_scales, b_scales)


def _rows(m: int, k: int, dtype: str) -> Any:
    """Return the stage that multiplies values by a scale for each 128 elements of a row."""
    values, scale = te.placeholder((m, k), dtype), te.placeholder((k // BLOCK, m), "float32")
    result = te.compute((m, k), lambda row, at: values(row, at).astype("float32") * scale(at // BLOCK, row))
    return canonical_module(te.create_prim_func([values, scale, result], index_dtype_override="int64"))["main"]


def _blocks(n: int, k: int, dtype: str) -> Any:
    """Return the stage that multiplies values by a scale for each 128 x 128 block."""
    values, scale = te.placeholder((n, k), dtype), te.placeholder((-(-n // BLOCK), k // BLOCK), "float32")
    result = te.compute((n, k), lambda row, at: values(row, at).astype("float32") * scale(row // BLOCK, at // BLOCK))
    return canonical_module(te.create_prim_func([values, scale, result], index_dtype_override="int64"))["main"]
