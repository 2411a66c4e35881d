"""Owns the kernel of GEMMs of few rows of bfloat16 with weights of 4 or 8 bits on CPUs: weights in bfloat16, dot products of pairs.

Knows nothing of how its parameters are chosen or of how a function is recognised.

vdpbf16ps multiplies pairs of neighbours along k and adds both products to a float32: twice as many multiplications as by a fused
multiply-add of float32. A weight of 4 bits is one of 16 values for each scale. Those are computed once for a group of a row of W, rounded
to bfloat16, and vpermw looks 32 weights up at once: pairs lie in one byte of W as they lie in A. Weights of 8 bits are computed in float32
and rounded, a vector of bfloat16 from two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Range
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.sym import Analyzer
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.cpu_params import CpuQuantizedParams
from kerneldecl.templates.cpu.quantized_kernel import TASK_TILES, QuantizedGemm, Tiles, summed
from kerneldecl.templates.cpu.splice import Element, Splice
from kerneldecl.templates.cpu.vectors import elements, kept, load, loop, parallel, spread, store, variable

LANES = 16
"""Sums of a vector, and pairs of weights; as many values as a code of 4 bits has."""
STEP = 2 * LANES
"""Weights that one instruction multiplies."""
LOOK_UP = "llvm.x86.avx512.permvar.hi.512"
DOT = "kd_dot_bf16"
ROUND = "kd_round_bf16"
LLVM = f"""
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
define linkonce_odr hidden <16 x float> @{DOT}(<16 x float> %sums, <16 x i32> %a, <16 x i32> %b) alwaysinline {{
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sums, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}}
define linkonce_odr hidden <32 x i16> @{ROUND}(<16 x float> %high, <16 x float> %low) alwaysinline {{
  %r = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %high, <16 x float> %low)
  %s = bitcast <32 x bfloat> %r to <32 x i16>
  ret <32 x i16> %s
}}
"""
"""Both instructions for vectors that TVM has: it passes bfloat16 on as integers, which LLVM's intrinsics do not take."""


@dataclass(frozen=True)
class Kernel(Tiles):
    """One kernel, while it is written."""

    splice: Splice
    strips: Any
    """A, pairs of bfloat16 as integers: [strips, k / STEP, tile_m, LANES]."""
    weights: Any
    """W, [n, k / 2] in bytes."""
    value: Element
    """A weight of a column of C and a place along k, that reads the byte from `sums` of `codes`."""
    codes: Splice


