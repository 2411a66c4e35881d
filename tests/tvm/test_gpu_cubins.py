"""What policies choose first compiles to cubins without spills, for every generation of GPUs that the compiler knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kerneldecl import nvcc
from kerneldecl.compiler import tensorir
from kerneldecl.compiler.codegen import apply_candidate
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.compiler.space import iter_space
from kerneldecl.errors import ToolchainError
from kerneldecl.model import Proposal
from kerneldecl.plugins import load_arch, load_policy, load_rule
from kerneldecl.policies.auto import BY_KIND
from kerneldecl.stores.local import LocalStore

ROOT = Path(__file__).parents[2]
GPUS = ["t4", "a100-80gb", "l4", "h200", "b200"]
"""Of compute capability 7.5, 8.0, 8.9, 9.0 and 10.0."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "add_float16": ("elementwise", {"op": "add", "shape": (4096, 4096), "dtype": "float16"}),
    "transpose_float32": ("transpose", {"shape": (4096, 4096), "axes": (1, 0)}),
    "row_sums_float16": ("reduce", {"op": "sum", "shape": (16384, 1024), "axes": (1,), "dtype": "float16"}),
    "column_maxima_float32": ("reduce", {"op": "max", "shape": (4096, 4096), "axes": (0,)}),
    "softmax_float16": ("softmax", {"shape": (4096, 1024), "dtype": "float16"}),
    "layer_norm_float32": ("layer_norm", {"shape": (4096, 1024)}),
    "gemv_float16": ("gemv", {"n": 8192, "k": 8192, "dtype": "float16"}),
    "gemv_i4_float16": ("gemv_i4", {"n": 8192, "k": 8192, "dtype": "float16"}),
    "matmul_float16": ("matmul", {"m": 1024, "n": 1024, "k": 1024, "layout": "nt", "dtype": "float16"}),
    "matmul_int8": ("matmul", {"m": 1024, "n": 1024, "k": 1024, "layout": "nt", "dtype": "int8"}),
    "matmul_float32": ("matmul", {"m": 1024, "n": 1024, "k": 1024, "layout": "nn"}),
    "conv2d_float16": ("conv2d", {"n": 8, "h": 56, "w": 56, "c": 64, "f": 64, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16"}),
}


def missing() -> str:
    try:
        nvcc.compiler()
    except ToolchainError as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", CASES)
def test_first_choice_compiles_without_spills(name: str, gpu: str, tmp_path: Path) -> None:
    arch, (rule, attrs) = load_arch(ROOT, gpu), CASES[name]
    mod = tensorir.lower(load_rule(ROOT, rule).of(ROOT, attrs))
    space = iter_space(mod)
    first: Proposal = next(filter(None, (load_policy(ROOT, policy).propose(space, arch, 1, ()) for policy in BY_KIND["cuda"])))[0]
    schedule = apply_candidate(ROOT, mod, first.candidate, arch)
    assert schedule is not None, first
    made = compile_cuda_object(schedule.mod, arch, "kernel", LocalStore(tmp_path))
    for launch in made.launches:
        assert (launch.usage.spill_bytes, launch.usage.stack_bytes) == (0, 0), first
        assert launch.dynamic_smem_bytes + launch.usage.smem_bytes <= arch.the_gpu.smem_per_block_optin_bytes
