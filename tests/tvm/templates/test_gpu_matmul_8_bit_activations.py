"""GEMMs of quantised weights with 8-bit activations: right on the emulated GPU, and never left to the schedules that fit every function."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch, Candidate, IterSpace, Value
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.plugins.policy_order import standard_order
from kerneldecl.toolchain import nvcc

A100, H200, T4 = (load_arch(REPOSITORY, name) for name in ("a100-80gb", "h200", "t4"))
SIMT: dict[str, Value] = {"block_m": 16, "block_n": 32, "block_k": 8, "thread_m": 4, "thread_n": 4, "stages": 2, "raster_group": 1}


def right(rule: Any, candidate: Candidate, arch: Arch) -> None:
    made = apply_candidate(REPOSITORY, canonical.lower(rule), candidate, arch)
    assert made is not None
    inputs = rule.inputs(np.random.default_rng(0))
    [got] = emulate(made.mod["main"], *inputs, *map(poisoned, rule.signature().outputs))[len(inputs) :]
    assert relative_error(got, rule.reference(*inputs)) <= rule.tolerance()


@needs_nvcc
@pytest.mark.parametrize(("dtype", "zero_points"), at({0}, [("int8", True), ("float8_e4m3fn", False)]))
def test_packed_weights_are_unpacked_one_by_one_on_cuda_cores(dtype: str, zero_points: bool) -> None:
    attrs = {"m": 5, "n": 64, "k": 128, "layout": "packed", "dtype": dtype, "zero_points": zero_points}
    right(load_rule(REPOSITORY, "matmul_quantized").of(REPOSITORY, attrs), Candidate.of("gpu_matmul_simt", {**SIMT, "split_k": 2}), A100)


@needs_nvcc
@pytest.mark.parametrize(("weights", "dtype"), at({0}, [("int4", "float16"), ("float8_e4m3fn", "bfloat16")]))
def test_weights_in_rows_become_16_bits_one_by_one_on_cuda_cores(weights: str, dtype: str) -> None:
    rule = load_rule(REPOSITORY, "matmul_quantized").of(REPOSITORY, {"m": 5, "n": 64, "k": 128, "weights": weights, "dtype": dtype})
    right(rule, Candidate.of("gpu_matmul_simt", {**SIMT, "split_k": 1}), T4)
    made = apply_candidate(REPOSITORY, canonical.lower(rule), Candidate.of("gpu_matmul_simt", {**SIMT, "split_k": 1}), T4)
    assert made is not None
    assert nvcc.compile_cubin(cuda_source(made.mod, T4, "kernel"), "sm_75").content


TC: dict[str, Value] = {"block_m": 32, "block_n": 48, "block_k": 64, "warps_m": 2, "warps_n": 1, "raster_group": 1}
MXFP4: dict[str, Value] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32}
NVFP4: dict[str, Value] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn", "group": 16, "tensor_scale": True}
SCALED: list[tuple[Arch, dict[str, Any], dict[str, Value]]] = [
    (A100, {"layout": "packed", "zero_points": True, "activation_scales": "token"}, {"stages": 2}),
    (H200, {"layout": "packed", "dtype": "float8_e4m3fn", "activation_scales": "group"}, {"stages": 3, "smem_epilogue": 1}),
    (A100, {"layout": "rows", "activation_scales": "group", "epilogue": ["bias", "relu"]}, {"stages": 1, "split_k": 2}),
    (A100, {"layout": "rows", "zero_points": True, "dtype": "float8_e4m3fn", "activation_scales": "token"}, {"stages": 2, "block_k": 128}),
    (
        H200,
        {"layout": "rows", "scales": "column", "activation_scales": "token", "k": 160, "n": 50},
        {"stages": 2, "split_k": 2, "smem_epilogue": 1},
    ),
    (A100, {"layout": "packed", "zero_points": True, "scales": "tensor", "m": 5}, {"stages": 2, "block_m": 16, "warps_m": 1}),
    (T4, {"layout": "packed", "zero_points": True, "activation_scales": "token"}, {"stages": 2}),
    (A100, {"weights": "int8", "zero_points": True, "scales": "block", "n": 100}, {"stages": 2}),
    (A100, {**MXFP4, "layout": "packed", "activation_scales": "token"}, {"stages": 3, "block_k": 32}),
    (T4, {**NVFP4, "layout": "rows", "dtype": "float8_e4m3fn"}, {"stages": 2, "block_k": 16}),
    (A100, {"layout": "packed", "activation_scales": "token"}, {"stages": 3, "integers": 1}),
    (
        H200,
        {"layout": "rows", "scales": "tensor", "n": 50, "epilogue": ["bias"]},
        {"stages": 2, "integers": 1, "smem_epilogue": 1},
    ),
    (A100, {"weights": "int8", "activation_scales": "group"}, {"stages": 2, "integers": 1, "split_k": 2}),
    (T4, {"layout": "packed", "scales": "column", "m": 5}, {"stages": 2, "integers": 1, "block_m": 16, "warps_m": 1}),
    (A100, {"layout": "packed", "activation_scales": "token"}, {"stages": 3, "integers": 1, "words": 1}),
    (H200, {"layout": "rows", "activation_scales": "token"}, {"stages": 2, "integers": 1, "words": 1, "smem_epilogue": 1}),
    (
        H200,
        {"layout": "packed", "scales": "column", "m": 5},
        {"stages": 2, "integers": 1, "words": 1, "block_m": 16, "warps_m": 1, "split_k": 2},
    ),
    (H200, {"weights": "float8_e5m2", "scales": "tensor", "dtype": "float8_e4m3fn", "out_dtype": "float32"}, {"stages": 4, "block_k": 32}),
]


@needs_nvcc
@pytest.mark.parametrize(("arch", "attrs", "params"), at({1, 2, 15}, SCALED))
def test_sums_of_products_are_scaled_on_tensor_cores(arch: Arch, attrs: dict[str, Any], params: dict[str, Value]) -> None:
    rule = load_rule(REPOSITORY, "matmul_quantized").of(REPOSITORY, {"m": 33, "n": 96, "k": 256, "dtype": "int8", **attrs})
    right(rule, Candidate.of("gpu_matmul_scaled", {**TC, "smem_epilogue": 0, "split_k": 1, **params}), arch)


FORMS = list(itertools.product(("packed", "rows"), (False, True), ("int8", "float8_e4m3fn"), ("", "token", "group"), ("group", "column")))


@pytest.mark.parametrize(
    ("arch", "step"),
    at({0}, [(H200, 5), (H200, 1), (A100, 1), (load_arch(REPOSITORY, "rtx-4090"), 1)]),
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_tensor_cores_come_first(arch: Arch, step: int) -> None:
    for layout, zero_points, dtype, activation_scales, scales in FORMS[::step]:
        attrs = {"layout": layout, "zero_points": zero_points, "dtype": dtype, "activation_scales": activation_scales, "scales": scales}
        mod = canonical.lower(load_rule(REPOSITORY, "matmul_quantized").of(REPOSITORY, {"m": 17, "n": 256, "k": 512, **attrs}))
        first = first_proposal(iter_space(mod), arch)
        is_on_wgmma = arch == H200 and (layout, zero_points, dtype) == ("packed", False, "int8") and activation_scales
        assert first.template == ("wgmma_matmul_quantized_int8" if is_on_wgmma else "gpu_matmul_scaled"), attrs
        if zero_points and scales == "group":
            assert apply_candidate(REPOSITORY, mod, first, arch) is not None, attrs


def first_proposal(space: IterSpace, arch: Arch) -> Candidate:
    """Return the first candidate of the first policy that proposes one, in the order in which `auto` asks them."""
    policies = (load_module("policies", REPOSITORY, name) for name in standard_order(arch.kind))
    return next(found[0].candidate for policy in policies if (found := policy.propose(space, arch, 1)))


def quantized(attrs: dict[str, Any]) -> Any:
    return canonical.lower(load_rule(REPOSITORY, "matmul_quantized").of(REPOSITORY, {"n": 256, "k": 512, **attrs}))


@pytest.mark.parametrize("arch", [A100, H200, T4], ids=lambda arch: str(arch.name))
def test_blocks_of_4_bit_floats_are_on_tensor_cores(arch: Arch) -> None:
    for blocks, dtype in itertools.product((MXFP4, NVFP4), ("int8", "float8_e4m3fn")):
        mod = quantized({"m": 17, "dtype": dtype, **blocks})
        first = first_proposal(iter_space(mod), arch)
        assert first.template == "gpu_matmul_scaled"
        assert apply_candidate(REPOSITORY, mod, first, arch) is not None


def test_integers_are_multiplied_as_such_where_all_of_them_have_8_bits() -> None:
    for attrs, is_integer in (({}, True), ({"zero_points": True}, False), ({"dtype": "float8_e4m3fn"}, False), ({"weights": "int8"}, True)):
        mod = quantized({"m": 64, "dtype": "int8", **attrs})
        proposals = load_module("policies", REPOSITORY, "gpu_matmul_scaled").propose(iter_space(mod), A100, 12)
        found = [each.candidate for each in proposals if dict(each.candidate.params).get("integers")]
        assert bool(found) == is_integer, attrs
        assert all(apply_candidate(REPOSITORY, mod, candidate, A100) is not None for candidate in found[:1])
        in_words = [candidate for candidate in found if dict(candidate.params).get("words")]
        assert bool(in_words) == (is_integer and "weights" not in attrs), attrs
        assert len(in_words) < len(found) or not found, "those that make weights one by one are among them"
    for stages, is_right in ((1, False), (2, True)):
        words = Candidate.of("gpu_matmul_scaled", {**TC, "block_n": 64, "stages": stages, "integers": 1, "words": 1})
        assert (apply_candidate(REPOSITORY, quantized({"m": 64, "dtype": "int8"}), words, A100) is not None) == is_right
        assert apply_candidate(REPOSITORY, mod, words, A100) is None, "weights of 8 bits are words already"
    short = Candidate.of("gpu_matmul_scaled", {**TC, "stages": 2, "integers": 1, "block_k": 16})
    assert apply_candidate(REPOSITORY, mod, short, A100) is None


FLOAT8: dict[str, Any] = {"m": 33, "n": 96, "k": 256, "layout": "nt", "dtype": "float8_e4m3fn", "out_dtype": "float16"}


@needs_nvcc
@pytest.mark.parametrize("attrs", at({1}, [{}, {"dtype": "float8_e5m2", "out_dtype": "float32", "k": 200}, {"epilogue": ["bias", "relu"]}]))
def test_float8_before_ada_is_multiplied_in_float16(attrs: dict[str, Any]) -> None:
    rule = load_rule(REPOSITORY, "matmul").of(REPOSITORY, FLOAT8 | attrs)
    right(rule, Candidate.of("gpu_matmul_scaled", {**TC, "stages": 3, "smem_epilogue": 0, "split_k": 1}), A100)


def test_float8_is_left_to_its_own_instruction_where_there_is_one() -> None:
    space = iter_space(canonical.lower(load_rule(REPOSITORY, "matmul").of(REPOSITORY, FLOAT8)))
    for name, template in (("t4", "gpu_matmul_scaled"), ("a100-80gb", "gpu_matmul_scaled"), ("rtx-4090", "gpu_matmul_tc")):
        assert first_proposal(space, load_arch(REPOSITORY, name)).template == template
