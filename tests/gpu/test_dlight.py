"""The interface of fast dlight on a GPU: what others wrote is computed right by both policies, measured, and each result is its own."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tvm
from products import PRODUCTS, REFUSED, nn

from kerneldecl.arrays import random_array, relative_error
from kerneldecl.compiler.reference import expected_outputs
from kerneldecl.compiler.tensorir import signature_of
from kerneldecl.dlight import CUDA, Config, DefaultPolicy, Result, TensorCorePolicy, apply_and_build, get_tensorized_func_and_tags
from kerneldecl.model import Arg
from kerneldecl.rule import dtype_tolerance

pytestmark = pytest.mark.gpu


def error_of(func: Any, result: Result) -> float:
    """Return the relative error of a result's kernel on inputs of ours."""
    *inputs, output = (Arg(f"arg{at}", shape, dtype) for at, (shape, dtype) in enumerate(signature_of(func)))
    given = [random_array(np.random.default_rng(at), arg) for at, arg in enumerate(inputs)]
    given = [np.abs(array) % 64 if array.dtype == "int32" else array for array in given]  # rows to gather
    out = np.full(output.shape, 99).astype(output.dtype)
    device = tvm.cuda(0)
    held = [tvm.runtime.tensor(array, device) for array in (*given, out)]
    result.kernel(*held)
    device.sync()
    (want,) = expected_outputs(func, given, [output])
    return relative_error(held[-1].numpy(), want)


def tolerance_of(func: Any) -> float:
    return max(dtype_tolerance(dtype) for _, dtype in signature_of(func))


@pytest.mark.parametrize("policy", [TensorCorePolicy, DefaultPolicy], ids=lambda policy: policy.__name__)
@pytest.mark.parametrize("func", PRODUCTS, ids=lambda func: func.__name__)
def test_products_of_others_are_right(func: Any, policy: Any) -> None:
    configs = policy(func, CUDA("cuda")).emit_config(20)
    results, best = apply_and_build(func, configs[::7], "cuda")
    errors = {str(result.config): error_of(func, result) for result in results if result.library and not result.reason}
    assert errors
    assert max(errors.values()) <= tolerance_of(func), errors
    assert best.measured


@pytest.mark.parametrize("func", REFUSED, ids=lambda func: func.__name__)
def test_other_functions_are_right_on_cuda_cores(func: Any) -> None:
    configs = DefaultPolicy(func, CUDA("cuda")).emit_config(20)
    _, best = apply_and_build(func, configs[::7], "cuda")
    assert best.measured
    assert best.error is not None
    assert best.error <= tolerance_of(func)
    assert error_of(func, best) <= tolerance_of(func)


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
    # Among those that noise cannot tell apart the least code wins.
    assert best.latency is not None
    assert best.latency <= 1.2 * min(result.latency for result in measured if result.latency is not None)
    for result in measured[::5]:
        threads = 32 * result.config.params["warps_m"] * result.config.params["warps_n"]  # type: ignore[operator]
        assert re.findall(r"__launch_bounds__\((\d+)", result.code)[-1] == str(threads)


def test_a_wrong_kernel_is_not_the_best() -> None:
    """A schedule of another function computes something else, quickly."""
    arch = CUDA("cuda")
    right = TensorCorePolicy(nn, arch).emit_config(3)
    unknown = Config(right[0].candidate.of("gpu_matmul_tc", {**right[0].params, "block_m": 24}), 0.0)
    results, best = apply_and_build(nn, [unknown, *right], arch)
    assert not results[0].measured
    assert results[0].reason
    assert best.config in right
