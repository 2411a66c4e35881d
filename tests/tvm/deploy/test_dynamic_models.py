"""Models of dynamic batch, a torch.export program and an ONNX file: compared, timed and run at the sizes that a user names."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.models_for_host import WORKLOADS
from support.spaces import Space

pytestmark = pytest.mark.slow


def write_torch(path: Path) -> None:
    """Write a linear layer that takes 2 to 64 rows."""
    torch = pytest.importorskip("torch", reason="pip install -e '.[models]'")
    rows = torch.export.Dim("batch", min=2, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about itself
        torch.manual_seed(1)
        program = torch.export.export(torch.nn.Linear(32, 16).eval(), (torch.randn(4, 32),), dynamic_shapes=({0: rows},))
        torch.export.save(program, path)


def write_onnx(path: Path) -> None:
    """Write a matrix product of any number of rows."""
    pytest.importorskip("onnxruntime", reason="pip install -e '.[models]'")
    from onnx import TensorProto, helper, numpy_helper, save

    weight = np.random.default_rng(4).standard_normal((32, 16), dtype="float32")
    shapes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", ["batch", 32]), ("y", ["batch", 16]))]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = helper.make_graph(nodes, "net", shapes[:1], shapes[1:], [numpy_helper.from_array(weight, "w")])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


WRITERS = {"net.pt2": (write_torch, "torch"), "net.onnx": (write_onnx, "onnxruntime")}


@pytest.mark.parametrize("source", WRITERS)
def test_a_model_of_dynamic_batch_is_compared_and_timed_at_sizes(tmp_path: Path, source: str) -> None:
    write, by = WRITERS[source]
    write(tmp_path / source)
    made = Space(tmp_path).write({"workloads.toml": WORKLOADS})
    made.run_here("extract", source, "--dim", "batch=4")
    made.run_here("build", "--jobs", "1")
    made.run_here("compile", source, "--dim", "batch=4")
    verified = made.run_here("verify", "net.so", "--against", source, "--dim", "batch=4,33").stdout
    assert f"1 of 1 outputs agree with {by} ({source}), at batch=4; batch=33" in verified
    timed = json.loads(made.run_here("bench", "net.so", "--dim", "batch=4,33", "--json").stdout)
    assert [each["sizes"] for each in (timed, *timed["further"])] == [{"batch": 4}, {"batch": 33}]
    assert timed["secs"] > 0
    assert any(row["entry"] for row in timed["kernels"])
    assert "net.so with batch=33: " in made.run_here("bench", "net.so", "--dim", "batch=33").stdout
    made.run_here("run", "net.so", "--input", "random", "--dim", "batch=3")
    assert np.load(tmp_path / "output0.npy").shape == (3, 16)
    for command in (("verify", "net.so", "--against", source), ("bench", "net.so"), ("run", "net.so", "--input", "random")):
        said = made.run_here(*command, code=2).stderr
        assert ": float32[batch, 32]) has dynamic dimensions; choose their sizes for random inputs: --dim batch=8" in said
    if source == "net.pt2":
        said = made.run_here("verify", "net.so", "--against", source, "--dim", "batch=65", code=2).stderr
        assert " does not run with batch=65: " in said
        assert said.endswith("; choose sizes that it was exported for\n")
