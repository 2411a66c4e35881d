"""What is no model, or one that cannot be read, has one sentence with the way out."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from kerneldecl.compiler.model_import.model_error import ModelError
from kerneldecl.compiler.model_import.read_model import fused, read_model
from kerneldecl.relax.bound_model import memory_problem

RELU = helper.make_node("Relu", ["x"], ["y"])
GEMM = helper.make_node("MatMul", ["x", "w"], ["y"])
WEIGHT = np.arange(64 * 2048, dtype="float32").reshape(64, 2048) / 1e5


def model(node: Any, opset: int = 17, weights: Sequence[tuple[str, Any]] = (), domain: str = "") -> Any:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", [4, 64]), ("y", ["a", "b"]))]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights]
    graph = helper.make_graph([node], "net", infos[:1], infos[1:], initializers)
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as found:
        read_model(path)
    assert found.value.hint
    assert "\n" not in found.value.sentence
    return found.value.sentence


def test_a_torch_program_with_a_packages_operator_names_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch programs need torch")
    with torch.library._scoped_library("kerneldecl_tests", "DEF") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("doubled", torch.empty_like, "Meta")
        module = torch.nn.Module()
        module.forward = lambda x: torch.ops.kerneldecl_tests.doubled(x) + 1
        torch.export.save(torch.export.export(module, (torch.ones(2),)), tmp_path / "net.pt2")
    assert "it calls torch.ops.kerneldecl_tests.doubled.default, which is no operator of torch" in refused(tmp_path / "net.pt2")


NODES = {
    "no converter for ONNX's operator Frobnicate (node that gives y)": model(helper.make_node("Frobnicate", ["x"], ["y"])),
    "no converter for ONNX's operator my.Relu (node that gives y)": model(helper.make_node("Relu", ["x"], ["y"], domain="my"), domain="my"),
    "its opset is 99; onnx": model(RELU, opset=99),
    "ONNX's operator Add (node that gives y) broadcasts as before opset 7": model(
        helper.make_node("Add", ["x", "w"], ["y"], broadcast=1, axis=0), 6, [("w", np.ones(4, "float32"))]
    ),
    "TVM's importer does not take ONNX's operator MatMul (node that gives y): Matmul requires the reduction length": model(
        GEMM, weights=[("w", WEIGHT.T)]
    ),
}


def test_a_model_of_dynamic_extent_has_its_dimensions_in_the_way_out(tmp_path: Path) -> None:
    net = model(GEMM, weights=[("w", WEIGHT.T)])
    net.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(net, tmp_path / "net.onnx")
    with pytest.raises(ModelError) as found:
        read_model(tmp_path / "net.onnx")
    assert found.value.hint.endswith("; or give every dynamic dimension sizes, as in --dim batch=8")


@pytest.mark.parametrize("sentence", NODES)
def test_an_onnx_model_that_cannot_be_imported_says_why(tmp_path: Path, sentence: str) -> None:
    onnx.save(NODES[sentence], tmp_path / "net.onnx")
    assert refused(tmp_path / "net.onnx").startswith(sentence)


def test_an_input_without_a_dtype_and_one_that_is_no_tensor_are_named(tmp_path: Path) -> None:
    untyped = model(RELU)
    untyped.graph.input[0].type.tensor_type.elem_type = 0
    onnx.save(untyped, tmp_path / "untyped.onnx")
    assert refused(tmp_path / "untyped.onnx") == "its input x is of no dtype"
    sequence = model(helper.make_node("ConcatFromSequence", ["x"], ["y"], axis=0))
    sequence.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, [4]))
    onnx.save(sequence, tmp_path / "sequence.onnx")
    assert refused(tmp_path / "sequence.onnx") == "its input x is a sequence, not a tensor"


def test_a_part_of_an_onnx_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model(GEMM, weights=[("w", WEIGHT)]), path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-9], b"words\n"):
        path.write_bytes(content)
        assert refused(path).startswith("not ONNX")
    path.write_bytes(b"")
    assert refused(path) == "ONNX's own checker objects: The model does not have an ir_version set properly."


def test_weights_beside_an_onnx_file_are_read_and_missing_ones_named(tmp_path: Path) -> None:
    path, beside = tmp_path / "net.onnx", tmp_path / "net.bin"
    onnx.save(model(GEMM, weights=[("w", WEIGHT)]), path, save_as_external_data=True, location=beside.name, size_threshold=0)
    machine = tvm.relax.VirtualMachine(tvm.relax.build(fused(read_model(path)), "llvm"), tvm.cpu())
    x = np.ones((4, 64), "float32")
    np.testing.assert_allclose(machine["main"](tvm.runtime.tensor(x)).numpy(), x @ WEIGHT, rtol=1e-5)
    beside.write_bytes(beside.read_bytes()[:1000])
    assert re.match(r"its weights cannot be read: .*1000 bytes.* 'w'", refused(path))
    beside.unlink()
    assert "tensor name: w) should be stored in" in refused(path)


def test_what_torch_cannot_read_is_no_program(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="pip install -e '.[models]'")
    path = tmp_path / "net.pt2"
    path.write_bytes(b"words")
    assert refused(path) == "not a zip archive, or not a whole one"
    torch.save({"weight": torch.ones(4)}, path)
    assert refused(path) == f"not a program that torch {torch.__version__} can read: {_NO_FORMAT}"


_NO_FORMAT = "PytorchStreamReader failed locating file archive_format: file not found"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's, about itself
def test_a_program_of_another_torch_names_both_versions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason="pip install -e '.[models]'")
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(4),)), tmp_path / "here.pt2")
    path = tmp_path / "other.pt2"
    with zipfile.ZipFile(tmp_path / "here.pt2") as here, zipfile.ZipFile(path, "w") as other:
        for info in here.infolist():
            other.writestr(info.filename, re.sub(rb'("schema_version": \{"major": )\d+', rb"\g<1>99", here.read(info)))
    assert re.search(r"torch 2.* can read: Serialized schema version .*99.* does not match", refused(path))
    assert not capfd.readouterr().err, "torch prints a traceback of the same"


def test_weights_larger_than_a_gpu_are_refused_before_they_are_copied() -> None:
    gpu = SimpleNamespace(dlpack_device_type=tvm.cuda().dlpack_device_type, available_global_memory=2**30)
    assert memory_problem(2**30, gpu) == ""
    assert memory_problem(3 * 2**30, gpu).startswith("the weights take 3.0 GiB, and the GPU has 1.0 GiB free;")
    assert memory_problem(2**50, tvm.cpu()) == ""
