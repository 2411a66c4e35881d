"""float32 that is read as TF32: what it computes, and how recognition, keys and other GEMMs distinguish it from float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from kerneldecl.analysis.contraction import Contraction, contraction_of
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import target_of
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.tfloat32 import truncated
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import wgmma_matmul

ROOT = Path(__file__).parents[2]
H200 = load_arch(ROOT, "h200")
SIZES = {"m": 32, "n": 48, "k": 64, "layout": "nt"}


def gemm(a_read: Any, b_read: Any) -> tvm.IRModule:
    """Return a GEMM whose operands' elements are read through two functions."""
    a, b = te.placeholder((32, 64), "float32", "A"), te.placeholder((48, 64), "float32", "B")
    k = te.reduce_axis((0, 64), "k")
    c = te.compute((32, 48), lambda i, j: te.sum(a_read(a[i, k]) * b_read(b[j, k]), axis=k), "C")
    return tvm.IRModule({"main": te.create_prim_func([a, b, c])})


def operands(mod: tvm.IRModule) -> tuple[str, str, bool]:
    found = contraction_of(iter_space(mod))
    assert isinstance(found, Contraction), found
    return found.a.dtype, found.b.dtype, found.is_plain


def test_drops_thirteen_bits_and_keeps_what_is_no_number() -> None:
    values = np.array([1 + 2.0**-10, 1 + 2.0**-11, -(2 - 2.0**-23), 3e-39, 1e-45, -0.0, np.inf, -np.inf, np.nan], "float32")
    x = te.placeholder(values.shape, "float32", "x")
    y = te.compute(values.shape, lambda i: truncated(x[i]), "y")
    kernel = tvm.compile(te.create_prim_func([x, y]), target=target_of(load_arch(ROOT, "host")))["main"]
    got = tvm.runtime.tensor(np.zeros_like(values))
    kernel(tvm.runtime.tensor(values), got)
    with np.errstate(invalid="ignore"):
        mantissa, exponent = np.frexp(values.astype("float64"))
        normal = np.ldexp(np.trunc(mantissa * 2**11) / 2**11, exponent)
    # Below the least normal number digits are those of a fixed point.
    expected = np.where(np.abs(values) < 2.0**-126, np.trunc(values.astype("float64") * 2.0**136) / 2.0**136, normal)
    np.testing.assert_array_equal(got.numpy(), np.where(np.isfinite(values), expected, values))


def test_a_rules_gemm_has_operands_in_tfloat32() -> None:
    rule = load_rule(ROOT, "matmul")
    exact, coarse = (canonical.lower(rule.of(ROOT, {**SIZES, "precision": precision})) for precision in ("", "tfloat32"))
    assert operands(exact) == ("float32", "float32", True)
    assert operands(coarse) == ("tfloat32", "tfloat32", True)
    assert canonical.module_digest(exact) != canonical.module_digest(coarse)
    assert wgmma_matmul.why_not(iter_space(exact), H200) == "there is no wgmma of float32 with float32 accumulators"
    assert wgmma_matmul.why_not(iter_space(coarse), H200) == ""
    assert iter_space(coarse).dtype == "tfloat32"


def test_one_tfloat32_operand_alone_is_refused_by_wgmma() -> None:
    mod = gemm(truncated, lambda x: x)
    assert operands(mod) == ("tfloat32", "float32", True)
    assert "its operands differ in dtype" in wgmma_matmul.why_not(iter_space(mod), H200)


def as_bits(value: Any) -> Any:
    return tirx.reinterpret("uint32", value)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: tirx.reinterpret("float32", as_bits(x) & tirx.const(0xFFFF0000, "uint32")),
        lambda x: tirx.reinterpret("float32", as_bits(x) | tirx.const(0xFFFFE000, "uint32")),
        lambda x: tirx.reinterpret("float32", as_bits(x) + tirx.const(0x1000, "uint32") & tirx.const(0xFFFFE000, "uint32")),
        lambda x: truncated(x + tirx.const(1, "float32")),
    ],
)
def test_other_roundings_are_not_tfloat32(other: Any) -> None:
    mod = gemm(other, other)
    *_, is_plain = operands(mod)
    assert not is_plain
    assert wgmma_matmul.propose(iter_space(mod), H200, 20) == ()
