"""Models become entries that are proven to compute what the model calls; what is no model ends with a sentence."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from support.in_this_process import InThisProcess
from support.spaces import REPOSITORY, Space
from tvm import relax

from kerneldecl.compiler import actions, canonical
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.compiler.graph.pipeline import GRAPH_PASSES
from kerneldecl.compiler.model_import import read_model
from kerneldecl.compiler.model_import.rule_candidates import BINARY, UNARY
from kerneldecl.errors import DeclarationError
from kerneldecl.extract.extract import extract_model
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_rule
from kerneldecl.signature import Signature

RELAX = """\
from tvm import relax
from tvm.relax.frontend import nn


class Mlp(nn.Module):
    def __init__(self):
        self.layers = nn.ModuleList([nn.Linear(48, 128), nn.Linear(128, 64), nn.Linear(64, 10)])

    def forward(self, x):
        first, second, last = self.layers
        x = nn.op.reshape(x, (4, 48))
        return nn.op.softmax(last(nn.op.relu(second(nn.op.relu(first(x))))))


class Swiglu(nn.Module):
    def __init__(self):
        self.norm = nn.RMSNorm(64, axes=-1, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((64, 128), (64, 128), (128, 64)))

    def forward(self, x):
        h = self.norm(x)
        return self.down(nn.op.silu(self.gate(h)) * self.up(h)) + x


def mlp():
    return Mlp().export_tvm({"forward": {"x": nn.spec.Tensor((4, 6, 8), "float32")}})[0]


def swiglu(rows=8):
    model = Swiglu()
    model.to("float16")
    return model.export_tvm({"forward": {"x": nn.spec.Tensor((rows, 64), "float16")}})[0]


def swiglu_of_any_length():
    return swiglu("n")


def block():
    "Two convolutions of NHWC images with folded batch norms, and the block's input added to the second."
    given = {"x": (1, 14, 14, 16), "w1": (3, 3, 16, 16), "b1": (16,), "w2": (3, 3, 16, 16), "b2": (16,)}
    x, w1, b1, w2, b2 = args = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in given.items()]

    def conv2d(x, w, b):
        return relax.op.add(relax.op.nn.conv2d(x, w, padding=1, data_layout="NHWC", kernel_layout="HWIO"), b)

    builder = relax.BlockBuilder()
    with builder.function("main", args):
        with builder.dataflow():
            hidden = builder.emit(relax.op.nn.relu(conv2d(x, w1, b1)))
            y = builder.emit_output(relax.op.nn.relu(relax.op.add(conv2d(hidden, w2, b2), x)))
        builder.emit_func_output(y)
    return builder.get()


