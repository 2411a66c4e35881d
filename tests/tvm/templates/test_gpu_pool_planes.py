"""Pooling with channels first: right results on the emulated GPU, the instructions it is for, proposals, None for other functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc, needs_nvdisasm, sass
from support.emulated_kernel import error
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.analysis.pool_planes import pieces
from kerneldecl.arrays import poisoned
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_program
from kerneldecl.compiler.cuda_headers import headers_for
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_pool as policy
from kerneldecl.rule import Rule
from kerneldecl.templates import gpu_pool_planes as template
from kerneldecl.toolchain import nvcc

H200 = load_arch(REPOSITORY, "h200")
SMALL: dict[str, Any] = {
    **{"op": "max", "layout": "nchw", "n": 2, "c": 3, "h": 13, "w": 16, "kh": 3, "kw": 3, "stride": 2, "padding": 1, "dtype": "float16"}
}
RESNET: dict[str, Any] = SMALL | {"n": 8, "c": 64, "h": 112, "w": 112}
ODD: dict[str, Any] = SMALL | {"n": 8, "c": 176, "h": 67, "w": 67}
TINY: dict[str, Any] = SMALL | {"n": 8, "c": 288, "h": 11, "w": 11}
PARAMS: dict[str, Value] = {"threads": 32, "strip": 4, "column": 3, "ahead": 3, "staged": False}
CASES: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({}, {}),
    ({}, {"staged": True, "ahead": 1}),
    ({"w": 15, "h": 11, "c": 5}, {"strip": 1, "column": 6, "staged": True, "threads": 64}),
    ({"w": 11, "h": 11}, {"strip": 3, "column": 2}),
    ({"op": "mean", "w": 18}, {"strip": 2, "ahead": 1}),
    ({"op": "mean", "count_padding": False, "dtype": "bfloat16", "stride": 1}, {"strip": 8, "column": 4, "ahead": 9}),
    ({"dtype": "bfloat16", "stride": 1, "w": 17}, {"column": 4, "strip": 5, "staged": True}),
    ({"dtype": "float32", "kh": 5, "kw": 5, "padding": 2}, {"column": 2, "ahead": 4}),
    ({"kh": 2, "kw": 2, "padding": 0, "stride": 1, "w": 12}, {"column": 4, "strip": 8}),
    ({"op": "mean", "dtype": "float32", "kh": 2, "kw": 2, "padding": 1, "stride": 1, "w": 9}, {"strip": 3, "column": 5, "staged": True}),
    ({"n": 1, "c": 1, "w": 3, "stride": 1, "padding": 0}, {"column": 4, "strip": 1, "staged": True}),
    ({"kh": 5, "kw": 5, "padding": 1, "stride": 3, "w": 24}, {"strip": 4, "column": 2}),
    ({"kh": 5, "kw": 5, "padding": 2, "stride": 1}, {"strip": 8, "column": 5, "staged": True}),
    ({"n": 3, "c": 11, "h": 4, "w": 5, "dtype": "float32"}, {"strip": 1, "column": 2, "staged": True, "threads": 96}),
]


def rule_of(**attrs: Any) -> Rule:
    return load_rule(REPOSITORY, "pool2d").of(REPOSITORY, attrs)


def cubin_of(attrs: dict[str, Any], params: dict[str, Value]) -> nvcc.Cubin:
    mod = template.apply(canonical.lower(rule_of(**attrs)), params, H200)
    assert mod is not None
    program = cuda_program(mod, H200, "kernel")
    return nvcc.compile_cubin(program.source, program.arch, program.flags, headers_for(program.arch, program.flags))


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({0, 2, 3, 5, 9, 11, 13}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert error(template, rule_of(**SMALL | attrs), PARAMS | params, H200) <= 1
