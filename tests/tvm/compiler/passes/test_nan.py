"""Maxima and minima of NaN are NaN, as in NumPy and torch: every dtype, operand and form of code; `ignore` keeps TVM's code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from emulation import Kernel
from support.compilers import compiled_cubin, needs_nvcc
from support.repository import REPOSITORY

from kerneldecl.arrays import Array, aligned, numpy_dtype, poisoned
from kerneldecl.compiler import canonical, cpu, cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.passes.nan import ATTRIBUTE, IGNORE, nan_results
from kerneldecl.hardware.host import detect
from kerneldecl.model import Arch, Candidate
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.templates import wgmma_matmul

ROOT = REPOSITORY
HOST, H200, T4 = detect(), load_arch(ROOT, "h200"), load_arch(ROOT, "t4")
VALUES = [np.nan, np.inf, -np.inf, 0.0, 1.5, -2.0, 7.0, 0.25]
PAIRS = np.array([[x, z] for x in VALUES for z in VALUES])
"""All pairs, among them NaN in the first operand, in the second and in both."""
OPERATIONS = {
    "relu": "relu",
    "relu6": "relu6",
    "hard_sigmoid": "hardsigmoid",
    "maximum": "maximum",
    "minimum": "minimum",
}


def lowered(rule: str, **attrs: Any) -> Any:
    return canonical.lower(load_rule(ROOT, rule).of(ROOT, attrs))


def first_candidate(mod: tvm.IRModule, policy: str, arch: Arch) -> Any:
    """Return the module that the first candidate of a policy that applies makes."""
    for proposal in load_module("policies", ROOT, policy).propose(iter_space(mod), arch, 20):
        if applied := cpu.apply_candidate(ROOT, mod, proposal.candidate, arch):
            return applied.mod
    raise AssertionError(policy)


def on_cpu(mod: tvm.IRModule, *inputs: Array, out: Any) -> Array:
    result = aligned(poisoned(out))
    built = tvm.tirx.build(mod, target=cpu.target_of(HOST), pipeline=cpu.PIPELINE)
    built["main"](*(tvm.runtime.tensor(aligned(array)) for array in inputs), held := tvm.runtime.tensor(result))
    return held.numpy().astype(np.float64)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [*((op, "float32") for op in OPERATIONS), *(("maximum", dtype) for dtype in ("float16", "bfloat16", "float64")), ("relu", "float16")],
)
def test_elementwise_operations_on_a_cpu_are_those_of_torch(op: str, dtype: str) -> None:
    rule = load_rule(ROOT, "elementwise").of(ROOT, {"op": op, "shape": (64,), "dtype": dtype})
    count = len(rule.signature().inputs)
    inputs = [PAIRS[:, at].astype(numpy_dtype(dtype)) for at in range(count)]
    torch = pytest.importorskip("torch", reason="what is expected is what torch computes")
    function = getattr(torch.nn.functional, OPERATIONS[op], None) or getattr(torch, OPERATIONS[op])
    want = function(*(torch.tensor(PAIRS[:, at]).to(getattr(torch, dtype)) for at in range(count))).double().numpy()
    got = on_cpu(first_candidate(canonical.lower(rule), "cpu_elementwise", HOST), *inputs, out=rule.signature().outputs[0])
    np.testing.assert_allclose(got, want, rtol=1e-2)


@pytest.mark.parametrize(("op", "dtype"), [("max", "float32"), ("min", "bfloat16")])
def test_a_row_with_nan_anywhere_reduces_to_nan_on_a_cpu(op: str, dtype: str) -> None:
    rule = load_rule(ROOT, "reduce").of(ROOT, {"op": op, "shape": (65, 64), "axes": (-1,), "dtype": dtype})
    x = np.random.default_rng(0).standard_normal((65, 64)).astype(numpy_dtype(dtype))
    x[np.arange(64), np.arange(64)] = np.nan
    for params in ({"parallel": False, "vectors": 1, "chunks": 1}, {"parallel": False, "vectors": 1, "chunks": 4}):
        applied = cpu.apply_candidate(ROOT, canonical.lower(rule), Candidate.of("cpu_reduce", params), HOST)
        if applied is not None:
            got = on_cpu(applied.mod, x, out=rule.signature().outputs[0])
            np.testing.assert_array_equal(got, getattr(x.astype(np.float64), op)(axis=1))


def test_ignore_keeps_the_code() -> None:
    mod = lowered("elementwise", op="maximum", shape=(64,))
    ignoring = tvm.IRModule({"main": mod["main"].with_attr(ATTRIBUTE, IGNORE)})
    assert tvm_ffi.structural_equal(nan_results(ignoring), ignoring)
    assert not tvm_ffi.structural_equal(nan_results(mod), mod)


def test_integers_and_indices_are_left_alone() -> None:
    mod = lowered("elementwise", op="maximum", shape=(64,), dtype="int32")
    assert tvm_ffi.structural_equal(nan_results(mod), mod)


@needs_nvcc
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cuda_sources_with_maxima_compile_and_use_the_instruction(dtype: str) -> None:
    mod = first_candidate(lowered("elementwise", op="maximum", shape=(4096, 64), dtype=dtype), "gpu_elementwise", H200)
    source = cuda.cuda_source(mod, H200, "kd_max")
    cubin = compiled_cubin(source, "sm_90", cuda._flags(mod["main"]))
    assert cubin.usage["kd_max_kernel"].spill_bytes == 0
    assert "max.NaN.f32" in source


@needs_nvcc
def test_a_gpu_without_the_instruction_gets_comparisons() -> None:
    mod = first_candidate(lowered("reduce", op="max", shape=(4096, 64), axes=(-1,)), "gpu_reduce", T4)
    source = cuda.cuda_source(mod, T4, "kd_max")
    assert ".NaN" not in source
    assert compiled_cubin(source, "sm_75", cuda._flags(mod["main"]))


@pytest.mark.parametrize("attrs", [{"op": "add"}, {"op": "maximum", "dtype": "int32"}], ids=str)
def test_cuda_source_without_maxima_of_floats_is_as_it_was(attrs: dict[str, str]) -> None:
    mod = first_candidate(lowered("elementwise", shape=(4096, 64), **attrs), "gpu_elementwise", H200)
    assert "kd_max" not in cuda.cuda_source(mod, H200, "kernel").replace("kd_max_kernel", "")


def test_nan_reaches_the_result_through_the_epilogue_of_a_hopper_gemm() -> None:
    attrs = {"m": 128, "n": 128, "k": 64, "dtype": "float16", "layout": "nt", "epilogue": ("bias", "relu")}
    rule = load_rule(ROOT, "matmul").of(ROOT, attrs)
    mod = canonical.lower(rule)
    proposal, *_ = load_module("policies", ROOT, "wgmma_matmul").propose(iter_space(mod), H200, 20)
    applied = wgmma_matmul.apply(mod, dict(proposal.candidate.params), H200)
    kernel = Kernel(applied["main"])
    for operand in range(3):
        inputs = rule.inputs(np.random.default_rng(0))
        inputs[operand].reshape(-1)[3] = np.nan
        *_, got = kernel(*inputs, poisoned(rule.signature().outputs[0]))
        np.testing.assert_array_equal(np.isnan(np.asarray(got, np.float64)), np.isnan(rule.reference(*inputs)))
