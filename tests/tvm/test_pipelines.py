"""TVM compiles a module with a kernel's schedule by kerneldecl's pipeline as kerneldecl itself does: with asynchronous copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm
from gemms import nn

from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.dlight import CUDA, TensorCorePolicy
from kerneldecl.relax import TIR_PIPELINE

COPY = "cp.async.cg.shared.global"


def test_copies_of_schedules_are_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_COMPILE_FORCE_FALLBACK", "1")  # source is enough
    arch = CUDA("h200")
    config = next(each for each in TensorCorePolicy(nn, arch, {"use_wgmma": 0}).emit_config(20) if each.params["stages"] > 2)  # type: ignore[operator]
    result = apply_candidate(Path(), canonical_module(nn), config.candidate, arch.arch)
    assert result is not None
    library = tvm.compile(result.mod, target=arch.target.with_host("llvm"), tir_pipeline=TIR_PIPELINE)
    assert COPY in library.mod.imports[0].inspect_source("cuda")
    without = tvm.compile(result.mod, target=arch.target.with_host("llvm"))
    assert COPY not in without.mod.imports[0].inspect_source("cuda"), "else the pipeline would not be needed"
