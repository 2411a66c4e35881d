"""ONNX models of dynamic extents compute what ONNX's reference does at any sizes, and at those that a file is read for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from support.unoptimised import unoptimised
from tvm import relax

from kerneldecl.compiler.actions import extract
from kerneldecl.compiler.cpu import PIPELINE
from kerneldecl.compiler.dynamic_shapes import dynamic_dims, only_sizes
from kerneldecl.compiler.model_import.from_onnx import module_of_model
from kerneldecl.compiler.model_import.model_error import ModelError
from kerneldecl.compiler.model_import.read_model import fused, read_model, read_sized
from kerneldecl.hardware import host

Shape = Sequence[int | str]
RNG = np.random.default_rng(5)


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return helper.make_node(operator, inputs.split(), outputs.split(), **attributes)


def model(nodes: Sequence[Any], inputs: Mapping[str, Shape], constants: Mapping[str, Any], rank: int = 4) -> Any:
    """Return a model whose result is y; the input called index is of integers."""
    dtypes = {"index": TensorProto.INT64}
    infos = [helper.make_tensor_value_info(name, dtypes.get(name, TensorProto.FLOAT), shape) for name, shape in inputs.items()]
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)
    graph = helper.make_graph(list(nodes), "net", infos, [result], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def machine(mod: tvm.IRModule) -> Any:
    target = unoptimised(host.detect())
    return relax.VirtualMachine(relax.build(fused(mod, target), target, tir_pipeline=PIPELINE), tvm.cpu())["main"]


def check(main: Any, given: Any, arrays: Sequence[Any]) -> None:
    (wanted,) = ReferenceEvaluator(given).run(None, {info.name: array for info, array in zip(given.graph.input, arrays, strict=True)})
    np.testing.assert_allclose(main(*map(tvm.runtime.tensor, arrays)).numpy(), wanted, rtol=1e-5, atol=1e-6)


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape, dtype="float32")


HEADS = [  # x of [batch, seq, 8] becomes [batch, 2, seq, 4], by a shape that the model computes
    node("Shape", "x", "shape"),
    node("Gather", "shape zero", "b", axis=0),
    node("Gather", "shape one", "s", axis=0),
    node("Unsqueeze", "b at", "b1"),
    node("Unsqueeze", "s at", "s1"),
    node("Concat", "b1 s1 heads rest", "split", axis=0),
    node("Reshape", "x split", "apart"),
    node("Transpose", "apart", "y", perm=[0, 2, 1, 3]),
]
MASK = [  # keys after a query are hidden: y = where(j <= i, x, -1), with i and j of Range, expanded to the shape of x
    node("Shape", "x", "shape"),
    node("Gather", "shape one", "s", axis=0),
    node("Range", "zero s one", "places"),
    node("Unsqueeze", "places last", "rows"),
    node("LessOrEqual", "places rows", "seen"),
    node("Unsqueeze", "s at", "s1"),
    node("Concat", "minus s1 s1", "wanted", axis=0),
    node("Equal", "wanted minus", "is_own"),
    node("ConstantOfShape", "three", "ones", value=numpy_helper.from_array(np.array([1], "int64"))),
    node("Where", "is_own ones wanted", "target"),
    node("Expand", "seen target", "mask"),
    node("Where", "mask x below", "y"),
]
NUMBERS = {
    "zero": np.array(0, "int64"),
    "one": np.array(1, "int64"),
    "at": np.array([0], "int64"),
    "last": np.array([1], "int64"),
    "heads": np.array([2], "int64"),
    "rest": np.array([-1], "int64"),
    "minus": np.array([-1], "int64"),
    "three": np.array([3], "int64"),
    "below": np.array(-1, "float32"),
}


@pytest.mark.parametrize(("nodes", "shape"), [(HEADS, ("batch", "seq", 8)), (MASK, ("batch", "seq", "seq"))], ids=["heads", "mask"])
def test_shapes_that_a_model_computes_are_expressions_of_its_dimensions(nodes: Sequence[Any], shape: Shape) -> None:
    given = model(nodes, {"x": shape}, NUMBERS)
    mod = module_of_model(given)
    operators = mod.script()
    assert "shape_to_tensor" not in operators
    assert "tensor_to_shape" not in operators
    main = machine(mod)
    for sizes in ({"batch": 2, "seq": 5}, {"batch": 1, "seq": 1}, {"batch": 3, "seq": 16}):
        check(main, given, [floats(*(sizes.get(str(each), each) for each in shape))])


SLICES = {
    "from the end": ([-2], [2**63 - 1], (4, 8)),
    "without the last": ([0], [-1], (4, 8)),
    "the first": ([0], [1], (4, 8)),
    "at most three": ([0], [3], (2, 8)),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_of_a_dynamic_axis(name: str) -> None:
    starts, ends, shape = SLICES[name]
    constants = {"starts": np.array(starts), "ends": np.array(ends), "axes": np.array([0])}
    given = model([node("Slice", "x starts ends axes", "y")], {"x": ("n", 8)}, constants)
    main = machine(module_of_model(given))
    for rows in (shape[0], 7):
        check(main, given, [floats(rows, 8)])


def test_a_table_is_cut_to_as_many_rows_as_there_are_tokens_and_never_read_behind_its_end() -> None:
    nodes = [
        node("Shape", "x", "shape"),
        node("Slice", "shape last heads at", "s"),
        node("Slice", "table at s at", "rows"),
        node("Add", "x rows", "y"),
    ]
    given = model(nodes, {"x": ("batch", "seq", 8)}, {**NUMBERS, "table": floats(16, 8)})
    main = machine(module_of_model(given))
    for seq in (1, 9, 16):
        check(main, given, [floats(2, seq, 8)])
    assert np.isfinite(main(tvm.runtime.tensor(floats(2, 20, 8))).numpy()).all()


@pytest.mark.parametrize("index", [0, -1])
def test_one_element_of_a_dynamic_axis(index: int) -> None:
    given = model([node("Gather", "x index", "y", axis=1)], {"x": ("batch", "seq", 8)}, {"index": np.array(index)})
    main = machine(module_of_model(given))
    check(main, given, [floats(2, 5, 8)])


def test_indices_may_count_from_the_end_of_a_dynamic_axis() -> None:
    given = model([node("Gather", "x index", "y", axis=0)], {"x": ("n", 4), "index": ("m",)}, {})
    main = machine(module_of_model(given))
    check(main, given, [floats(6, 4), np.array([0, -1, 5, -6])])


def test_counts_of_a_tile_may_be_dynamic() -> None:
    nodes = [node("Shape", "x", "shape"), node("Slice", "shape at last at", "n"), node("Concat", "n last", "counts", axis=0)]
    given = model([*nodes, node("Tile", "w counts", "y")], {"x": ("n", 4)}, {**NUMBERS, "w": floats(2, 3)})
    check(machine(module_of_model(given)), given, [floats(3, 4)])


def test_dimensions_that_a_model_takes_to_be_equal_become_one(tmp_path: Path) -> None:
    """As a mask's length and that of a cache with new keys, which exporters give names of their own."""
    nodes = [node("Concat", "past x", "keys", axis=1), node("Mul", "keys mask", "y")]
    given = model(nodes, {"x": ("b", "new", 4), "past": ("b", "old", 4), "mask": ("c", "total", 1)}, {}, rank=3)
    mod = module_of_model(given)
    assert dynamic_dims(mod) == ["b", "new", "old"]
    main = machine(mod)
    check(main, given, [floats(2, 1, 4), floats(2, 6, 4), floats(2, 7, 1)])
    with pytest.raises(RuntimeError):
        main(*map(tvm.runtime.tensor, (floats(2, 1, 4), floats(2, 6, 4), floats(2, 5, 1))))
    onnx.save(given, tmp_path / "net.onnx")
    main = machine(read_sized(tmp_path / "net.onnx", {"b": [2], "new": [1], "old": [6]}))
    check(main, given, [floats(2, 1, 4), floats(2, 6, 4), floats(2, 7, 1)])
    check(main, given, [floats(1, 2, 4), floats(1, 6, 4), floats(1, 8, 1)])


