"""Attention is one entry where a target has a fused kernel for it, and a deployment calls what was extracted."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tvm
from support.in_this_process import InThisProcess
from tvm import relax
from tvm.relax import op

from kerneldecl.api import build
from kerneldecl.extract.extract import extract_model, extracted_text
from kerneldecl.relax import TIR_PIPELINE, pipeline, target_of

ROWS, HEADS, SIZE = 24, 2, 16
WORKSPACE = """\
edition = 1

[artifact]
name = "model"
version = "1.0"

{targets}
[defaults]
policy = "{policy}"
top_k = 1
"""
HOST = '[target.host]\narch = "host"\n'
TWO = '[target.narrow]\narch = "x86-64-v3"\n\n[target.wide]\narch = "x86-64-v4"\n'
FOR_WIDE_VECTORS = '''\
"""Owns attention for CPUs whose vectors have 64 bytes."""

from kerneldecl.analysis.attention import attention_of
from kerneldecl.model import Candidate, Proposal

TEMPLATES = ("cpu_attention",)


def propose(space, arch, top_k):
    if attention_of(space) is None or arch.the_cpu.vector_bytes < 64:
        return ()
    return (Proposal(Candidate.of("cpu_attention", {}), 1.0),)
'''


def model() -> tvm.IRModule:
    """Return attention of rows with interleaved heads, as projections write them, without projections."""
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorType((1, ROWS, HEADS, SIZE), "float32")) for name in "qkv"]
    with builder.function("main", params):
        with builder.dataflow():
            q, k, v = (op.permute_dims(each, (0, 2, 1, 3)) for each in params)
            scores = op.multiply(op.matmul(q, op.permute_dims(k, (0, 1, 3, 2))), relax.const(0.25))
            found = builder.emit_output(op.permute_dims(op.matmul(op.nn.softmax(scores), v), (0, 2, 1, 3)))
        builder.emit_func_output(found)
    return builder.get()


def extracted(root: Path, targets: str, policy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the summary of the model's extraction, and its entries by name."""
    (root / "workloads.toml").write_text(WORKSPACE.format(targets=targets, policy=policy))
    (root / "model.json").write_text(tvm.ir.save_json(model()))
    with mock.patch("kerneldecl.extract.extract.Worker", InThisProcess):
        summary = extract_model(str(root / "model.json"), root)
    tables = tomllib.loads((root / "workloads.toml").read_text())["workload"]
    return summary, {table["name"]: table for table in tables}


def test_targets_have_entries_for_the_model_as_they_deploy_it(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "for_wide.py").write_text(FOR_WIDE_VECTORS)
    summary, entries = extracted(tmp_path, TWO, "for_wide")
    assert entries["attention"]["targets"] == ["wide"]
    assert entries["attention"]["rule"] == "attention"
    assert {name: table["targets"] for name, table in entries.items() if name != "attention"} == {
        "scores": ["narrow"],
        "softmax": ["narrow"],
        "context": ["narrow"],
    }
    assert "  in parts attention for narrow: there is no fused kernel for it" in extracted_text(summary)
    noted = [{"targets": ["wide"], "what": [], "noted": ["a.attention: rule attention", "b.attention: rule attention"]}]
    assert "  general a.attention and 1 more for wide: rule attention" in extracted_text(summary | {"in_parts": noted})


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "rules"), [("auto", {"attention"}), ("cpu_fallback", {"matmul", "softmax"})])
def test_a_deployed_model_calls_what_was_extracted(tmp_path: Path, policy: str, rules: set[str]) -> None:
    _, entries = extracted(tmp_path, HOST, policy)
    assert {table["rule"] for table in entries.values()} == rules
    build(tmp_path)
    (artifact,) = tmp_path.glob("dist/*/host")
    target = target_of(artifact)
    passes = pipeline(artifact, target, "schedule", strict=True)
    machine = relax.VirtualMachine(relax.build(model(), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE), tvm.cpu())
    assert passes.report is not None
    assert len(passes.report.hits) == len(entries)
    assert not passes.report.unused
    assert bool(passes.report.in_parts) == (policy != "auto")
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, ROWS, HEADS, SIZE), "float32")
    powers = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) / 4)
    exact = np.einsum("bhqk,bkhd->bqhd", powers / powers.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(machine["main"](*map(tvm.runtime.tensor, (q, k, v))).numpy(), exact, atol=1e-5)
