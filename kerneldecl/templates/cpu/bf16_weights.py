"""Owns how weights of 4 or 8 bits become vectors of bfloat16 on CPUs, and the instructions that multiply such vectors.

Knows nothing of register tiles, of loops or of how a function is recognised.

A vector is 16 integers of 32 bits, each a pair of neighbours along k. A weight of 4 bits is one of 16 values for each scale. Those are
computed once for a group of a row of W, rounded to bfloat16, and vpermw looks 32 weights up at once: pairs lie in one byte of W as they lie
in A. Weights of 8 bits are computed in float32 and rounded, a vector of bfloat16 from two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.ir import Range
from tvm.script import tirx as T
from tvm.sym import Analyzer

from kerneldecl.templates.cpu.quantized_kernel import QuantizedGemm
from kerneldecl.templates.cpu.splice import Splice
from kerneldecl.templates.cpu.vectors import elements, kept, load, variable

LANES = 16
"""Sums of a vector, and pairs of weights; as many values as a code of 4 bits has."""
STEP = 2 * LANES
"""Weights that one instruction multiplies."""
PAIRS = f"int32x{LANES}"
"""Dtype of a vector of pairs."""
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


def dot(sums: Any, a: Any, b: Any) -> Any:
    """Return a vector of accumulators after vdpbf16ps: to each, the dot product of a pair of two vectors is added."""
    return tirx.call_pure_extern(f"float32x{LANES}", DOT, sums, a, b)


@dataclass(frozen=True)
class Weights:
    """The weights of a GEMM, in the arguments of its kernel."""

    gemm: QuantizedGemm
    splice: Splice
    stored: Any
    """W, [n, k / planes] in bytes."""
    codes: Splice
    """Reads the byte of W from what stands for `sums`."""

    @classmethod
    def of(cls, gemm: QuantizedGemm, args: tuple[Any, ...]) -> Weights:
        codes = Splice(gemm.args, args, gemm.args[gemm.codes])
        return cls(gemm, Splice(gemm.args, args, gemm.sums), args[gemm.codes], codes)

    @property
    def has_tables(self) -> bool:
        return self.gemm.planes > 1

    def table(self, column: Any, k: Any) -> Any:
        """Return the weights of all codes at a place along k, as words of 16 bits, twice: vpermw looks at five bits of an index."""
        found = variable(LANES)
        with T.vectorized(LANES) as lane:
            value = self.codes.of(self.gemm.weight, (column, k), tirx.Cast("uint8", lane))
            T.buffer_store(found, Analyzer().simplify(value), [lane])
        values = load(found, (0,), LANES)
        return kept(tirx.call_pure_extern(f"int16x{STEP}", ROUND, values, values))

    def looked_up(self, table: Any, column: Any, step: Any) -> Any:
        """Return 32 weights: for each byte that of its low code, and above it that of its high one. Bits above an index do not count."""
        codes = kept(tirx.Cast(PAIRS, elements(self.stored, (column, step * LANES), LANES)))
        indices = tirx.reinterpret(f"int16x{STEP}", codes | codes << tirx.Broadcast(T.int32(12), LANES))
        return kept(tirx.reinterpret(PAIRS, tirx.call_llvm_pure_intrin(f"int16x{STEP}", LOOK_UP, table, indices)))

    def computed(self, column: Any, group: Any, step: Any) -> Any:
        """Return 32 weights of 8 bits of a step of a group: two vectors of float32, rounded to one."""
        gemm, analyzer = self.gemm, Analyzer()
        for var, extent in ((step, gemm.group // STEP), (group, gemm.k // gemm.group)):
            analyzer.bind(var, Range(0, extent))
        halves = [variable(LANES) for _ in range(2)]
        for number, half in enumerate(halves):
            with T.vectorized(LANES) as lane:
                analyzer.bind(lane, Range(0, LANES))
                k = group * gemm.group + step * STEP + number * LANES + lane
                T.buffer_store(half, analyzer.simplify(self.splice.of(gemm.weight, (column, k))), [lane])
        low, high = (load(half, (0,), LANES) for half in halves)
        return kept(tirx.reinterpret(PAIRS, tirx.call_pure_extern(f"int16x{STEP}", ROUND, high, low)))
