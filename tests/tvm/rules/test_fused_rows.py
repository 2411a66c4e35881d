"""Fused functions of rows on the CPU: unscheduled and as policies propose them, of odd sizes, against the rules' references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from support.repository import REPOSITORY
from support.thinned import at, every
from support.unoptimised import unoptimised

from kerneldecl.arrays import Array, aligned, numpy_dtype, poisoned, relative_error
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler.canonical import lower
from kerneldecl.compiler.cpu import PIPELINE, apply_candidate
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.rule import Rule, dtype_tolerance

HOST = load_arch(REPOSITORY, "host")
NORMS = ("rms_norm", "layer_norm")
DTYPES = ("float16", "bfloat16", "float32")


def rule(name: str, **attrs: Any) -> Rule:
    made = load_rule(REPOSITORY, name).of(REPOSITORY, attrs)
    assert list(made.problems()) == []
    return made


def results(mod: tvm.IRModule, made: Rule, inputs: list[Array]) -> list[Array]:
    kernel = tvm.compile(mod, target=unoptimised(HOST), tir_pipeline=PIPELINE)["main"]
    outputs = [aligned(poisoned(arg)) for arg in made.signature().outputs]
    kernel(*map(tensor, map(aligned, inputs)), *map(tensor, outputs))
    return outputs


def check(made: Rule, got: list[Array], inputs: list[Array]) -> None:
    """Compare each output within what rounding to its own dtype allows; quantised ones within half of a step."""
    wanted = made.reference(*inputs)
    for arg, out, want in zip(made.signature().outputs, got, [wanted] if isinstance(wanted, np.ndarray) else wanted, strict=True):
        assert out.shape == np.shape(want)
        if arg.dtype == "int8":
            assert np.abs(out - np.clip(want, -127, 127)).max() <= 0.5 + 127 * dtype_tolerance(made.signature().inputs[0].dtype)
        else:
            # Scales of rows are as exact as what they come from.
            least = max(dtype_tolerance(arg.dtype), dtype_tolerance(made.signature().inputs[0].dtype))
            assert relative_error(out, np.asarray(want)) <= least


def proposed(policy: str, made: Rule, count: int) -> list[tvm.IRModule]:
    mod = lower(made)
    found = load_module("policies", REPOSITORY, policy).propose(iter_space(mod), HOST, 8)
    applied = [apply_candidate(REPOSITORY, mod, one.candidate, HOST) for one in found]
    kept = [one.mod for one in applied if one is not None]
    assert kept
    return kept[:count]


@settings(deadline=None, max_examples=6)
@given(
    st.sampled_from(NORMS), st.tuples(st.integers(1, 9), st.integers(1, 70)), st.booleans(),
    st.sampled_from(("float8_e4m3fn", "int8", "")), st.sampled_from(DTYPES),
)  # fmt: skip
def test_norms_of_any_size(name: str, shape: tuple[int, int], residual: bool, out_dtype: str, dtype: str) -> None:
    made = rule(name, shape=shape, residual=residual, out_dtype=out_dtype, dtype=dtype, eps=1e-3)
    inputs = made.inputs(np.random.default_rng(0))
    check(made, results(lower(made), made, inputs), inputs)


@pytest.mark.parametrize(("name", "residual", "out_dtype"), every(2, NORMS, [(True, ""), (True, "float8_e4m3fn"), (False, "int8")]))
def test_proposed_norms_compute_the_reference(name: str, residual: bool, out_dtype: str) -> None:
    made = rule(name, shape=(3, 7, 333), residual=residual, out_dtype=out_dtype, dtype="bfloat16")
    inputs = made.inputs(np.random.default_rng(1))
    for mod in proposed("cpu_rowwise", made, 2):
        check(made, results(mod, made, inputs), inputs)


def test_what_is_normalised_is_the_rounded_sum_that_is_returned() -> None:
    made = rule("rms_norm", shape=(4, 64), residual=True, dtype="bfloat16")
    x, residual, gamma = made.inputs(np.random.default_rng(2))
    y, added = results(lower(made), made, [x, residual, gamma])
    assert added.tobytes() == (x.astype(np.float32) + residual.astype(np.float32)).astype(numpy_dtype("bfloat16")).tobytes()
    plain = rule("rms_norm", shape=(4, 64), dtype="bfloat16").reference(added, gamma)
    assert relative_error(y, np.asarray(plain)) <= dtype_tolerance("bfloat16")


def test_quantised_rows_reach_the_largest_number_and_scales_bring_them_back() -> None:
    for out_dtype, largest in (("float8_e4m3fn", 448), ("int8", 127)):
        made = rule("layer_norm", shape=(5, 96), out_dtype=out_dtype)
        inputs = made.inputs(np.random.default_rng(3))
        y, scale = results(lower(made), made, inputs)
        assert (np.abs(y.astype(np.float64)).max(axis=-1) == largest).all()
        whole = rule("layer_norm", shape=(5, 96)).reference(*inputs)
        assert relative_error(y.astype(np.float64) * scale[:, None], np.asarray(whole)) < 0.1


def test_rows_of_zeros_are_zeros() -> None:
    made = rule("rms_norm", shape=(2, 8), out_dtype="float8_e4m3fn")
    y, scale = results(lower(made), made, [np.zeros((2, 8), np.float32), np.ones(8, np.float32)])
    assert not y.astype(np.float32).any()
    assert (scale > 0).all()


@settings(deadline=None, max_examples=4)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 40)),
    st.sampled_from(("silu", "gelu", "gelu_tanh")),
    st.sampled_from(DTYPES),
)
def test_gated_gemms_of_any_size(mnk: tuple[int, int, int], gate: str, dtype: str) -> None:
    m, n, k = mnk
    made = rule("matmul_gated", m=m, n=n, k=k, gate=gate, dtype=dtype)
    inputs = made.inputs(np.random.default_rng(0))
    check(made, results(lower(made), made, inputs), inputs)


@pytest.mark.parametrize(("m", "n", "k"), at({0}, [(64, 96, 128), (37, 50, 30)]))
def test_proposed_gated_gemms_compute_the_reference(m: int, n: int, k: int) -> None:
    made = rule("matmul_gated", m=m, n=n, k=k)
    inputs = made.inputs(np.random.default_rng(1))
    for mod in proposed("cpu_matmul", made, 3):
        check(made, results(mod, made, inputs), inputs)


@settings(deadline=None, max_examples=5)
@given(
    st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 40)),
    st.sampled_from((-1, 0, 1)),
    st.sampled_from((0, 1, 2, 3)),
    st.sampled_from(DTYPES),
)
def test_masked_softmax_of_any_size(shape: tuple[int, int, int], axis: int, kept: int, dtype: str) -> None:
    mask = tuple(extent if at >= 3 - kept else 1 for at, extent in enumerate(shape))
    made = rule("softmax", shape=shape, axis=axis, scale=0.125, mask=mask, dtype=dtype)
    inputs = made.inputs(np.random.default_rng(0))
    check(made, results(lower(made), made, inputs), inputs)


@pytest.mark.parametrize(("shape", "mask"), at({0}, [((2, 3, 65, 77), (1, 65, 77)), ((4, 300), (4, 1)), ((5, 64), ())]))
def test_proposed_masked_softmax_computes_the_reference(shape: tuple[int, ...], mask: tuple[int, ...]) -> None:
    made = rule("softmax", shape=shape, scale=0.5, mask=mask, dtype="float16")
    inputs = made.inputs(np.random.default_rng(1))
    for mod in proposed("cpu_rowwise", made, 2):
        check(made, results(mod, made, inputs), inputs)


@settings(deadline=None, max_examples=4)
@given(st.integers(1, 9), st.integers(1, 200), st.sampled_from(("int32", "int64")), st.sampled_from(DTYPES))
def test_cross_entropy_of_any_size(rows: int, classes: int, index_dtype: str, dtype: str) -> None:
    made = rule("cross_entropy", rows=rows, classes=classes, index_dtype=index_dtype, dtype=dtype)
    inputs = made.inputs(np.random.default_rng(0))
    check(made, results(lower(made), made, inputs), inputs)


def test_proposed_cross_entropy_computes_the_reference_and_ignores_rows() -> None:
    made = rule("cross_entropy", rows=33, classes=1001, dtype="bfloat16")
    x, target = made.inputs(np.random.default_rng(1))
    target[:2] = -100
    for mod in proposed("cpu_rowwise", made, 2):
        (got,) = outputs = results(mod, made, [x, target])
        check(made, outputs, [x, target])
        assert not got[:2].any()


@pytest.mark.parametrize("op", ["silu_mul", "gelu_mul", "gelu_tanh_mul", "div"])
@pytest.mark.parametrize("shape", [(3, 5, 77), (9, 64)])
def test_operations_of_two_halves(op: str, shape: tuple[int, ...]) -> None:
    made = rule("elementwise", op=op, shape=shape, halves=True, dtype="bfloat16")
    inputs = made.inputs(np.random.default_rng(0))
    for mod in proposed("cpu_elementwise", made, 1):
        check(made, results(mod, made, inputs), inputs)
    apart = rule("elementwise", op=op, shape=shape, dtype="bfloat16")
    np.testing.assert_array_equal(made.reference(*inputs), apart.reference(*np.split(inputs[0], 2, axis=-1)))
