"""Owns what a maximum or a minimum of floating-point numbers is where one of them is NaN: NaN, as in NumPy and torch.

Knows nothing of schedules or of what is computed.

TVM's Max and Min leave that open: its code gives the other operand, or the second one. A computation whose attribute `kerneldecl.nan` is
"ignore" keeps TVM's code, which is cheaper on CPUs and on GPUs without `max.NaN`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import TensorLoad
from tvm_ffi import structural

from kerneldecl.model import Gpu

ATTRIBUTE = "kerneldecl.nan"
IGNORE = "ignore"
_KINDS = (tirx.Max, tirx.Min)
FIRST_CAPABILITY = (8, 0)
"""First compute capability with max.NaN and min.NaN of float32 (PTX ISA, section max)."""


def carried(func: Any, of: Any) -> Any:
    """Return a function with what the attributes of a computation that it implements say of NaN."""
    said = (of.attrs or {}).get(ATTRIBUTE)
    return func if said is None else func.with_attr(ATTRIBUTE, said)


def nan_results(mod: tvm.IRModule) -> tvm.IRModule:
    """Return lowered functions for a CPU whose maxima and minima are selections that give NaN."""
    done = {name: _selecting(func) if isinstance(func, tirx.PrimFunc) and gives_nan(func) else func for name, func in mod.functions.items()}
    return tvm.IRModule(done, attrs=mod.attrs)


def gives_nan(func: Any) -> bool:
    """Say whether a function has maxima or minima that must give NaN."""
    if str((func.attrs or {}).get(ATTRIBUTE, "")) == IGNORE:
        return False
    found: list[Any] = []
    structural.structural_walk(func.body, [(kind, lambda node: found.append(node) if _is_float(node) else None) for kind in _KINDS])
    return bool(found)


def _is_float(expr: Any) -> bool:
    return str(expr.ty.dtype).startswith(("float", "bfloat"))


def _selecting(func: Any) -> Any:
    count = itertools.count()

    def selected(node: Any) -> Any:
        return _selection(node, count) if _is_float(node) else node

    return func.with_body(structural.structural_map(func.body, [(kind, selected) for kind in _KINDS], order="post"))


def _selection(node: Any, count: Iterator[int]) -> Any:
    """Return a maximum or minimum as comparisons, which are false for NaN.

    With a constant c, max(a, c) is `a < c ? c : a`: one instruction of x86, as is TVM's own.
    """
    beyond = tirx.LT if isinstance(node, tirx.Max) else tirx.GT
    if _is_number(node.a) and not _is_number(node.b):
        return _selection(type(node)(node.b, node.a), count)
    a, lets = _named(node.a, [], count)
    if _is_number(node.b):
        result = tirx.Select(beyond(a, node.b), node.b, a)
    else:
        b, lets = _named(node.b, lets, count)
        result = tirx.Select(tirx.EQ(b, b), tirx.Select(beyond(a, b), b, a), b)
    for variable, value in reversed(lets):
        result = tirx.Let(variable, value, result)
    return result


def _named(expr: Any, lets: list[tuple[Any, Any]], count: Iterator[int]) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return an expression that may be written several times, and the variables with their values that it needs."""
    if isinstance(expr, tirx.Var | TensorLoad | tirx.FloatImm):
        return expr, lets
    variable = tirx.Var(f"operand{next(count)}", str(expr.ty.dtype))
    return variable, [*lets, (variable, expr)]


def _is_number(expr: Any) -> bool:
    value = expr.value if isinstance(expr, tirx.Broadcast) else expr
    return isinstance(value, tirx.FloatImm) and not math.isnan(value.value)


_BY_SELECTION = "(a != a || a {beyond} b) ? a : b"
_CUDA_SOURCE = """
__device__ __forceinline__ float kd_{name}(float a, float b) {{
  {float32}
}}
__device__ __forceinline__ double kd_{name}(double a, double b) {{ return {selection}; }}
{halves}template <typename A, typename B>
__device__ __forceinline__ auto kd_{name}(A a, B b) {{ return {name}(a, b); }}
"""
_HALF = """__device__ __forceinline__ {dtype} kd_{name}({dtype} a, {dtype} b) {{ return __h{name}_nan(a, b); }}
"""
_FLOAT32 = 'float c; asm("{name}.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c;'
_DEFINITIONS = "#define max kd_max\n#define min kd_min\n"
_KERNEL = 'extern "C" __global__'


def has_instruction(gpu: Gpu) -> bool:
    return gpu.compute_capability >= FIRST_CAPABILITY


def with_nan_in_cuda(source: str, *, in_one: bool) -> str:
    """Return CUDA source whose kernels' `max` and `min` give NaN: of float32 `in_one` instruction, or by comparisons."""
    text = "".join(_functions(source, name, beyond, in_one=in_one) for name, beyond in (("max", ">"), ("min", "<")))
    before, kernel, after = source.partition(_KERNEL)
    return f"{before}{text}{_DEFINITIONS}{kernel}{after}"


def _functions(source: str, name: str, beyond: str, *, in_one: bool) -> str:
    selection = _BY_SELECTION.format(beyond=beyond)
    headers = {"half": "cuda_fp16.h", "nv_bfloat16": "cuda_bf16.h"}
    halves = "".join(_HALF.format(dtype=dtype, name=name) for dtype, header in headers.items() if header in source)
    float32 = _FLOAT32.format(name=name) if in_one else f"return {selection};"
    return _CUDA_SOURCE.format(name=name, float32=float32, selection=selection, halves=halves)
