"""Owns gated GEMMs, of which one half of the columns gates the other: their canonical TensorIR, and how a function is recognised as one.

Knows nothing of schedules, targets, or who declares them. As in `compiler.rowwise`, a function is recognised by its canonical text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of


def _gelu(x: Any) -> Any:
    dtype = str(x.ty.dtype)
    return x * (tirx.const(0.5, dtype) + te.erf(x * tirx.const(0.5**0.5, dtype)) * tirx.const(0.5, dtype))


def _gelu_tanh(x: Any) -> Any:
    one, bend = tirx.const(1, str(x.ty.dtype)), tirx.const(0.044715, str(x.ty.dtype))
    return (
        tirx.const(0.5, str(x.ty.dtype))
        * x
        * (one + te.tanh(tirx.const(math.sqrt(2 / math.pi), str(x.ty.dtype)) * x * (one + bend * x * x)))
    )


GATES: Mapping[str, Callable[[Any], Any]] = {
    "silu": lambda x: x * te.sigmoid(x),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: te.max(x, tirx.const(0, str(x.ty.dtype))),
    "sigmoid": te.sigmoid,
}
"""What is made of the first half, by name: swiglu's is silu, geglu's gelu."""


@dataclass(frozen=True)
class GatedGemmSpec:
    """C[m, n] = gate(A @ B[:n].T) * (A @ B[n:].T), of A [m, k] and B [2 n, k]."""

    gate: str
    m: int
    n: int
    k: int
    dtype: str
    accum_dtype: str
    out_dtype: str

    def lowered(self) -> list[Any]:
        """Return the computation in TE: one GEMM of both halves, then one element of each."""
        a = te.placeholder((self.m, self.k), self.dtype, "A")
        b = te.placeholder((2 * self.n, self.k), self.dtype, "B")
        k = te.reduce_axis((0, self.k), "k")

        def product(i: Any, j: Any) -> Any:
            return te.sum(a(i, k).astype(self.accum_dtype) * b(j, k).astype(self.accum_dtype), axis=k)

        halves = te.compute((self.m, 2 * self.n), product, name="halves")
        out = te.compute((self.m, self.n), lambda i, j: self.gated(halves(i, j), halves(i, self.n + j)), name="C")
        return [a, b, out]

    def gated(self, first: Any, second: Any) -> Any:
        """Return an element of C, given those of both products."""
        return (GATES[self.gate](first) * second).astype(self.out_dtype)


def read_gated_gemm(mod: tvm.IRModule) -> GatedGemmSpec | None:
    """Return the gated GEMM that a canonical module's `main` computes, None if it is none."""
    candidates = list(_candidates(mod["main"]))
    if not candidates:
        return None
    text = canonical_text(mod)
    return next((spec for spec in candidates if canonical_text(_module(spec)) == text), None)


def _module(spec: GatedGemmSpec) -> tvm.IRModule:
    return canonical_module(te.create_prim_func(spec.lowered(), index_dtype_override="int64"))


def _candidates(func: Any) -> Iterator[GatedGemmSpec]:
    """Yield the gated GEMMs with these parameters."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    shapes, dtypes = [shape for shape, _ in args], [dtype for _, dtype in args]
    if [len(shape) for shape in shapes] != [2, 2, 2] or dtypes[0] != dtypes[1]:
        return
    (m, k), weights, (out_m, n) = shapes
    if weights == (2 * n, k) and out_m == m:
        accum = "float64" if dtypes[0] == "float64" else "float32"
        yield from (GatedGemmSpec(gate, m, n, k, dtypes[0], accum, dtypes[2]) for gate in GATES)
