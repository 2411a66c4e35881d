"""Owns the reading of a GEMM of packed int4 weights and int8 activations, both with scales of float32.

Knows nothing of tiles, instructions or targets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import tvm

from kerneldecl.analysis.block_scales import BLOCK
from kerneldecl.analysis.packed_weights import packed_shape
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.templates.hopper.read_block_scaled import groups_stage, read_scaled_operands, rows_stage
from kerneldecl.templates.hopper.read_gemm import GemmProblem, Matrix
from kerneldecl.templates.hopper.read_quantized import PackedWeights, packed_stage
from kerneldecl.templates.hopper.split_stages import fresh_of


class PackedInt8Gemm(NamedTuple):
    """C[m, n] = epilogue(sum over k of A[m, k] * a_scales[…] * (W[n, k] - 8) * scales[k / group, n]); scales may be [n]."""

    gemm: GemmProblem
    """The GEMM of A's values as they are stored; its operand B is no argument."""
    weights: PackedWeights
    a_scales: Any
    """Buffer [m], or [k / 128, m]."""


def read_packed_int8(mod: tvm.IRModule) -> PackedInt8Gemm | None:
    """Return the GEMM of packed weights and int8 that a module's function is, None where it is another computation."""
    if (scaled := read_scaled_operands(mod)) is None:
        return None
    gemm, rest, a, b = scaled
    _, m, n, k = gemm.extents
    group = _group_of(b, n, k)
    if group is None or match_digest(a) not in {match_digest(rows_stage(m, k, "int8")), match_digest(groups_stage(m, k, "int8", BLOCK))}:
        return None
    a_values, a_scales = fresh_of(gemm, rest, a.params[:2])
    values, scales = fresh_of(gemm, rest, b.params[:2])
    stored = Matrix(buffer=a_values, dtype="int8", rows=(m, k), columns=(k, 1))
    read = replace(gemm, func_params=gemm.func_params[:-2], a=stored)
    return PackedInt8Gemm(read, PackedWeights(n, k, group, values, scales, None), a_scales)


def _group_of(stage: Any, n: int, k: int) -> int | None:
    """Return the weights along k that share a scale, whole k-tiles; None where a stage does not dequantise packed weights so."""
    values, scales, weights = stage.params
    shape = [int(extent) for extent in scales.shape]
    is_packed = [int(extent) for extent in values.shape] == list(packed_shape(n, k)) and str(values.dtype) == "uint8"
    if not is_packed or str(weights.dtype) != "float32" or str(scales.dtype) != "float32":
        return None
    groups = 1 if shape == [n] else shape[0]
    if shape not in ([n], [groups, n]) or k % (groups * BLOCK):
        return None
    return k // groups if match_digest(stage) == match_digest(packed_stage(weights, scales, has_zeros=False)) else None
