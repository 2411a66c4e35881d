"""From a torch.export program or an ONNX file to a figure: extract, build, bench; and compile, run, verify on the way."""

from __future__ import annotations

import json
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.models_for_host import WORKLOADS
from support.spaces import Space

torch = pytest.importorskip("torch", reason="pip install -e '.[models]'")

pytestmark = pytest.mark.slow


class Small(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Two outputs, weights of several shapes, one of them larger than what stays in the library."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = torch.nn.LayerNorm(32), torch.nn.Linear(32, 48), torch.nn.Linear(48, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.nn.functional.gelu(self.first(self.norm(x)))
        return self.last(hidden), hidden + y


def program(seed: int) -> torch.export.ExportedProgram:
    torch.manual_seed(seed)
    return torch.export.export(Small().eval(), (torch.randn(4, 32), torch.randn(4, 48)))


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """Return a folder with the artifact and the library of a model, made by the commands that a user types."""
    made = Space(tmp_path_factory.mktemp("small")).write({"workloads.toml": WORKLOADS})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about itself
        torch.export.save(program(1), made.root / "small.pt2")
        torch.export.save(program(2), made.root / "other.pt2")
    made.run("extract", "small.pt2")
    made.run("build", "--jobs", "1")
    made.run("compile", "small.pt2")
    return made


def test_three_commands_show_the_gain(space: Space) -> None:
    found = json.loads(space.run("bench", "small.pt2", "--json").stdout)
    assert found["secs"] > 0
    assert found["torch_secs"] > 0
    names = [row["entry"] for row in found["kernels"]]
    assert {"first", "norm", "last"} <= set(names)
    assert sum(row["share"] for row in found["kernels"]) == pytest.approx(1)
    assert "torch (eager)" in space.run("bench", "small.pt2").stdout


def test_a_compiled_models_kernels_have_the_names_of_the_workspaces_entries(space: Space) -> None:
    found = json.loads(space.run("bench", "small.so", "--json").stdout)
    assert {"first", "norm", "last"} <= {row["entry"] for row in found["kernels"]}


def test_the_whole_model_agrees_with_its_original_and_not_with_another(space: Space) -> None:
    assert "2 of 2 outputs agree with torch" in space.run("verify", "small.so", "--against", "small.pt2").stdout
    wrong = space.run("verify", "small.so", "--against", "other.pt2", code=1)
    assert "WRONG  output 0" in wrong.stdout
    assert "0 of 2 outputs agree" in wrong.stdout


def test_outputs_are_written_and_those_of_torch(space: Space, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(shape, dtype="float32") for shape in ((4, 32), (4, 48))]
    for name, array in zip("xy", arrays, strict=True):
        np.save(tmp_path / f"{name}.npy", array)
    inputs = [option for name in "xy" for option in ("--input", str(tmp_path / f"{name}.npy"))]
    space.run("run", "small.so", *inputs, "--output", str(tmp_path / "out"))
    with torch.no_grad():
        want = program(1).module()(*map(torch.from_numpy, arrays))
    for at, each in enumerate(want):
        np.testing.assert_allclose(np.load(tmp_path / "out" / f"output{at}.npy"), each.numpy(), rtol=1e-3, atol=1e-4)


def test_mistakes_are_one_sentence(space: Space) -> None:
    np.save(space.root / "wrong.npy", np.ones((4, 31), "float32"))
    signature = r"main(x: float32[4, 32], y: float32[4, 48])"
    cases = {
        ("run", "small.so"): f"0 inputs were given; expected {signature}",
        ("run", "small.so", "--input", "wrong.npy", "--input", "random"): f"input x is float32[4, 31]; expected {signature}",
        ("run", "small.so", "--input", "absent.npy", "--input", "random"): "absent.npy: [Errno 2] No such file",
        ("run", "absent.so", "--input", "random"): "absent.so: no such file",
        ("run", "small.so", "--input", "random", "--function", "forward"): "has no function forward; it has main",
        ("bench", "absent.pt2"): "absent.pt2: no such file",
        ("verify", "small.so", "--against", "absent.onnx"): "absent.onnx: no such file",
    }
    for arguments, sentence in cases.items():
        said = space.run(*arguments, code=2).stderr
        assert sentence in said
        assert said.count("\n") == 1


def test_an_onnx_model_agrees_with_onnxruntime(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="pip install -e '.[models]'")
    from onnx import TensorProto, checker, helper, numpy_helper, save

    weight = np.random.default_rng(4).standard_normal((32, 16), dtype="float32")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    shapes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", [4, 32]), ("y", [4, 16]))]
    graph = helper.make_graph(nodes, "net", shapes[:1], shapes[1:], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    made = Space(tmp_path).write({"workloads.toml": WORKLOADS})
    save(model, tmp_path / "net.onnx")
    made.run("extract", "net.onnx")
    made.run("build", "--jobs", "1")
    made.run("compile", "net.onnx")
    assert "1 of 1 outputs agree with onnxruntime" in made.run("verify", "net.so", "--against", "net.onnx").stdout


def onnx_mlp(path: Path) -> Path:
    """Write an ONNX model of a norm, a linear layer and a softmax, in float32."""
    from onnx import TensorProto, helper, numpy_helper, save

    rng = np.random.default_rng(4)
    weights = {"scale": (32,), "bias": (32,), "w": (32, 48)}
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale", "bias"], ["n"], axis=-1),
        helper.make_node("MatMul", ["n", "w"], ["h"]),
        helper.make_node("Softmax", ["h"], ["y"], axis=-1),
    ]
    shapes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", [4, 32]), ("y", [4, 48]))]
    initializers = [numpy_helper.from_array(rng.standard_normal(shape, dtype="float32"), name) for name, shape in weights.items()]
    graph = helper.make_graph(nodes, "net", shapes[:1], shapes[1:], initializers)
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize(("source", "dtype"), [("small.pt2", "float16"), ("small.pt2", "bfloat16"), ("net.onnx", "float16")])
def test_a_model_is_made_half_precision(tmp_path: Path, source: str, dtype: str) -> None:
    made = Space(tmp_path).write({"workloads.toml": WORKLOADS})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about itself
        torch.export.save(program(1), made.root / "small.pt2")
    onnx_mlp(made.root / "net.onnx")
    made.run("extract", source, "--dtype", dtype)
    declared = tomllib.loads(made.read("workloads.toml"))["workload"]
    by_rule = {entry["rule"]: entry for entry in declared}
    assert by_rule["matmul"]["dtype"] == dtype
    assert by_rule["matmul"].get("accum_dtype", "float32") == "float32"
    assert by_rule["layer_norm"]["dtype"] == dtype  # the rule computes in float32
    if source.endswith(".onnx"):
        assert by_rule["softmax"]["dtype"] == dtype
        assert by_rule["softmax"].get("accum_dtype", "float32") == "float32"
    made.run("build", "--jobs", "1")
    report = made.run("compile", source, "--dtype", dtype).stdout
    assert "miss" not in report, "what is compiled is what was extracted"
    library = Path(source).with_suffix(".so").name
    made.run("run", library, "--input", "random", "--output", "out")
    outputs = [np.load(path) for path in sorted((made.root / "out").iterdir())]
    assert all(np.isfinite(output).all() for output in outputs)
    assert {output.dtype.name for output in outputs} == {{"float16": "float16", "bfloat16": "float32"}[dtype]}  # NumPy has no bfloat16
    count = len(outputs)
    assert f"{count} of {count} outputs agree with" in made.run("verify", library, "--against", source).stdout
