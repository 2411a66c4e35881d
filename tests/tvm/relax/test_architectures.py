"""Owns the test of real architectures through both importers, deployed on this CPU with the kernels of one build, in torch's dtypes.

Knows nothing of how an architecture is written.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tvm
from support.architectures import LANGUAGE, VISION, architecture
from support.in_this_process import InThisProcess
from tvm import relax

from kerneldecl.api import build
from kerneldecl.compiler.model_import.read_model import read_model
from kerneldecl.extract.extract import extract_model
from kerneldecl.relax import TIR_PIPELINE, export_model, load_model, pipeline, target_of

torch = pytest.importorskip("torch", reason="models come from torch")
pytest.importorskip("onnxscript", reason="torch exports ONNX by it")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's and transformers' own, of their exporters
NAMES = [*VISION, *LANGUAGE]
DTYPES, FILES = ("float32", "float16"), ("pt2", "onnx")
ROUNDING = {"float32": 2e-6, "float16": 2e-3}
"""What torch's own rounding errors are taken for where they are less."""
ATTENTION = {
    "vit": {"encoder.layers.encoder_layer_0.attention"},
    "swin": {"features.1.0.attn.attention", "features.1.1.attn.attention", "features.3.0.attn.attention"},
    "bert": {"model.encoder.layer.0.attention"},
    "gpt2": {"model.transformer.h.0.attn.attention"},
    "llama": {"model.model.layers.0.self_attn.attention"},
    "llama_decoding": {"layer.self_attn.attention"},
    "t5": {
        "model.encoder.block.0.layer.0.SelfAttention.attention",
        "model.decoder.block.0.layer.0.SelfAttention.attention",
        "model.decoder.block.0.layer.1.EncDecAttention.attention",
    },
}
"""Entries that torch.export programs in float32 have for attention; other files have the same functions or such as are named otherwise."""
WORKSPACE = """\
edition = 1

[artifact]
name = "models"
version = "1.0"

[target.host]
arch = "host"

[defaults]
top_k = 1
"""


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_computes_what_torch_does(name: str, tmp_path: Path) -> None:
    module, args = architecture(name)
    with torch.no_grad():
        exact = outputs_of(module(*args))
    (tmp_path / "workloads.toml").write_text(WORKSPACE)
    theirs, given = {}, {}
    for dtype in DTYPES:
        given[dtype] = in_dtype(args, dtype)
        with torch.no_grad():
            theirs[dtype] = error_of(outputs_of(module.to(getattr(torch, dtype))(*given[dtype])), exact)
            exported(module, given[dtype], tmp_path, dtype)
        with mock.patch("kerneldecl.extract.extract.Worker", InThisProcess):
            for kind in FILES:
                extract_model(str(tmp_path / f"{dtype}.{kind}"), tmp_path)
    entries = tomllib.loads((tmp_path / "workloads.toml").read_text())["workload"]
    attentions = {each["name"] for each in entries if each["rule"] == "attention"}
    assert ATTENTION.get(name, set()) <= attentions
    assert bool(attentions) == (name in ATTENTION)
    assert not {each["rule"] for each in entries} & ({"softmax"} if name in ATTENTION else set()), "none is left in parts"
    build(tmp_path, jobs=1)
    errors = {(dtype, kind): error_of(deployed(tmp_path, f"{dtype}.{kind}", given[dtype]), exact) for dtype in DTYPES for kind in FILES}
    wrong = {case: error for case, error in errors.items() if not error <= 2 * max(theirs[case[0]], ROUNDING[case[0]])}
    assert not wrong, (errors, theirs)


def exported(module: Any, args: tuple[Any, ...], folder: Path, dtype: str) -> None:
    """Write a module as torch.export program and as ONNX."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    program = torch.export.export(module, args)
    torch.export.save(program, folder / f"{dtype}.pt2")
    torch.onnx.export(module, args, str(folder / f"{dtype}.onnx"), dynamo=True, external_data=False, verbose=False)


def deployed(root: Path, model: str, args: Sequence[Any]) -> list[Any]:
    """Return what a model computes with the artifact's kernels, of which no function may lack one."""
    (artifact,) = root.glob("dist/*/host")
    target = target_of(artifact)
    passes = pipeline(artifact, target, "binary", strict=True)
    executable = relax.build(read_model(str(root / model)), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    export_model(executable, root / f"{model}.so")
    run = load_model(root / f"{model}.so", artifact)["main"]
    return outputs_of(run(*map(tvm.runtime.from_dlpack, args)))


def in_dtype(args: Sequence[Any], dtype: str) -> tuple[Any, ...]:
    return tuple(arg.to(getattr(torch, dtype)) if arg.is_floating_point() else arg for arg in args)


def outputs_of(result: Any) -> list[Any]:
    return [torch.from_dlpack(each) for each in ([result] if hasattr(result, "__dlpack__") else result)]


def error_of(found: Sequence[Any], exact: Sequence[Any]) -> float:
    """Return the largest of the outputs' errors: the norm of the difference by the norm of what is exact."""
    pairs = [(each.double(), want.double()) for each, want in zip(found, exact, strict=True)]
    return max(float((each - want).norm() / want.norm()) for each, want in pairs)