number = 7
"""
MLP = [
    {"rule": "matmul", "m": 4, "n": 128, "k": 48, "layout": "nt", "epilogue": ["bias", "relu"]},
    {"rule": "matmul", "m": 4, "n": 64, "k": 128, "layout": "nt", "epilogue": ["bias", "relu"]},
    {"rule": "matmul", "m": 4, "n": 10, "k": 64, "layout": "nt", "epilogue": ["bias"]},
    {"rule": "softmax", "shape": [4, 10]},
]


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(tmp_path).write({"nets.py": RELAX})


Extract = Callable[[str], dict[str, Any]]


@pytest.fixture
def extract(space: Space, monkeypatch: pytest.MonkeyPatch) -> Extract:
    """Return a function that does what `kerneldecl extract --json` does, and returns what that prints."""
    monkeypatch.chdir(space.root)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it is told stale by a clock of whole seconds
    monkeypatch.setattr("kerneldecl.extract.extract.Worker", InThisProcess)
    return lambda model: json.loads(json.dumps(extract_model(model, space.root)))


def declared(space: Space) -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = tomllib.loads((space.root / "workloads.toml").read_text())["workload"]
    return tables


def attributes(tables: Sequence[dict[str, Any]], *rules: str) -> list[dict[str, Any]]:
    """Return the entries of some rules without what every entry has."""
    return [{key: value for key, value in table.items() if key not in {"name", "tags"}} for table in tables if table["rule"] in rules]


def computations(space: Space) -> set[str]:
    """Return the digests of what the declared entries compute."""
    tables = attributes(declared(space), *{table["rule"] for table in declared(space)})
    return {actions.lower(str(space.root), table.pop("rule"), table)["computation"] for table in tables}


def computations_of(mod: tvm.IRModule) -> set[str]:
    """Return the digests of what a model calls."""
    return {canonical.module_digest(canonical.canonical_module(func)) for _, func, _ in read_model.called(read_model.fused(mod))}


def signature(space: Space, entry: dict[str, Any]) -> Signature:
    attrs = {key: value for key, value in entry.items() if key != "rule"}
    return load_rule(STANDARD, entry["rule"]).of(space.root, attrs).signature()


def nets(space: Space) -> Any:
    found: dict[str, Any] = {}
    exec(compile((space.root / "nets.py").read_text(), "nets", "exec"), found)  # a module would stay imported from one test to the next
    return found


@pytest.mark.parametrize("model", ["mlp", "block", "swiglu"])
def test_entries_compute_exactly_what_a_relax_model_calls(space: Space, extract: Extract, model: str) -> None:
    extract(f"nets:{model}")
    assert computations(space) == computations_of(nets(space)[model]())
    space.run_here("check")


@pytest.mark.parametrize("target", [{"kind": "llvm"}, {"kind": "cuda", "arch": "sm_90"}], ids=lambda target: target["kind"])
@pytest.mark.parametrize("model", ["mlp", "block", "swiglu"])
def test_a_deployment_calls_what_is_extracted(space: Space, model: str, target: dict[str, str]) -> None:
    mod, here = nets(space)[model](), tvm.target.Target(target)
    legalize = relax.pipeline.legalize_passes(here)
    fused = 1 + [each.info.name for each in legalize].index("FuseTIR")
    with here:
        deployed = tvm.transform.Sequential([*GRAPH_PASSES, *relax.pipeline.library_dispatch_passes(here), *legalize[:fused]])(mod)
    functions = [func for func in deployed.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
    functions = [func for func in functions if not relax.analysis.has_reshape_pattern(func)]  # a view
    assert {match_digest(func) for func in functions} == {match_digest(func) for _, func, _ in read_model.called(read_model.fused(mod))}


def test_an_mlp_consists_of_standard_rules(space: Space, extract: Extract) -> None:
    found = extract("nets:mlp")
    assert len(found["new"]) == len(declared(space))
    assert attributes(declared(space), "matmul", "softmax") == MLP
    assert not attributes(declared(space), "transpose"), "weights are operands in the layout that they have"


def test_a_residual_block_is_two_convolutions_with_their_epilogues(space: Space, extract: Extract) -> None:
    extract("nets:block")
    sizes = {"rule": "conv2d", "n": 1, "h": 14, "w": 14, "c": 16, "f": 16, "kh": 3, "kw": 3, "padding": 1}
    epilogues = [["bias", "relu"], ["bias", "add", "relu"]]
    assert attributes(declared(space), *{table["rule"] for table in declared(space)}) == [
        sizes | {"epilogue": steps} for steps in epilogues
    ]


def test_float16_is_accumulated_in_float32(space: Space, extract: Extract) -> None:
    extract("nets:swiglu")
    tables = {table["name"]: table for table in declared(space)}
    assert attributes(declared(space), "rms_norm") == [{"rule": "rms_norm", "shape": [8, 64], "eps": 1e-5, "dtype": "float16"}]
    down = [entry for entry in attributes(declared(space), "matmul") if entry["n"] == 64]
    gemm = {"rule": "matmul", "m": 8, "n": 64, "k": 128, "layout": "nt", "dtype": "float16", "epilogue": ["add"]}
    assert down == [gemm]
    assert "transpose" not in tables


def test_git_ignores_what_builds_of_a_new_workspace_write(space: Space, extract: Extract) -> None:
    extract("nets:mlp")
    ignored = (space.root / ".gitignore").read_text()
    assert {"/dist/", "/cache/*"} <= set(ignored.splitlines())
    (space.root / ".gitignore").unlink()
    extract("nets:swiglu")
    assert not (space.root / ".gitignore").exists(), "the workspace is not new any more: its owner removed it"


def test_saved_ir_and_its_module_are_one_model(space: Space, extract: Extract) -> None:
    (space.root / "mlp.json").write_text(tvm.ir.save_json(nets(space)["mlp"]()))
    extract("nets:mlp")
    before = (space.root / "workloads.toml").read_text()
    found = extract("mlp.json")
    assert found["new"] == found["changed"] == found["gone"] == []
    assert (space.root / "workloads.toml").read_text() == before


def test_hand_edits_survive_and_unused_entries_are_marked(space: Space, extract: Extract) -> None:
    extract("nets:mlp")
    file = space.root / "workloads.toml"
    edited = file.read_text().replace('name = "softmax"', 'name = "probabilities"  # of ten classes\ntop_k = 3\ntolerance = 1e-3')
    file.write_text(edited)
    space.write({"nets.py": RELAX.replace("nn.Linear(64, 10)", "nn.Linear(64, 10, bias=False)")})
    found = extract("nets:mlp")
    assert (found["new"], found["gone"]) == (["matmul_3_2"], ["matmul_3"])
    assert "probabilities" in found["known"]
    text = file.read_text()
    assert '# Unused: no longer called by mlp.\n[[workload]]\nname = "matmul_3"' in text
    assert text.replace("# Unused: no longer called by mlp.\n", "").startswith(edited)


def test_an_extracted_model_builds(space: Space) -> None:
    space.run_here("extract", "nets:mlp")
    file = space.root / "workloads.toml"
    file.write_text(file.read_text().replace("[[workload]]", "[defaults]\ntop_k = 1\n\n[[workload]]", 1))
    space.run_here("build", "--jobs", "1", "tag:mlp")
    entries = json.loads((space.artifact() / "manifest.json").read_text())["entries"]
    assert {entry["name"] for entry in entries} == {entry["name"] for entry in declared(space)}
    assert all("mlp.calls-1" in entry["tags"] for entry in entries)


def saved_onnx(
    path: Path, nodes: Sequence[Any], weights: dict[str, tuple[int, ...]], x: Sequence[int | str], y: Sequence[int | str]
) -> None:
    rng = np.random.default_rng(0)
    given = [numpy_helper.from_array(rng.standard_normal(shape).astype("float32"), name) for name, shape in weights.items()]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)] for name, shape in (("x", x), ("y", y))]
    model = helper.make_model(helper.make_graph(nodes, path.stem, *ends, given), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)


def mlp_nodes() -> list[Any]:
    steps = [("Flatten", "x", "f"), ("Gemm", "f w1 b1", "d1"), ("Relu", "d1", "r1"), ("Gemm", "r1 w2 b2", "d2"), ("Relu", "d2", "r2")]
    steps += [("Gemm", "r2 w3 b3", "d3"), ("Softmax", "d3", "y")]
    return [helper.make_node(op, given.split(), [out], **({"transB": 1} if op == "Gemm" else {})) for op, given, out in steps]


MLP_WEIGHTS = {"w1": (128, 48), "b1": (128,), "w2": (64, 128), "b2": (64,), "w3": (10, 64), "b3": (10,)}


def test_onnx_weights_are_folded_and_the_rest_is_the_same_mlp(space: Space, extract: Extract) -> None:
    saved_onnx(space.root / "mlp.onnx", mlp_nodes(), MLP_WEIGHTS, [4, 6, 8], [4, 10])
    extract("mlp.onnx")
    transposed = [{name: value for name, value in entry.items() if name != "layout"} for entry in MLP]
    assert attributes(declared(space), "matmul", "softmax") == transposed, "transposed once, when the model was read"
    assert computations(space) == computations_of(read_model.read_model(str(space.root / "mlp.onnx")))


def test_a_function_of_no_standard_rule_is_saved_with_its_entry(space: Space, extract: Extract) -> None:
    nodes = [helper.make_node("Elu", ["x"], ["e"]), helper.make_node("Mul", ["e", "w"], ["y"])]
    saved_onnx(space.root / "elu.onnx", nodes, {"w": (8, 1, 1)}, [1, 8, 6, 6], [1, 8, 6, 6])
    extract("elu.onnx")
    (entry,) = attributes(declared(space), "tensor_ir")
    (computation,) = computations(space)
    assert entry["file"] == f"functions/{computation[:20]}.json"
    assert {computation} == computations_of(read_model.read_model(str(space.root / "elu.onnx")))
    assert [arg.shape for arg in signature(space, entry).args] == [(1, 8, 6, 6), (8, 1, 1), (1, 8, 6, 6)]


def test_onnx_convolutions_of_channels_first_are_those_of_rule_conv2d(space: Space, extract: Extract) -> None:
    ends = (("x", "h"), ("r", "c"))
    first, second = (helper.make_node("Conv", [image, "w", "b"], [out], pads=[1, 1, 1, 1]) for image, out in ends)
    relu, *rest = helper.make_node("Relu", ["h"], ["r"]), helper.make_node("Add", ["c", "x"], ["s"]), helper.make_node("Relu", ["s"], ["y"])
    saved_onnx(space.root / "block.onnx", [first, relu, second, *rest], {"w": (8, 8, 3, 3), "b": (8,)}, [1, 8, 6, 6], [1, 8, 6, 6])
    extract("block.onnx")
    entry = {"rule": "conv2d", "n": 1, "h": 6, "w": 6, "c": 8, "f": 8, "kh": 3, "kw": 3, "padding": 1}
    epilogues = (["bias", "relu"], ["bias", "add", "relu"])
    assert attributes(declared(space), "conv2d", "tensor_ir") == [{**entry, "epilogue": steps} for steps in epilogues]


@pytest.mark.filterwarnings("ignore")  # torch's own, of its exporter
def test_a_program_of_torch_is_a_model(space: Space, extract: Extract) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    nn = torch.nn
    layers = [nn.Flatten(), nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10), nn.Softmax(-1)]
    torch.export.save(torch.export.export(nn.Sequential(*layers).eval(), (torch.zeros(4, 6, 8),)), space.root / "mlp.pt2")
    found = extract("mlp.pt2")
    assert (len(found["new"]), found["left_out"]) == (4, [])  # what flattens is a view
    assert attributes(declared(space), "softmax") == MLP[-1:]
    gemms = [[list(arg.shape) for arg in signature(space, entry).args] for entry in attributes(declared(space), "matmul", "tensor_ir")]
    assert [[4, 64], [64, 10], [10], [4, 10]] in gemms
    space.write({"words.pt2": "words"})
    with pytest.raises(DeclarationError, match=r"words.pt2: not a zip archive, or not a whole one"):
        extract("words.pt2")


def test_a_program_of_torch_needs_torch(space: Space) -> None:
    space.write({"words.pt2": "words", "hidden/torch.py": 'raise ModuleNotFoundError("hidden", name="torch")'})
    told = space.run("extract", "words.pt2", code=2, PYTHONPATH=f"{space.root / 'hidden'}{os.pathsep}{REPOSITORY}").stderr
    assert "words.pt2: the package torch is not installed; pip install torch" in told


def test_gathers_are_entries_and_scatters_are_left_out(space: Space, extract: Extract) -> None:
    saved_onnx(
        space.root / "rows.onnx",
        [
            helper.make_node("Relu", ["x"], ["r"]),
            helper.make_node("Gather", ["w", "i"], ["g"]),
            helper.make_node("Add", ["r", "g"], ["s"]),
            helper.make_node("Unsqueeze", ["i", "one"], ["j"]),
            helper.make_node("Expand", ["j", "shape"], ["k"]),
            helper.make_node("ScatterElements", ["w", "k", "s"], ["t"]),
            helper.make_node("Gather", ["t", "i"], ["y"]),
        ],
        {"w": (9, 8)},
        [4, 8],
        [4, 8],
    )
    model = onnx.load(space.root / "rows.onnx")
    model.graph.input.append(helper.make_tensor_value_info("i", TensorProto.INT64, [4]))
    model.graph.initializer.extend(
        [numpy_helper.from_array(np.array([1]), "one"), numpy_helper.from_array(np.array([4, 8]), "shape")],
    )
    onnx.save(model, space.root / "rows.onnx")
    found = extract("rows.onnx")
    (left_out,) = found["left_out"]
    assert any("take" in name for name in found["new"])
    assert left_out["name"].startswith("scatter_elements")
    assert "its inputs say where it writes" in left_out["reason"]


def test_operators_that_tvm_does_not_lower_are_named(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_model, "fused", lambda mod: mod)  # TVM 0.27 lowers what its frontends emit
    (space.root / "mlp.json").write_text(tvm.ir.save_json(nets(space)["mlp"]()))
    found = actions.extract(str(space.root), str(space.root / "mlp.json"))
    assert {"relax.matmul", "relax.nn.softmax"} <= {each["name"] for each in found["left_out"]}
    assert {each["reason"] for each in found["left_out"]} == {"TVM lowers this operator to no TensorIR"}


def test_dynamic_functions_are_named_and_left_out(space: Space, extract: Extract) -> None:
    found = extract("nets:swiglu_of_any_length")
    assert {entry["rule"] for entry in declared(space)} == {"transpose"}
    reasons = {each["name"]: each["reason"] for each in found["left_out"]}
    assert set(reasons) >= {"rms_norm", "matmul"}
    assert reasons["rms_norm"] == "parameter x has a dynamic extent: [n, 64]; --dim n=1,16 has entries for these sizes"


WRONG = {
    "absent.json": "absent.json: no such file",
    "words.json": "words.json: not JSON",
    "other.json": "other.json: not IR that TVM",
    "function.json": "function.json: the file is a PrimFunc, not a Relax module",
    "words.onnx": "words.onnx: not ONNX",
    "determinant.onnx": "no converter for ONNX's operator Det (node that gives y); write it with other operators",
    "dynamic.onnx": "none of its functions can be an entry; all have a dynamic extent; declare the sizes that matter, as in --dim n=1,16",
    "nets": "nets: not a model by its name; expected saved Relax IR (.json), ONNX (.onnx)",
    "nowhere:net": "No module named 'nowhere'",
    "nets:nothing": "module nets has no attribute nothing",
    "tensorir.json": "the file has no Relax function; a module of TensorIR alone is declared with rule tensor_ir",
    "broken:net": "broken:net: reading and lowering it failed: broken.py:1: ZeroDivisionError: division by zero",
    "nets:number": "number is a int, not a Relax module; expected a tvm.IRModule",
}


@pytest.fixture
def wrong(space: Space) -> Space:
    """Return a folder of things that are no model."""
    space.write({"words.json": "words", "words.onnx": "words", "other.json": '{"a": 1}', "broken.py": "net = 1 / 0"})
    function = next(func for _, func, _ in read_model.called(read_model.fused(nets(space)["mlp"]())))
    (space.root / "function.json").write_text(tvm.ir.save_json(function))
    (space.root / "tensorir.json").write_text(tvm.ir.save_json(tvm.IRModule({"main": function})))
    saved_onnx(space.root / "determinant.onnx", [helper.make_node("Det", ["x"], ["y"])], {}, [4, 4], [])
    gemm = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["y"])]
    saved_onnx(space.root / "dynamic.onnx", gemm, {"w": (8, 4)}, ["n", 8], ["n", 4])
    return space


@pytest.mark.parametrize("model", WRONG)
def test_what_is_no_model_has_a_sentence_and_nothing_is_written(wrong: Space, extract: Extract, model: str) -> None:
    before = sorted(wrong.root.iterdir())
    with pytest.raises(DeclarationError) as found:
        extract(model)
    assert WRONG[model] in str(found.value)
    assert len(found.value.problems) == 1
    assert sorted(wrong.root.iterdir()) == before


def test_a_wrong_model_ends_the_command_with_a_sentence(wrong: Space) -> None:
    said = wrong.run_here("extract", "words.json", code=2).stderr
    assert said.startswith("error: words.json: not JSON")
    assert len(said.splitlines()) == 1


def test_a_file_with_mistakes_is_left_as_it_is(space: Space, extract: Extract) -> None:
    extract("nets:mlp")
    file = space.root / "workloads.toml"
    file.write_text(file.read_text().replace("m = 4", "m = 0"))
    before = file.read_text()
    with pytest.raises(DeclarationError, match="m is 0"):
        extract("nets:block")
    assert file.read_text() == before


def test_entries_that_are_no_tables_are_left_as_they_are(space: Space, extract: Extract) -> None:
    extract("nets:mlp")
    head, *_ = (space.root / "workloads.toml").read_text().partition("\n[artifact]")
    entry = '\nworkload = [{ name = "rows", rule = "softmax", shape = [4, 4] }]\n\n[artifact]\nname = "x"\nversion = "1"\n'
    space.write({"workloads.toml": head + entry + '\n[target.host]\narch = "host"\n'})
    with pytest.raises(DeclarationError, match=r"workloads.toml:4: the entries are in an inline array"):
        extract("nets:mlp")


def test_every_operation_of_the_elementwise_rule_is_proposed() -> None:
    (operations,) = [get_args(hint) for name, hint in get_type_hints(load_rule(STANDARD, "elementwise")).items() if name == "op"]
    assert sorted((*UNARY, *BINARY)) == sorted(operations)


def test_a_workspace_begins_with_the_sizes_of_a_dynamic_model(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(space.root)
    space.command("init", "--from", "nets:swiglu_of_any_length", "--dim", "n=4")
    assert {entry["m"] for entry in declared(space) if entry["rule"] == "matmul"} == {4}
    assert "name one by --from" in space.command("-C", "other", "init", "--dim", "n=4").err
