"""The interface of fast dlight on a GPU: what others wrote is computed right by both policies, measured, and each result is its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from products import PRODUCTS, REFUSED, nn, wrapping_integers

from kerneldecl.arrays import poisoned, random_array, relative_error
from kerneldecl.compiler.codegen import apply_candidate
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.compiler.reference import expected_outputs, rounding
from kerneldecl.compiler.tensorir import canonical_module, signature_of
from kerneldecl.cudalink import link_cuda_library
from kerneldecl.dlight import CUDA, Config, DefaultPolicy, TensorCorePolicy, apply_and_build, get_tensorized_func_and_tags
from kerneldecl.kernels import kernel_of, load_library
from kerneldecl.model import Arg
from kerneldecl.rule import dtype_tolerance
from kerneldecl.stores.local import LocalStore

pytestmark = pytest.mark.gpu


ARCH = CUDA("h200").arch


def kernel(func: Any, config: Config, folder: Path) -> Any:
    """Return the kernel, built in this process."""
    applied = apply_candidate(folder, canonical_module(func), config.candidate, ARCH)
    assert applied is not None, config
    path = folder / "kernel.o"
    path.write_bytes(compile_cuda_object(applied.mod, ARCH, "kd_function", LocalStore(folder)).content)
    link_cuda_library(path.with_suffix(".so"), [path])
    return kernel_of(load_library(path.with_suffix(".so"), "cuda"), "kd_function")


def error_of(func: Any, run: Any) -> float:
    """Return the relative error of a kernel on inputs of ours."""
    *inputs, output = (Arg(f"arg{at}", shape, dtype) for at, (shape, dtype) in enumerate(signature_of(func)))
    given = [random_array(np.random.default_rng(at), arg) for at, arg in enumerate(inputs)]
    given = [np.abs(array) % 64 if array.dtype == "int32" else array for array in given]  # rows to gather
    device = tvm.cuda(0)
    held = [tvm.runtime.tensor(array, device) for array in (*given, poisoned(output))]
    run(*held)
    device.sync()
    (want,) = expected_outputs(func, given, [output])
    return relative_error(held[-1].numpy(), want)


def tolerance_of(func: Any) -> float:
    return max(dtype_tolerance(dtype) for _, dtype in signature_of(func)) + rounding(func)


@pytest.mark.parametrize("policy", [TensorCorePolicy, DefaultPolicy], ids=lambda policy: policy.__name__)
@pytest.mark.parametrize("func", PRODUCTS, ids=lambda func: func.__name__)
def test_products_of_others_are_right(func: Any, policy: Any, tmp_path: Path) -> None:
    for at, config in enumerate(policy(func, "h200").emit_config(20)[::12]):
        (tmp_path / str(at)).mkdir()
        assert error_of(func, kernel(func, config, tmp_path / str(at))) <= tolerance_of(func), config


# What overflows has no defined result.
@pytest.mark.parametrize("func", [func for func in REFUSED if func is not wrapping_integers], ids=lambda func: func.__name__)
def test_other_functions_are_right_on_cuda_cores(func: Any, tmp_path: Path) -> None:
    config = DefaultPolicy(func, "h200").emit_config(1)[0]
    assert error_of(func, kernel(func, config, tmp_path)) <= tolerance_of(func)


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
    assert error_of(nn, best.kernel) <= tolerance_of(nn)
    for result in [each for each in measured if each.config.candidate.template == "gpu_matmul_tc"][::2]:
        threads = 32 * result.config.params["warps_m"] * result.config.params["warps_n"]  # type: ignore[operator]
        assert re.findall(r"__launch_bounds__\((\d+)", result.code)[-1] == str(threads)


def test_a_wrong_kernel_is_not_the_best() -> None:
    """A schedule of another function computes something else, quickly."""
    arch = CUDA("cuda")
    right = TensorCorePolicy(nn, arch, {"use_wgmma": 0}).emit_config(3)
    unknown = Config(right[0].candidate.of("gpu_matmul_tc", {**right[0].params, "block_m": 24}), 0.0)
    results, best = apply_and_build(nn, [unknown, *right], arch)
    assert not results[0].measured
    assert results[0].reason
    assert best.config in right
