"""Owns GEMMs by a vendor's library: OpenBLAS on CPUs, cuBLASLt on GPUs, called from a function of our own.

Knows nothing of schedules. OpenBLAS gets parts of the product alone, each with loops of our own behind it for the epilogue; cuBLASLt gets
the epilogue, too, so only what it knows: a bias, an operand added, relu, gelu by tanh.

Parameters:
  library     openblas or cublaslt
  version     the library's version, as far as it counts: a kernel refuses to run with another one
  algorithm   place in what cuBLASLt's heuristic returns, from 0 on; always 0 for openblas
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tvm import IRModule
from tvm.ir import Var

from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.openblas_gemm import openblas_gemm
from kerneldecl.templates.hopper.read_gemm import GemmProblem, read_gemm
from kerneldecl.templates.shared.column_major import Product, product_of
from kerneldecl.templates.shared.library_epilogue import FusedSteps, Result, fused_steps
from kerneldecl.templates.shared.vendor_call import NULL, function_of, vendor_call
from kerneldecl.toolchain.companions import CUBLASLT_MATMUL


class _Types(NamedTuple):
    """How cuBLASLt computes with operands of a dtype: numbers of cublasComputeType_t and cudaDataType, and the dtypes that D may have."""

    compute: int
    scale: int
    out: tuple[str, ...]


_DATA_TYPES = MappingProxyType(
    {
        "float32": 0,
        "float64": 1,
        "float16": 2,
        "int8": 3,
        "int32": 10,
        "bfloat16": 14,
        "float8_e4m3fn": 28,
        "float8_e5m2": 29,
    }
)
"""cudaDataType of library_types.h."""
_FLOAT8 = _Types(68, 0, ("float16", "bfloat16", "float32"))
_COMPUTE = MappingProxyType(
    {
        ("float16", "float32"): _Types(68, 0, ("float16", "float32")),
        ("float16", "float16"): _Types(64, 2, ("float16",)),
        ("bfloat16", "float32"): _Types(68, 0, ("bfloat16", "float32")),
        ("float32", "float32"): _Types(68, 0, ("float32",)),
        ("float64", "float64"): _Types(70, 1, ("float64",)),
        ("int8", "int32"): _Types(72, 10, ("int32",)),
        ("float8_e4m3fn", "float32"): _FLOAT8,
        ("float8_e5m2", "float32"): _FLOAT8,
    }
)
"""By dtype of the operands and of the accumulators. Not TF32: cuBLASLt rounds operands to it, and the rules truncate them."""
_NO_EPILOGUE, _BIAS = 1, 4
_ACTIVATIONS = MappingProxyType({"": 0, "relu": 2, "gelu_tanh": 32})
"""Bits of cublasLtEpilogue_t, as are those above."""


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return a function that calls the library, or None where the function is no GEMM that the library takes."""
    problem = read_gemm(mod)
    product = product_of(problem) if problem else None
    if problem is None or product is None or (params["library"] == "cublaslt") != (arch.gpu is not None):
        return None
    body = _cublaslt(problem, product, params) if arch.gpu else openblas_gemm(problem, product, str(params["version"]), arch.the_cpu.cores)
    return None if body is None else function_of(problem.func_params, body)


def _cublaslt(problem: GemmProblem, product: Product, params: Mapping[str, Value]) -> Any | None:
    """Return the call of cuBLASLt; None where it does not know the dtypes or the epilogue."""
    types = _COMPUTE.get((product.dtypes[0], problem.contraction.accum_dtype))
    steps = fused_steps(_result(problem, product))
    if types is None or steps is None or product.dtypes[2] not in types.out or not _are_operands(product.dtypes[:2]):
        return None
    a, b, d = product.a, product.b, product.d
    batch, m, n, k = product.extents
    pointers = [NULL if each is None else each.data for each in (a.buffer, b.buffer, steps.add, steps.bias, d.buffer)]
    data_types = [_DATA_TYPES[dtype] for dtype in product.dtypes]
    described = [*data_types, types.compute, types.scale, _epilogue(steps), a.is_transposed, b.is_transposed]
    sizes = [m, n, k, batch, a.pitch, b.pitch, d.pitch, a.batch_stride, b.batch_stride, d.batch_stride]
    return vendor_call(CUBLASLT_MATMUL, params["version"], *pointers, params["algorithm"], *described, *sizes)


def _are_operands(dtypes: Sequence[str]) -> bool:
    """Say whether cuBLASLt multiplies two dtypes: equal ones, and either float8 with the more precise one."""
    return dtypes[0] == dtypes[1] != "float8_e5m2" or {*dtypes} == {"float8_e4m3fn", "float8_e5m2"}


def _epilogue(steps: FusedSteps) -> int:
    return (_ACTIVATIONS[steps.activation] | _BIAS * (steps.bias is not None)) or _NO_EPILOGUE


def _result(problem: GemmProblem, product: Product) -> Result:
    place = Var("batch", "int32"), Var("row", "int32"), Var("column", "int32")
    return Result(
        buffer=problem.out.buffer,
        place=problem.index_out(*place),
        fastest=place[1 if product.is_swapped else 2],
        accum_dtype=problem.contraction.accum_dtype,
        value=lambda total, values: problem.value(total, *place, values),
        aux=problem.aux(*place),
    )