def test_the_branch_is_taken_whose_condition_dimensions_tell() -> None:
    branches = {
        f"{name}_branch": helper.make_graph(
            [node(operator, "x", f"out_{name}")], name, [], [helper.make_tensor_value_info(f"out_{name}", 1, None)]
        )
        for name, operator in (("then", "Relu"), ("else", "Neg"))
    }
    nodes = [node("Shape", "x", "shape"), node("Gather", "shape one", "columns"), node("Equal", "columns one", "is_one")]
    given = model([*nodes, node("If", "is_one", "y", **branches)], {"x": ("n", 8)}, NUMBERS)
    mod = module_of_model(given)
    assert "relu" not in mod.script()
    check(machine(mod), given, [floats(3, 8)])


def recurrent() -> Any:
    """Return a model whose steps cannot be written out for any length."""
    weights = {"w": floats(1, 6, 8), "r": floats(1, 6, 6)}
    nodes = [node("RNN", "x w r", "h last", hidden_size=6), node("Squeeze", "h at1", "y")]
    return model(nodes, {"x": ("seq", "batch", 8)}, {**weights, "at1": np.array([1])}, rank=3)


def test_a_model_that_is_read_for_some_sizes_alone_is_read_for_these(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    given = recurrent()
    onnx.save(given, path)
    with pytest.raises(ModelError) as refusal:
        read_model(path)
    assert refusal.value.hint.endswith("or give every dynamic dimension sizes, as in --dim seq=8 --dim batch=8")
    mod = read_sized(path, {"seq": [2, 3], "batch": [1]})
    assert only_sizes(mod) == refusal.value.sentence
    main = machine(mod)
    for seq in (2, 3):
        check(main, given, [floats(seq, 1, 8)])
    with pytest.raises(RuntimeError):
        main(tvm.runtime.tensor(floats(4, 1, 8)))
    found = extract(str(tmp_path), str(path), sizes={"seq": [2], "batch": [1]})
    assert found["left_out"][0]["name"] == "other sizes"
    assert found["functions"]


SCORES = [  # attention of one head
    node("MatMul", "x wq", "q"),
    node("MatMul", "x wk", "k"),
    node("Transpose", "k", "kt", perm=[0, 2, 1]),
    node("MatMul", "q kt", "scores"),
    node("Softmax", "scores", "shares", axis=-1),
    node("MatMul", "shares x", "y"),
]


@pytest.mark.parametrize(
    ("sizes", "rows", "attentions"), [({"batch": [2], "seq": [4]}, "", 0), ({"batch": [2]}, "seq", 0), ({"batch": [2]}, "", 1)]
)
def test_one_line_says_what_the_copy_for_other_sizes_computes(
    tmp_path: Path, sizes: dict[str, list[int]], rows: str, attentions: int
) -> None:
    """Its attention has no size to declare; that of a copy for some sizes of which another is known at run time only has one."""
    path = tmp_path / "net.onnx"
    onnx.save(model(SCORES, {"x": ("batch", "seq", 64)}, {"wq": floats(64, 64), "wk": floats(64, 64)}, rank=3), path)
    found = extract(str(tmp_path), str(path), sizes=sizes, rows=rows)
    others = [each["reason"] for each in found["left_out"] if each["name"] == "other sizes"]
    assert others == ["5 functions compute sizes that are not declared, by TVM's default schedule"]
    assert not any("not declared" in each["reason"] for each in found["left_out"] if each["name"] != "other sizes")
    assert [len([each for each in form["what"] if "known at run time only" in each]) for form in found["in_parts"]] == [attentions]


def test_other_sizes_than_those_that_a_model_is_read_for_are_computed_as_well(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    given = model(HEADS, {"x": ("batch", "seq", 8)}, NUMBERS)
    onnx.save(given, path)
    mod = read_sized(path, {"batch": [1, 2], "seq": [4]})
    assert only_sizes(mod) == ""
    main = machine(mod)
    for batch, seq in ((1, 4), (2, 4), (2, 5)):
        check(main, given, [floats(batch, seq, 8)])


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"rows": [1]}, "the model has no dynamic dimension rows; its dynamic dimensions are batch, seq"),
        ({"seq": [0]}, "the sizes of seq are 0; expected different integers above 0"),
    ],
)
def test_sizes_that_a_model_cannot_have_are_a_sentence(tmp_path: Path, sizes: Mapping[str, Sequence[int]], sentence: str) -> None:
    onnx.save(model(HEADS, {"x": ("batch", "seq", 8)}, NUMBERS), tmp_path / "net.onnx")
    with pytest.raises(ModelError) as refusal:
        read_sized(tmp_path / "net.onnx", sizes)
    assert refusal.value.sentence == sentence


