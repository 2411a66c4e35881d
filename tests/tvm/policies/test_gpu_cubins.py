"""What policies choose compiles to cubins without spills, for every generation of GPUs that the compiler knows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.compiler.cuda import CudaObject, compile_cuda_object
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch, Proposal
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.plugins.policy_order import standard_order
from kerneldecl.store.local import LocalStore

ROOT = REPOSITORY
GPUS = ["t4", "a100-80gb", "l4", "h200", "b200"]
"""Of compute capability 7.5, 8.0, 8.9, 9.0 and 10.0."""
FIRST = 4
"""Candidates that a build without the GPU compiles in search of one that does not spill, before it looks further."""
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


def compiled(mod: Any, proposal: Proposal, arch: Arch, folder: Path) -> CudaObject:
    applied = apply_candidate(ROOT, mod, proposal.candidate, arch)
    assert applied is not None, proposal
    return compile_cuda_object(applied.mod, arch, "kernel", LocalStore(folder))


@needs_nvcc
@pytest.mark.parametrize(("name", "gpu"), at({9, 17, 21, 38, 43, 55}, itertools.product(CASES, GPUS)))
def test_what_is_linked_unmeasured_does_not_spill(name: str, gpu: str, tmp_path: Path) -> None:
    arch, (rule, attrs) = load_arch(ROOT, gpu), CASES[name]
    mod = canonical.lower(load_rule(ROOT, rule).of(ROOT, attrs))
    space = iter_space(mod)
    proposed: tuple[Proposal, ...] = next(
        filter(None, (load_module("policies", ROOT, each).propose(space, arch, FIRST) for each in standard_order("cuda")))
    )
    built = (compiled(mod, proposal, arch, tmp_path) for proposal in proposed)
    launches = next(
        (one.launches for one in built if not any(launch.usage.spill_bytes + launch.usage.stack_bytes for launch in one.launches)), ()
    )
    assert launches, f"the first {FIRST} spill"
    assert all(launch.dynamic_smem_bytes + launch.usage.smem_bytes <= arch.the_gpu.smem_per_block_optin_bytes for launch in launches)
