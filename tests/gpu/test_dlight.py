"""The interface of fast dlight on a GPU: functions by others are computed correctly by both policies, and each result is measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from support.gpu_kernels import Case, Kernel, Kernels
from support.prim_funcs import GEMMS, REFUSED, nn, wrapping_integers

from kerneldecl.arrays import poisoned, random_array, relative_error
from kerneldecl.artifact.kernels import kernel_of, load_library
from kerneldecl.compiler.canonical import signature_of
from kerneldecl.compiler.reference import expected_outputs, rounding
from kerneldecl.dlight import CUDA, Config, DefaultPolicy, TensorCorePolicy, apply_and_build, get_tensorized_func_and_tags
from kerneldecl.model import Candidate
from kerneldecl.rule import dtype_tolerance
from kerneldecl.signature import Arg

pytestmark = pytest.mark.gpu


def case(func: Any, policy: Any, top_k: int, step: int) -> Case:
    """Return every so-many-th of a policy's configurations of a function as candidates."""
    file = f"functions/{func.__name__}.json"

    def choose(*_: Any) -> list[Candidate]:
        return [config.candidate for config in policy(func, "h200").emit_config(top_k)[::step]]

    return Case(f"{func.__name__}-{policy.__name__}", "tensor_ir", {"file": file}, choose, files={file: tvm.ir.save_json(func)})


def error_of(func: Any, run: Any) -> float:
    """Return the relative error of a kernel on inputs of ours."""
    *inputs, output = (Arg(f"arg{at}", shape, dtype) for at, (shape, dtype) in enumerate(signature_of(func)))
    given = [random_array(np.random.default_rng(at), arg) for at, arg in enumerate(inputs)]
    given = [np.abs(array) % 64 if array.dtype == "int32" else array for array in given]  # rows to gather
    device = tvm.cuda(0)
    tensors = [tvm.runtime.tensor(array, device) for array in (*given, poisoned(output))]
    run(*tensors)
    device.sync()
    (want,) = expected_outputs(func, given, [output])
    return relative_error(tensors[-1].numpy(), want)


def tolerance_of(func: Any) -> float:
    return max(dtype_tolerance(dtype) for _, dtype in signature_of(func)) + rounding(func)


def check(func: Any, kernels: Sequence[Kernel]) -> None:
    assert kernels
    for kernel in kernels:
        assert not kernel.failure
        assert error_of(func, kernel_of(load_library(kernel.library, "cuda"), kernel.symbol)) <= tolerance_of(func), kernel.candidate


GEMM_CASES = [(func, case(func, policy, 20, 12)) for policy in (TensorCorePolicy, DefaultPolicy) for func in GEMMS]
# What overflows has no defined result.
OTHER_CASES = [(func, case(func, DefaultPolicy, 1, 1)) for func in REFUSED if func is not wrapping_integers]


@pytest.mark.parametrize(("func", "case"), GEMM_CASES, ids=[str(case) for _, case in GEMM_CASES])
def test_gemms_of_other_authors_are_correct(func: Any, case: Case, kernels: Kernels) -> None:
    check(func, kernels.of(case).kernels)


@pytest.mark.parametrize(("func", "case"), OTHER_CASES, ids=[str(case) for _, case in OTHER_CASES])
def test_other_functions_are_correct_on_cuda_cores(func: Any, case: Case, kernels: Kernels) -> None:
    check(func, kernels.of(case).kernels)


def test_the_published_lines() -> None:
    func, arch = nn, CUDA("cuda")
    func, tags = get_tensorized_func_and_tags(func, arch.target)
    assert tags
    policy = TensorCorePolicy(func=func, arch=arch, tags=tags)
    configs = policy.emit_config(20)
    results, best = apply_and_build(func, configs, arch, parallel_build=True)
    assert [result.config for result in results] == configs
    measured = [result for result in results if result.latency is not None]
    assert len(measured) > len(results) // 2
    # Among results within measurement noise, the one with the least code wins.
    assert best.latency is not None
    assert best.latency <= 1.2 * min(result.latency for result in measured if result.latency is not None)
    assert error_of(nn, best.kernel) <= tolerance_of(nn)
    for result in [each for each in measured if each.config.candidate.template == "gpu_matmul_tc"][::2]:
        threads = 32 * result.config.params["warps_m"] * result.config.params["warps_n"]  # type: ignore[operator]
        assert re.findall(r"__launch_bounds__\((\d+)", result.code)[-1] == str(threads)


def test_a_wrong_kernel_is_not_the_best() -> None:
    """A schedule of another function computes something else, quickly."""
    arch = CUDA("cuda")
    correct = TensorCorePolicy(nn, arch, {"use_wgmma": 0}).emit_config(3)
    unknown = Config(correct[0].candidate.of("gpu_matmul_tc", {**correct[0].params, "block_m": 24}), 0.0)
    results, best = apply_and_build(nn, [unknown, *correct], arch)
    assert not results[0].measured
    assert results[0].reason
    assert best.config in correct
