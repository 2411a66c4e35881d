"""torchvision's networks from both importers: what they become, and that a deployed one computes what torch does."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tvm
from support.in_this_process import InThisProcess
from support.spaces import Space
from support.vision_models import saved_model
from tvm import relax

from kerneldecl.arrays import relative_error
from kerneldecl.compiler.model_import import read_model
from kerneldecl.extract.extract import extract_model
from kerneldecl.relax import TIR_PIPELINE, export_model, load_model, pipeline, target_of

pytest.importorskip("torch", reason="models come from torch")
pytest.importorskip("onnx", reason="one of the importers is ONNX's")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and torchvision's own
NETWORKS = ("resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0")
PIXELS = 32
HEAD = """\
edition = 1

[artifact]
name = "vision"
version = "1.0"

[target.host]
arch = "host"

[defaults]
top_k = 1
"""


def extracted(name: str, suffix: str, folder: Path) -> tuple[Space, Path, tuple[Any, Any]]:
    """Return a workspace with a network's functions, the network's file, and an input with what torch computes of it."""
    space = Space(folder).write({"workloads.toml": HEAD})
    file = folder / f"{name}{suffix}"
    arrays = saved_model(name, file, PIXELS)
    space.run_here("extract", file.name)
    return space, file, arrays


def declared(space: Space) -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = tomllib.loads(space.read("workloads.toml"))["workload"]
    return tables


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_all_of_resnet_but_its_pooling_is_standard_rules(suffix: str, tmp_path: Path) -> None:
    space, file = Space(tmp_path).write({"workloads.toml": HEAD}), tmp_path / f"net{suffix}"
    saved_model("resnet18", file, PIXELS)
    with mock.patch("kerneldecl.extract.extract.Worker", InThisProcess):
        coverage = extract_model(str(file), tmp_path)["coverage"]
    assert coverage["functions"] - coverage["standard"] == 1, "max_pool2d"
    assert 0.99 < coverage["flops"] < 1
    tables = declared(space)
    rules = Counter(table["rule"] for table in tables)
    # The last mean is of one pixel, which is a view.
    assert rules.keys() == {"transpose", "conv2d", "tensor_ir", "matmul"}
    assert [table["name"] for table in tables if table["rule"] == "tensor_ir"] == ["max_pool2d"]
    assert rules["transpose"] == 1, "the image, once"
    epilogues = {tuple(table["epilogue"]) for table in tables if table["rule"] == "conv2d"}
    assert epilogues == {("bias",), ("bias", "relu"), ("bias", "add", "relu")}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
@pytest.mark.parametrize("name", NETWORKS)
def test_images_are_transposed_once_and_batch_norms_are_folded(name: str, suffix: str, tmp_path: Path) -> None:
    saved_model(name, tmp_path / f"net{suffix}", PIXELS)
    mod = read_model.fused(read_model.read_model(str(tmp_path / f"net{suffix}")))
    functions = [function for function, _, _ in read_model.called(mod)]
    assert [function for function in functions if "transpose" in function] == ["transpose"]
    assert not [function for function in functions if "batch_norm" in function or "rsqrt" in function or "subtract" in function]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "suffix"), [("resnet18", ".pt2"), ("mobilenet_v3_small", ".onnx")])
def test_a_deployed_network_computes_what_torch_does(name: str, suffix: str, tmp_path: Path) -> None:
    space, file, (image, want) = extracted(name, suffix, tmp_path)
    space.run("build", "--jobs", "1")
    target = target_of(space.artifact())
    for mode in ("binary", "schedule"):
        passes = pipeline(space.artifact(), target, mode, strict=True)
        executable = relax.build(read_model.read_model(str(file)), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
        library = tmp_path / f"{mode}.so"
        export_model(executable, library, space.artifact() if mode == "binary" else None)
        found = load_model(library)["main"](tvm.runtime.tensor(image))
        found = found if isinstance(found, tvm.runtime.Tensor) else found[0]
        assert relative_error(found.numpy(), want.astype(np.float64)) <= 1e-4