def test_sizes_that_do_not_fit_one_another_are_a_sentence(tmp_path: Path) -> None:
    onnx.save(model([node("Add", "x z", "y")], {"x": ("n", 4), "z": ("m", 4)}, {}, rank=2), tmp_path / "net.onnx")
    with pytest.raises(ModelError) as refusal:
        read_sized(tmp_path / "net.onnx", {"n": [2], "m": [3]})
    assert refusal.value.sentence == (
        "TVM's importer does not take ONNX's operator Add (node that gives y): In relax.add, the first input shape at dim 0 is 2 and the "
        "second input shape at dim 0 is 3, which are not broadcastable."
    )
    assert refusal.value.hint.endswith("; or choose sizes that fit one another")
    with pytest.raises(ModelError, match="the model has no dynamic dimension m; its dynamic dimensions are n"):
        read_sized(tmp_path / "net.onnx", {"m": [2]})


def test_norms_that_onnxruntime_fuses(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install -e '.[models]'")
    theirs = {"epsilon": 1e-3, "domain": "com.microsoft"}
    nodes = [
        node("SimplifiedLayerNormalization", "x scale", "a", epsilon=1e-4),
        helper.make_node("SkipSimplifiedLayerNormalization", ["a", "x", "other"], ["b", "", "", "sum"], **theirs),
        helper.make_node("SkipLayerNormalization", ["b", "sum", "scale", "", "other"], ["c"], **theirs),
        helper.make_node("SkipLayerNormalization", ["c", "x", "scale", "other"], ["d", "", "", "all"], **theirs),
        node("Add", "d all", "y"),
    ]
    given = model(nodes, {"x": ("n", "m", 8)}, {"scale": floats(8), "other": floats(8)}, rank=3)
    given.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.save(given, tmp_path / "net.onnx")
    x = floats(2, 3, 8)
    (wanted,) = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})
    for mod in (read_model(tmp_path / "net.onnx"), read_sized(tmp_path / "net.onnx", {"n": [2], "m": [3]})):
        np.testing.assert_allclose(machine(mod)(tvm.runtime.tensor(x)).numpy(), wanted, rtol=1e-5, atol=1e-5)
