"""Kernels on wgmma become the instructions that they are for, in the machine code that nvcc makes of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from emulation import host
from support.compilers import compiled_cubin, needs_nvcc, needs_nvdisasm, sass
from support.thinned import at
from support.wgmma_cases import PLAIN

import kerneldecl
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import wgmma_conv2d as conv2d_policy
from kerneldecl.policies import wgmma_matmul as matmul_policy
from kerneldecl.templates import wgmma_conv2d, wgmma_matmul
from kerneldecl.toolchain import nvcc

pytestmark = [needs_nvcc, needs_nvdisasm]

ROOT = Path(kerneldecl.__file__).parent.parent
H200 = load_arch(ROOT, "h200")
LARGE = {"m": 4096, "n": 4096, "k": 4096, "layout": "nt"}
LAYER = {"n": 128, "h": 28, "w": 28, "c": 128, "f": 128, "kh": 3, "kw": 3, "padding": 1}


@pytest.mark.parametrize(
    ("rule", "attrs", "multiply"),
    at(
        {4},
        [
            ("matmul", LARGE | {"dtype": "float16"}, r"HGMMA\.64x\d+x16\.F32 "),
            ("matmul", LARGE | {"dtype": "float16", "accum_dtype": "float16"}, r"HGMMA\.64x\d+x16\.F16 "),
            ("matmul", LARGE | {"precision": "tfloat32"}, r"HGMMA\.64x\d+x8\.F32\.TF32"),
            ("matmul", LARGE | {"dtype": "bfloat16", "layout": "tn"}, r"HGMMA\.64x\d+x16\.F32\.BF16"),
            ("matmul", LARGE | {"dtype": "float8_e4m3fn", "out_dtype": "float16"}, r"QGMMA\.64x\d+x32\.F32\.E4M3\.E4M3"),
            ("matmul", LARGE | {"dtype": "int8"}, r"IGMMA\.64x\d+x32\.S8\.S8"),
            ("conv2d", LAYER | {"dtype": "float16", "epilogue": ("bias", "relu")}, r"HGMMA\.64x\d+x16\.F32 "),
            ("conv2d", LAYER | {"dtype": "bfloat16", "stride": 2}, r"HGMMA\.64x\d+x16\.F32\.BF16"),
        ],
    ),
)
def test_the_first_choice_multiplies_by_wgmma_and_loads_by_tma(rule: str, attrs: dict[str, Any], multiply: str, tmp_path: Path) -> None:
    policy, template = (matmul_policy, wgmma_matmul) if rule == "matmul" else (conv2d_policy, wgmma_conv2d)
    mod = canonical.lower(load_rule(ROOT, rule).of(ROOT, attrs))
    [first] = policy.propose(iter_space(mod), H200, 1)
    kernel = template.apply(mod, dict(first.candidate.params), H200)
    assert kernel is not None
    cubin = compiled_cubin(host.lower(kernel["main"]).source, "sm_90a", nvcc.FAST_MATH_FLAGS)
    code = sass(cubin.content, tmp_path)
    assert re.search(multiply, code)
    assert "UTMALDG" in code
    assert "LDG" not in re.sub("UTMALDG", "", code) or "epilogue" in attrs, "operands come by TMA alone"
    [usage] = cubin.usage.values()
    assert usage.spill_bytes == 0


@pytest.mark.slow
def test_gelu_of_a_first_mma_tile_is_computed_while_the_second_is_multiplied(tmp_path: Path) -> None:
    params = PLAIN | {"block_m": 256, "block_n": 128, "stages": 4, "kernel_schedule": "staggered"}
    mod = canonical.lower(load_rule(ROOT, "matmul").of(ROOT, LARGE | {"dtype": "float16", "epilogue": ("bias", "gelu")}))
    kernel = wgmma_matmul.apply(mod, params, H200)
    assert kernel is not None
    code = sass(compiled_cubin(host.lower(kernel["main"]).source, "sm_90a", nvcc.FAST_MATH_FLAGS).content, tmp_path)
    behind = code.rindex("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    first = code.rindex("WARPGROUP.DEPBAR.LE gsb0, 0x1", 0, behind)
    assert "HGMMA" not in code[first:behind]
    assert code[first:behind].count("MUFU.EX2") >= 32
