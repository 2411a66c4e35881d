"""Functions of every kind have a kernel that is verified, or run by TVM with a reason: each model computes what NumPy does."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tvm
from support.in_this_process import InThisProcess
from support.relax_functions import UNSCHEDULED, Model, models
from support.spaces import REAL, Space
from tvm import relax

import kerneldecl
from kerneldecl.arrays import aligned
from kerneldecl.errors import DeclarationError
from kerneldecl.extract.extract import extract_model
from kerneldecl.relax import TIR_PIPELINE, export_model, load_model, pipeline

HEAD = REAL["workloads.toml"].split("[defaults]")[0] + "[defaults]\ntop_k = 1\n"
MODELS = {each.name: each for each in models()}


def suppress_no_entry(each: Model) -> contextlib.AbstractContextManager[object]:
    """Expect the sentence that no function can be an entry, of a model that TVM runs alone."""
    is_alone = each.name in UNSCHEDULED
    return pytest.raises(DeclarationError, match="none of its functions") if is_alone else contextlib.nullcontext()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a workspace with an artifact of the functions of all models that have any."""
    space = Space(tmp_path_factory.mktemp("functions")).write({"workloads.toml": HEAD})
    for each in MODELS.values():
        space.write({f"{each.name}.json": tvm.ir.save_json(each.module)})
        with mock.patch("kerneldecl.extract.extract.Worker", InThisProcess), suppress_no_entry(each):
            extract_model(str(space.root / f"{each.name}.json"), space.root)
    space.run("build", "--jobs", "1")
    return space


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["schedule", "binary"])
def test_a_model_of_any_operator_computes_what_numpy_does(built: Space, mode: str, tmp_path: Path) -> None:
    target = tvm.target.Target(json.loads((built.artifact() / "manifest.json").read_text())["arch"]["target"])
    for each in MODELS.values():
        passes = pipeline(built.artifact(), target, mode, strict=each.name not in UNSCHEDULED)  # type: ignore[arg-type]
        executable = relax.build(each.module, target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
        export_model(executable, tmp_path / f"{each.name}.so", built.artifact() if mode == "binary" else None)
        _computes(each, load_model(tmp_path / f"{each.name}.so")["main"](*map(tvm.runtime.tensor, each.inputs)))


def _computes(each: Model, found: object) -> None:
    got = [found] if hasattr(found, "numpy") else list(found)  # type: ignore[call-overload]
    assert len(got) == len(each.outputs), each.name
    for one, want in zip(got, each.outputs, strict=True):
        np.testing.assert_allclose(one.numpy(), want, rtol=1e-5, atol=1e-6, err_msg=each.name)


@pytest.mark.slow
def test_a_kernel_of_two_outputs_is_called_with_both(built: Space) -> None:
    halves = MODELS["halves"]
    kernels = kerneldecl.load(built.artifact())
    (name,) = (entry["name"] for entry in kernels.manifest["entries"] if entry["name"] == "relu_split")
    first, second = (aligned(np.empty_like(want)) for want in halves.outputs)
    kernels[name](*halves.inputs, first, second)
    assert np.array_equal(first, halves.outputs[0])
    assert np.array_equal(second, halves.outputs[1])
