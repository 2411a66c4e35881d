"""Products on a GPU compute what the rule's reference computes: layouts, dtypes, odd sizes, epilogues, both templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

import kerneldecl
from kerneldecl.archfile import read_arch
from kerneldecl.arrays import relative_error
from kerneldecl.compiler import tensorir
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.compiler.space import iter_space
from kerneldecl.cudalink import link_cuda_library
from kerneldecl.plugins import load_rule
from kerneldecl.policies import gpu_matmul_simt as simt_policy
from kerneldecl.policies import gpu_matmul_tc as tc_policy
from kerneldecl.stores.local import LocalStore
from kerneldecl.templates import gpu_matmul_simt, gpu_matmul_tc

pytestmark = pytest.mark.gpu

ROOT = Path(kerneldecl.__file__).parent.parent
H200_FILE = Path(kerneldecl.__file__).parent / "archs" / "h200.toml"
H200 = read_arch("h200", H200_FILE.read_bytes(), "h200.toml")
BOTH = ((tc_policy, gpu_matmul_tc), (simt_policy, gpu_matmul_simt))
SIZES = [(256, 256, 256), (1000, 1003, 517), (16, 512, 1024), (129, 66, 40), (17, 31, 16), (64, 192, 72)]


def verify(attrs: dict[str, Any], policy: Any, template: Any, folder: Path, *, count: int) -> int:
    """Build every so-many-th of the proposals, run it on poisoned memory, compare; return how many were run."""
    rule = load_rule(ROOT, "matmul").of(ROOT, attrs)
    mod = tensorir.lower(rule)
    proposals = policy.propose(iter_space(mod), H200, 20, ())
    inputs = rule.inputs(np.random.default_rng(0))
    expected = rule.reference(*inputs)
    device = tvm.cuda(0)
    held = [tvm.runtime.tensor(value, device) for value in inputs]
    (out,) = rule.signature().outputs
    ran = proposals[:: max(1, len(proposals) // count)]
    for at, proposal in enumerate(ran):
        schedule = template.apply(mod, dict(proposal.candidate.params), H200)
        assert schedule is not None, proposal
        path = folder / f"{template.__name__}{at}.o"
        path.write_bytes(compile_cuda_object(schedule.mod, H200, "kd_main", LocalStore(folder)).content)
        link_cuda_library(path.with_suffix(".so"), [path])
        poison = np.full(out.shape, 99, dtype="float32").astype(expected.dtype if out.dtype.startswith("int") else "float32")
        result = tvm.runtime.tensor(poison.astype(held[0].numpy().dtype if out.dtype == attrs["dtype"] else out.dtype), device)
        tvm.runtime.load_module(str(path.with_suffix(".so")))["kd_main"](*held, result)
        device.sync()
        error = relative_error(result.numpy(), expected)
        assert error <= rule.tolerance(), f"{proposal.candidate}: {error}"
    return len(ran)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensor_cores(size: tuple[int, int, int], layout: str, dtype: str, tmp_path: Path) -> None:
    m, n, k = size
    assert verify({"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype}, tc_policy, gpu_matmul_tc, tmp_path, count=2)


@pytest.mark.parametrize("size", [(256, 256, 256), (129, 66, 40), (64, 64, 1024)])
def test_integers_are_exact(size: tuple[int, int, int], tmp_path: Path) -> None:
    m, n, k = size
    for policy, template in BOTH:
        assert verify({"m": m, "n": n, "k": k, "layout": "nt", "dtype": "int8"}, policy, template, tmp_path, count=3)


@pytest.mark.parametrize("size", [*SIZES, (1, 1, 1), (5, 7, 3)])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_cuda_cores(size: tuple[int, int, int], layout: str, tmp_path: Path) -> None:
    m, n, k = size
    assert verify({"m": m, "n": n, "k": k, "layout": layout, "dtype": "float32"}, simt_policy, gpu_matmul_simt, tmp_path, count=2)


@pytest.mark.parametrize("epilogue", [("bias",), ("bias", "relu"), ("gelu",), ("bias", "silu", "add")])
@pytest.mark.parametrize("size", [(128, 256, 64), (100, 203, 117)])
def test_epilogues_and_batches(epilogue: tuple[str, ...], size: tuple[int, int, int], tmp_path: Path) -> None:
    m, n, k = size
    attrs = {"m": m, "n": n, "k": k, "batch": 3, "layout": "nt", "dtype": "float16", "epilogue": epilogue}
    for policy, template in BOTH:
        assert verify(attrs, policy, template, tmp_path, count=2)


def test_float16_sums(tmp_path: Path) -> None:
    attrs = {"m": 128, "n": 128, "k": 256, "layout": "nn", "dtype": "float16", "accum_dtype": "float16"}
    assert verify(attrs, tc_policy, gpu_matmul_tc, tmp_path, count=2)
