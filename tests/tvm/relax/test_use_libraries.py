"""Relax models that call a vendor's library: by a pass alone, and with an artifact whose winner calls one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.spaces import Space
from tvm import relax
from tvm.script import ir as I  # noqa: N812
from tvm.script import relax as R  # noqa: N812

from kerneldecl.hardware.vendor_libraries import load_vendor_library
from kerneldecl.policies.library import Options
from kerneldecl.relax import TIR_PIPELINE, ApplyArtifact, UseLibraries, export_model, load_model, pipeline, target_of

pytestmark = pytest.mark.skipif(not load_vendor_library("libscipy_openblas.so"), reason="needs scipy-openblas32")
FUSED = tvm.transform.Sequential(
    [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]
)
SHAPES = ((16, 32), (32, 24), (24,), (24, 8))
WORKSPACE = """
edition = 1

[artifact]
name = "net"
version = "1"

[target.host]
arch = "host"

[[workload]]
name = "first"
rule = "matmul"
m = 16
n = 24
k = 32
epilogue = ["bias", "relu"]
dispatch = "library"
"""


@I.ir_module
class Net:
    @R.function
    def main(  # noqa: ANN201
        x: R.Tensor((16, 32), "float32"),  # noqa: N805
        w: R.Tensor((32, 24), "float32"),
        b: R.Tensor((24,), "float32"),
        v: R.Tensor((24, 8), "float32"),
    ):
        with R.dataflow():
            y = R.nn.softmax(R.matmul(R.nn.relu(R.add(R.matmul(x, w), b)), v))
            R.output(y)
        return y


def is_right(model: Any) -> bool:
    x, w, b, v = inputs = [np.random.default_rng(5).standard_normal(shape, np.float32) for shape in SHAPES]
    logits = np.maximum(x @ w + b, 0) @ v
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    got = model["main"](*map(tvm.runtime.tensor, inputs)).numpy()
    return bool(np.allclose(got, powers / powers.sum(axis=1, keepdims=True), atol=1e-5))


def test_the_pass_alone_has_a_model_call_the_library(tmp_path: Path) -> None:
    target = tvm.target.Target("llvm")
    apply = UseLibraries(target=target)
    executable = relax.build(apply(FUSED(Net)), target, tir_pipeline=TIR_PIPELINE)
    assert sorted(apply.replaced.values()) == ["openblas", "openblas"]
    export_model(executable, tmp_path / "model.so")
    assert is_right(load_model(tmp_path / "model.so"))


def test_the_pass_names_the_version_that_is_wanted(tmp_path: Path) -> None:
    target = tvm.target.Target("llvm")
    executable = relax.build(UseLibraries(Options(openblas="0.2"), target)(FUSED(Net)), target, tir_pipeline=TIR_PIPELINE)
    export_model(executable, tmp_path / "model.so")
    with pytest.raises(RuntimeError, match=r"this kernel was tuned with 0\.2: pip install"):
        is_right(load_model(tmp_path / "model.so"))


@pytest.mark.slow
def test_an_artifacts_library_kernel_is_linked_into_a_model_and_not_compiled_with_it(tmp_path: Path) -> None:
    space = Space(tmp_path / "net").write({"workloads.toml": WORKSPACE})
    space.run("build")
    target = target_of(space.artifact())
    executable = relax.build(Net, target, relax_pipeline=pipeline(space.artifact(), target, "binary"), tir_pipeline=TIR_PIPELINE)
    export_model(executable, tmp_path / "linked.so", space.artifact())
    assert is_right(load_model(tmp_path / "linked.so"))
    export_model(executable, tmp_path / "beside.so")
    assert is_right(load_model(tmp_path / "beside.so", space.artifact()))
    compiled = ApplyArtifact(space.artifact(), "schedule", target=target)
    compiled(FUSED(Net))
    assert 'use mode "binary"' in str(compiled.report)
