"""Owns GEMMs of few rows with weights of 4 or 8 bits on CPUs: dot products along k, weights dequantised in registers.

Knows nothing of how its parameters are chosen, and recognises the computation by its structure, never by its names: an operand [n, k] is
made of bytes, element by element, and factors are shared by neighbours along k.

Weights are not rounded to 16 bits before they are multiplied.

Parameters:
  rows    rows of W of a register tile: 1 to 8
  tile_m  rows of A of a register tile: 1 to 16

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tvm import IRModule, tirx
from tvm.ir import TensorLoad
from tvm.tirx import Add, BufferStore, Cast, FloorDiv, IntImm, Mul
from tvm_ffi import structural, structural_equal

from kerneldecl.analysis.cpu_params import CpuQuantizedParams
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.cpu.gemm import Gemm, read_gemm
from kerneldecl.templates.cpu.quantized_kernel import QuantizedGemm, build
from kerneldecl.templates.cpu.splice import Element
from kerneldecl.templates.shared.contraction import merge

INTEGERS = {"uint8", "int8"}


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the GEMM as one custom kernel, or None where the function is none or a group is no whole vectors."""
    chosen = CpuQuantizedParams(**{name: params[name] for name in CpuQuantizedParams._fields})  # type: ignore[arg-type]
    lanes = arch.the_cpu.vector_bytes // dtype_bytes("float32")
    gemm = read_gemm(mod)
    found = read(gemm) if gemm is not None and chosen.fits() and lanes > 1 else None
    if found is None:
        return None
    # Groups of half a vector of bytes, as NVFP4's are for AVX-512, take vectors of half the lanes.
    lanes = lanes if found.group % (found.planes * lanes) == 0 else lanes // 2
    return None if lanes < 2 or found.group % (found.planes * lanes) else build(found, chosen, lanes)


def read(gemm: Gemm) -> QuantizedGemm | None:
    """Return the GEMM with integer weights that a schedule's function is, None where it is something else."""
    sch, axes = gemm.sch, gemm.axes
    m, n, k = gemm.mnk
    if gemm.rest or axes.batch or axes.b.position not in gemm.computed or axes.b.spatial_dim != 0 or not gemm.epilogue:
        return None
    block, last = sch.get(gemm.block), sch.get(merge(sch, gemm.epilogue))
    weight = _of_producer(sch.get(gemm.computed[axes.b.position]))
    a = _of_producer(sch.get(gemm.computed[axes.a.position])) if axes.a.position in gemm.computed else _operand(block, axes.a.position)
    args, rows = tuple(sch.mod["main"].params), [axis.var for axis in last.iter_vars]
    is_plain = isinstance(last.body, BufferStore) and last.body.buffer.same_as(args[-1]) and _are(last.body.indices, rows)
    if weight is None or a is None or not is_plain or axes.a.spatial_dim != 0 or not _is_product(block):
        return None
    value = weight.value.value if isinstance(weight.value, Cast) else weight.value
    stored = _distinct(each for each in _loads(value) if str(each.source.ty.dtype) in INTEGERS and len(each.indices) == 2)
    weights = [each.source for each in stored if int(each.source.ty.shape[0]) == n and _is_weight(each, k)]
    if str(value.ty.dtype) != "float32" or len(weights) != 1 or not any(each.same_as(weights[0]) for each in args):
        return None
    return QuantizedGemm(
        args=args,
        m=m,
        n=n,
        k=k,
        planes=k // int(weights[0].ty.shape[1]),
        group=_group(value, k),
        a=a,
        codes=next(at for at, each in enumerate(args) if each.same_as(weights[0])),
        weight=Element(weight.axes, value),
        weight_dtype=str(weight.value.ty.dtype),
        sums=block.writes[0].source,
        result=Element(tuple(rows), last.body.value),
    )


def _of_producer(block: Any) -> Element | None:
    """Return how a block computes an element of an operand; None where it does not write each element at its axes."""
    axes = tuple(axis.var for axis in block.iter_vars)
    return Element(axes, block.body.value) if isinstance(block.body, BufferStore) and _are(block.body.indices, axes) else None


def _operand(block: Any, position: int) -> Element:
    """Return an argument's elements as they are."""
    axes = tuple(tirx.Var(f"i{at}", "int64") for at in range(2))
    return Element(axes, block.reads[position].source[axes])


def _are(indices: Sequence[Any], axes: Sequence[Any]) -> bool:
    return len(indices) == len(axes) and all(index.same_as(axis) for index, axis in zip(indices, axes, strict=True))


def _is_product(block: Any) -> bool:
    """Say whether a block adds up products of two elements in float32."""
    body = block.body
    if not isinstance(body, BufferStore) or not isinstance(body.value, Add) or not isinstance(body.value.b, Mul):
        return False
    factors = [each.value if isinstance(each, Cast) else each for each in (body.value.b.a, body.value.b.b)]
    return str(body.value.ty.dtype) == "float32" and all(isinstance(each, TensorLoad) for each in factors)


def _loads(expr: Any) -> list[Any]:
    found: list[Any] = []
    structural.structural_walk(expr, [(TensorLoad, found.append)])
    return found


def _distinct(loads: Iterable[Any]) -> list[Any]:
    """Return the first of equal loads: an expression may use an element twice."""
    found: list[Any] = []
    for load in loads:
        if not any(structural_equal(load, other) for other in found):
            found.append(load)
    return found


def _is_weight(load: Any, k: int) -> bool:
    """Say whether a load is of W, whose columns are those of k or half as many."""
    return int(load.source.ty.shape[1]) * 2 in (k, 2 * k)


def _group(value: Any, k: int) -> int:
    """Return the neighbours along k that share all factors: the divisor of the place along k that is no pair's."""
    found: set[int] = set()
    structural.structural_walk(value, [(FloorDiv, lambda node: found.add(int(node.b)) if isinstance(node.b, IntImm) else None)])
    return min(found - {2}, default=k)
