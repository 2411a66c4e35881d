"""Owns the tests of GPU archs with TVM: their targets are ones that it takes, and are what the files say.

Knows nothing of schedules. Nothing here needs a GPU or a CUDA toolkit.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import kerneldecl
from kerneldecl.compiler.cpu import target_of
from kerneldecl.plugins.load import load_arch

STANDARD = Path(kerneldecl.__file__).parent / "archs"
GPUS = sorted(file.stem for file in STANDARD.glob("*.toml") if load_arch(STANDARD, file.stem).gpu)


@pytest.mark.parametrize("name", GPUS)
def test_tvm_takes_the_target_as_the_file_has_it(name: str) -> None:
    arch = load_arch(STANDARD, name)
    target = target_of(arch)
    assert target.kind.name == "cuda"
    declared = {key: value for key, value in arch.tvm_target if key != "kind"}
    assert {key: target.attrs[key] for key in declared} == declared


@pytest.mark.parametrize("name", [name for name in GPUS if load_arch(STANDARD, name).the_gpu.wgmma_arch])
def test_tvm_takes_the_architecture_with_wgmma(name: str) -> None:
    arch = load_arch(STANDARD, name)
    table = tuple({**dict(arch.tvm_target), "arch": arch.the_gpu.wgmma_arch}.items())
    assert target_of(dataclasses.replace(arch, tvm_target=table)).attrs["arch"] == arch.the_gpu.wgmma_arch
