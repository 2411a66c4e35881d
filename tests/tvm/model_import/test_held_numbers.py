"""Numbers that kernels have no arithmetic for are held in wider dtypes: every one of them, in inputs, in weights and in branches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from kerneldecl.compiler.model_import.model_error import ModelError
from kerneldecl.compiler.model_import.onnx_stored import with_stored_inputs
from kerneldecl.compiler.model_import.onnx_types import types_in
from kerneldecl.compiler.model_import.read_model import fused, read_model
from kerneldecl.deploy.references import reference_of

FLOATS = {
    "FLOAT4E2M1": ml_dtypes.float4_e2m1fn,
    "FLOAT8E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "FLOAT8E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}


def saved(path: Path, nodes: Sequence[Any], ends: Sequence[Any], weights: Sequence[Any] = ()) -> Path:
    graph = helper.make_graph(list(nodes), "net", [ends[0]], list(ends[1:]), list(weights))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=12), path)
    return path


def ran(path: Path, *args: Any) -> Any:
    executable = tvm.relax.build(fused(read_model(path)), tvm.target.Target({"kind": "llvm", "opt-level": 1}))
    found = tvm.relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, args))
    return found.numpy()


def value(name: str, dtype: int, shape: Sequence[Any]) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("saturate", [0, 1])
def test_every_number_and_what_lies_between_two_of_them_is_rounded_as_numpy_rounds(tmp_path: Path, name: str, saturate: int) -> None:
    dtype = FLOATS[name]
    bits = 4 if name == "FLOAT4E2M1" else 8
    numbers = np.arange(2**bits, dtype="uint8").view(dtype).astype("float32")
    numbers = np.unique(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2  # exact: ties
    beside = [np.nextafter(each, np.float32(sign * np.inf)) for each in (numbers, middles) for sign in (-1, 1)]
    beyond = np.array([1.04, 1.07, 1.5, 1e9], "float32") * numbers[-1]
    x = np.concatenate([numbers, middles, *beside, beyond, -beyond]).astype("float32")
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.DataType.Value(name), saturate=saturate)
    ends = [value("x", TensorProto.FLOAT, [len(x)]), value("y", TensorProto.DataType.Value(name), [len(x)])]
    found = ran(saved(tmp_path / "net.onnx", [node], ends), x)
    expected = x.astype(dtype).astype("float32")
    if saturate:
        expected = np.clip(x, numbers[0], numbers[-1]).astype(dtype).astype("float32")
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found.astype("float32"), expected)


@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
def test_powers_of_two_are_rounded_to_as_asked(tmp_path: Path, mode: str) -> None:
    powers = np.exp2(np.arange(-126, 128, dtype="float64")).astype("float32")
    x = np.concatenate([powers, *(np.nextafter(powers, np.float32(to)) for to in (0, np.inf)), powers[:-1] * 1.5, powers[:-1] * 1.25])
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E8M0, round_mode=mode)
    ends = [value("x", TensorProto.FLOAT, [len(x)]), value("y", TensorProto.FLOAT8E8M0, [len(x)])]
    found = ran(saved(tmp_path / "net.onnx", [node], ends), x).astype("float64")
    mantissa, exponent = np.frexp(x.astype("float64"))  # x = mantissa * 2^exponent, a half or more and below 1
    is_up = {"up": mantissa > 0.5, "down": np.zeros(len(x), bool), "nearest": mantissa >= 0.75}[mode]
    expected = np.minimum(np.exp2(exponent - 1.0 + is_up), 2.0**127)
    np.testing.assert_array_equal(found, np.maximum(expected, 2.0**-127))


def test_packed_weights_are_unpacked_also_those_in_a_file_beside_the_model(tmp_path: Path) -> None:
    weight = (np.arange(35).reshape(7, 5) % 16 - 8).astype(ml_dtypes.int4)
    scale = np.linspace(0.5, 2, 5, dtype="float32")
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale"], ["wide"], axis=1),
        helper.make_node("MatMul", ["x", "wide"], ["y"]),
    ]
    ends = [value("x", TensorProto.FLOAT, [3, 7]), value("y", TensorProto.FLOAT, [3, 5])]
    path = saved(tmp_path / "net.onnx", nodes, ends, [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(scale, "scale")])
    x = np.random.default_rng(0).standard_normal((3, 7), "float32")
    expected = x @ (weight.astype("float32") * scale)
    np.testing.assert_allclose(ran(path, x), expected, rtol=1e-5)
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="net.bin", size_threshold=0)
    np.testing.assert_allclose(ran(path, x), expected, rtol=1e-5)


def branches(*nodes: Any) -> dict[str, Any]:
    ends = [value("inner", TensorProto.INT4, [6])]
    return {name: helper.make_graph(list(nodes), name, [], ends) for name in ("then_branch", "else_branch")}


def test_a_cast_in_a_branch_goes_to_the_type_of_its_other_input(tmp_path: Path) -> None:
    like = numpy_helper.from_array(np.zeros(1, ml_dtypes.int4), "like")
    condition = helper.make_node("ReduceMax", ["is_positive"], ["condition"], keepdims=0)
    nodes = [
        helper.make_node("Greater", ["x", "zero"], ["is_positive"]),
        condition,
        helper.make_node("If", ["condition"], ["y"], **branches(helper.make_node("CastLike", ["x", "like"], ["inner"]))),
    ]
    ends = [value("x", TensorProto.INT32, [6]), value("y", TensorProto.INT4, [6])]
    path = saved(tmp_path / "net.onnx", nodes, ends, [like, numpy_helper.from_array(np.zeros((), "int32"), "zero")])
    found = ran(path, np.array([-9, -8, 7, 8, 15, 200], "int32"))
    np.testing.assert_array_equal(found, np.array([7, -8, 7, -8, -1, -8], "int8"))


def test_a_cast_to_a_type_that_nobody_knows_is_refused() -> None:
    """The input that tells would be int8, for int4 as for int8."""
    nodes = [
        helper.make_node("Mystery", ["x"], ["like"], domain="com.microsoft"),
        helper.make_node("CastLike", ["x", "like"], ["y"]),
    ]
    ends = [value("x", TensorProto.INT4, [6]), value("y", TensorProto.INT4, [6])]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    with pytest.raises(ModelError, match=r"the dtype that ONNX's operator CastLike \(node that gives y\) gives is not known"):
        with_stored_inputs(model, types_in(graph))


def test_a_model_with_such_inputs_is_not_compared_with_onnxruntime(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="pip install -e '.[models]'")
    ends = [value("x", TensorProto.INT4, [4]), value("y", TensorProto.FLOAT, [4])]
    path = saved(tmp_path / "net.onnx", [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)], ends)
    model = onnx.load(path)
    model.opset_import[0].version, model.ir_version = 21, 10  # which onnxruntime takes
    onnx.save(model, path)
    by, reference = reference_of(str(path))
    assert by == "TVM at -O0"
    np.testing.assert_array_equal(reference([np.array([-8, -1, 0, 7], "int8")])[0], [-8, -1, 0, 7])