def build(gemm: QuantizedGemm, params: CpuQuantizedParams, a: int) -> tvm.IRModule:
    """Return a module whose `main` is the kernel; A is the argument at this position."""
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        args = tuple(T.arg(f"arg{at}", T.Buffer(tuple(each.ty.shape), str(each.ty.dtype))) for at, each in enumerate(gemm.args))
        codes = Splice(gemm.args, args, gemm.args[gemm.codes])
        tile_m = min(params.tile_m, gemm.m)
        strips = T.alloc_buffer((-(-gemm.m // tile_m), gemm.k // STEP, tile_m, LANES), "int32")
        kernel = Kernel(gemm, params, Splice(gemm.args, args, gemm.sums), strips, args[gemm.codes], gemm.weight, codes)
        _copy(kernel, args[a])
        tiles = -(-gemm.n // kernel.rows)
        with T.attr(T.int32(0), "pragma_import_llvm", LLVM), parallel(-(-tiles // TASK_TILES)) as task, loop(TASK_TILES) as tile:
            # The last tiles begin earlier, so that they are whole.
            column = T.bind(tirx.min((task * TASK_TILES + tile) * kernel.rows, T.int64(gemm.n - kernel.rows)))
            with loop(-(-gemm.m // kernel.tile_m)) as strip:
                _tile(kernel, strip, column)
    return tvm.IRModule({"main": builder.get()})


def _copy(kernel: Kernel, a: Any) -> None:
    """Copy A in the order in which tiles read it: rows of a power of two of bytes would meet in few sets of the L1 cache."""
    strips, steps, tile_m, _ = kernel.strips.shape
    with loop(strips) as strip, loop(tile_m) as row, loop(steps) as step:
        pairs = elements(a, (kernel.first_row(strip) + row, step * STEP), STEP)
        store(kernel.strips, (strip, step, row, 0), tirx.reinterpret(f"int32x{LANES}", pairs))


def _tile(kernel: Kernel, strip: Any, column: Any) -> None:
    """Compute a register tile: dot products of some rows of A and of W, each in a vector of partial sums."""
    gemm = kernel.gemm
    sums = [[variable(LANES) for _ in range(kernel.tile_m)] for _ in range(kernel.rows)]
    for several in sums:
        for total in several:
            store(total, (0,), spread(0.0, LANES))
    steps = gemm.group // STEP
    with loop(gemm.k // gemm.group) as group:
        tables = [_table(kernel, column + at, group) for at in range(kernel.rows)] if gemm.planes > 1 else []
        with loop(steps) as step:
            at_k = T.bind(group * steps + step)
            if tables:
                weights = [_looked_up(kernel, table, (column + at, at_k * LANES)) for at, table in enumerate(tables)]
            else:
                weights = [_computed(kernel, column + at, (group, step)) for at in range(kernel.rows)]
            for number in range(kernel.tile_m):
                pairs = kept(elements(kernel.strips, (strip, at_k, number, 0), LANES))
                for several, weight in zip(sums, weights, strict=True):
                    total = several[number]
                    store(total, (0,), tirx.call_pure_extern(f"float32x{LANES}", DOT, load(total, (0,), LANES), pairs, weight))
    for at, several in enumerate(sums):
        for number, total in enumerate(several):
            index = (kernel.first_row(strip) + number, column + at)
            T.buffer_store(kernel.splice.args[-1], kernel.splice.of(gemm.result, index, summed(total, LANES)), list(index))


def _table(kernel: Kernel, column: Any, group: Any) -> Any:
    """Return the weights of all codes of a group, in bfloat16 as words of 16 bits, twice: vpermw looks at five bits of an index."""
    found = variable(LANES)
    with T.vectorized(LANES) as lane:
        value = kernel.codes.of(kernel.value, (column, group * kernel.gemm.group), tirx.Cast("uint8", lane))
        T.buffer_store(found, Analyzer().simplify(value), [lane])
    values = load(found, (0,), LANES)
    return kept(tirx.call_pure_extern(f"int16x{STEP}", ROUND, values, values))


def _looked_up(kernel: Kernel, table: Any, place: tuple[Any, Any]) -> Any:
    """Return 32 weights: for each byte that of its low code, and above it that of its high one. Bits above an index do not count."""
    codes = kept(tirx.Cast(f"int32x{LANES}", elements(kernel.weights, place, LANES)))
    indices = tirx.reinterpret(f"int16x{STEP}", codes | codes << tirx.Broadcast(T.int32(12), LANES))
    return kept(tirx.reinterpret(f"int32x{LANES}", tirx.call_llvm_pure_intrin(f"int16x{STEP}", LOOK_UP, table, indices)))


def _computed(kernel: Kernel, column: Any, place: tuple[Any, Any]) -> Any:
    """Return 32 weights of 8 bits: two vectors of float32, rounded to one."""
    gemm, (group, step) = kernel.gemm, place
    analyzer = Analyzer()
    for var, extent in ((step, gemm.group // STEP), (group, gemm.k // gemm.group)):
        analyzer.bind(var, Range(0, extent))
    halves = [variable(LANES) for _ in range(2)]
    for number, half in enumerate(halves):
        with T.vectorized(LANES) as lane:
            analyzer.bind(lane, Range(0, LANES))
            k = group * gemm.group + step * STEP + number * LANES + lane
            T.buffer_store(half, analyzer.simplify(kernel.splice.of(kernel.value, (column, k))), [lane])
    low, high = (load(half, (0,), LANES) for half in halves)
    return kept(tirx.reinterpret(f"int32x{LANES}", tirx.call_pure_extern(f"int16x{STEP}", ROUND, high, low)))
