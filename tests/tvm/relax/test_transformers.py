"""Transformers as people export them: what becomes a standard rule, what entries are called, and the same results as torch's."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.thinned import at
from support.vision_models import torchvision_models
from tvm import relax

from kerneldecl.compiler.actions import extract
from kerneldecl.compiler.graph.pipeline import GRAPH_PASSES
from kerneldecl.compiler.graph.places import LONGEST, joined, place_of_weight, shortened
from kerneldecl.compiler.model_import import read_model
from kerneldecl.declare.toml_keys import is_name

torch = pytest.importorskip("torch", reason="the models are torch's")
torchvision_models()  # transformers imports torchvision
transformers = pytest.importorskip("transformers", reason="the models are its classes")


def bert() -> tuple[Any, tuple[Any, ...]]:
    sizes = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = transformers.BertConfig(**sizes, max_position_embeddings=64, attn_implementation="eager", return_dict=False)
    return transformers.BertModel(config, add_pooling_layer=False), (torch.randint(0, 100, (2, 16)),)


def llama() -> tuple[Any, tuple[Any, ...]]:
    sizes = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=128, attn_implementation="eager", use_cache=False, return_dict=False)
    return transformers.LlamaModel(config), (torch.randint(0, 100, (1, 16)),)


class _VitBlock(torch.nn.Module):  # type: ignore[misc]
    """The encoder block of torchvision's ViT, whose attention is torch's module with sequence-first inside."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(64, eps=1e-6), torch.nn.LayerNorm(64, eps=1e-6)
        self.self_attention = torch.nn.MultiheadAttention(64, 2, batch_first=True)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))

    def forward(self, x: Any) -> Any:
        y = self.ln_1(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


def vit() -> tuple[Any, tuple[Any, ...]]:
    return _VitBlock(), (torch.randn(2, 17, 64),)


MODELS = {"bert": bert, "llama": llama, "vit": vit}


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the models with random weights: biases of 0 and scales of 1, as they are initialised, would prove nothing."""
    torch.manual_seed(0)
    found = {name: make() for name, make in MODELS.items()}
    with torch.no_grad():
        for model, _ in found.values():
            model.eval()
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return found


@pytest.fixture(scope="module")
def saved(made: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the models' files: each as a program of torch.export, and what torch can as ONNX."""
    folder = tmp_path_factory.mktemp("models")
    paths = {}
    for name, (model, inputs) in made.items():
        paths[f"{name}.pt2"] = folder / f"{name}.pt2"
        torch.export.save(torch.export.export(model, inputs), paths[f"{name}.pt2"])
    pytest.importorskip("onnx", reason="half of the models are ONNX files")
    for name in ("bert", "vit"):  # torch's exporter has no aten::diff, which Llama's mask calls
        paths[f"{name}.onnx"] = folder / f"{name}.onnx"
        _save_onnx(*made[name], paths[f"{name}.onnx"])
    return paths


Functions = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def functions_of(saved: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Functions:
    """Return a function that gives the functions of a model by its file, which is read and lowered once for all tests."""
    folder = tmp_path_factory.mktemp("extracted")
    return functools.cache(lambda file: extract(str(folder), str(saved[file]))["functions"])


class _FirstOutput(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Any:
        result = self.model(x)
        return result[0] if isinstance(result, tuple) else result


def _save_onnx(model: Any, inputs: tuple[Any, ...], path: Path) -> None:
    torch.onnx.export(_FirstOutput(model).eval(), inputs, path, dynamo=False, opset_version=17)


FILES = ("bert.pt2", "llama.pt2", "vit.pt2", "bert.onnx", "vit.onnx")


def expected_of(made: dict[str, Any], file: str) -> Any:
    model, inputs = made[file.partition(".")[0]]
    with torch.no_grad():
        result = model(*inputs)
    return (result[0] if isinstance(result, tuple) else result).float().numpy()


def run(mod: tvm.IRModule, inputs: tuple[Any, ...]) -> Any:
    target = tvm.target.Target({"kind": "llvm", "opt-level": 0})
    with target:
        machine = relax.VirtualMachine(relax.build(mod, target), tvm.cpu())
    result = machine["main"](*(tvm.runtime.tensor(each.numpy()) for each in inputs))
    return (result if hasattr(result, "numpy") else result[0]).numpy().astype("float32")


@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
@pytest.mark.parametrize("file", at({4}, FILES))
def test_a_model_computes_what_torch_does(made: dict[str, Any], saved: dict[str, Path], file: str) -> None:
    found = run(read_model.fused(read_model.read_model(str(saved[file]))), made[file.partition(".")[0]][1])
    np.testing.assert_allclose(found, expected_of(made, file), atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("at", range(1, len(GRAPH_PASSES)), ids=lambda at: GRAPH_PASSES[at].info.name)
def test_every_prefix_of_the_passes_computes_the_same(made: dict[str, Any], saved: dict[str, Path], at: int) -> None:
    mod = read_model.read_model(str(saved["vit.pt2"]))
    found = run(tvm.transform.Sequential(list(GRAPH_PASSES[:at]))(mod), made["vit"][1])
    np.testing.assert_allclose(found, expected_of(made, "vit"), atol=2e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", at({0, 1, 4}, FILES))
def test_work_is_done_by_standard_rules(functions_of: Functions, file: str) -> None:
    functions = functions_of(file)
    work = {each["name"]: each["work"]["flops"] * each["calls"] for each in functions}
    standard = sum(work[each["name"]] for each in functions if each["rule"] != "tensor_ir")
    assert standard >= 0.95 * sum(work.values())
    rules = {each["rule"] for each in functions}
    assert {"matmul", "softmax", "rms_norm" if "llama" in file else "layer_norm"} <= rules


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", at({len(FILES) - 1}, FILES))
def test_names_are_short_places_in_the_model(functions_of: Functions, saved: dict[str, Path], tmp_path: Path, file: str) -> None:
    found, again = functions_of(file), extract(str(tmp_path), str(saved[file]))["functions"]
    names = [each["name"] for each in found]
    assert names == [each["name"] for each in again]
    assert len(set(names)) == len(names)
    assert all(is_name(name) and len(name) <= LONGEST and not name.startswith("fused") for name in names)
    wanted = {
        "bert": {"encoder.layer.0.attention.self.query", "encoder.layer.0.intermediate.dense", "embeddings.LayerNorm"},
        "llama": {"layers.0.self_attn.q_proj", "layers.0.mlp.gate_proj", "layers.0.mlp.down_proj", "layers.0.self_attn.rotary"},
        "vit": {"self_attention.out_proj", "ln_1", "mlp.0", "mlp.2"},
    }[file.partition(".")[0]]
    assert wanted <= {re.sub(r"^model\.", "", name) for name in names}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("file", "transposes"), at({0, 3, 4}, [("bert.pt2", 0), ("bert.onnx", 0), ("vit.pt2", 0), ("vit.onnx", 0), ("llama.pt2", 1)])
)
def test_attention_needs_no_transposes(functions_of: Functions, file: str, transposes: int) -> None:
    functions = functions_of(file)
    moves = [each for each in functions if each["rule"] == "transpose" or "transpose" in each["name"]]
    assert len(moves) == transposes, "Llama has one behind attention, whose heads share keys"
    (context,) = (each["attrs"] for each in functions if each["name"].endswith("context"))
    assert context["heads"] == 2
    assert context["interleaved"] == ("b" if transposes else "bc")


@pytest.mark.filterwarnings("ignore")
def test_gates_and_rotary_embeddings_are_standard_rules(functions_of: Functions) -> None:
    functions = {each["name"]: each for each in functions_of("llama.pt2")}
    gate, up = (functions[f"layers.0.mlp.{name}_proj"]["attrs"].get("epilogue", ()) for name in ("gate", "up"))
    assert sorted([*gate, *up]) == ["mul", "silu"]
    queries, keys = (each["attrs"] for each in functions.values() if each["rule"] == "rotary")
    assert (queries["heads"], keys["heads"]) == (4, 2)
    assert queries["interleaved"] == keys["interleaved"] == "x"


@pytest.mark.filterwarnings("ignore")
def test_an_encoder_layer_is_eight_standard_functions(functions_of: Functions) -> None:
    functions = {each["name"]: each for each in functions_of("bert.pt2")}
    epilogues = {name: each["attrs"].get("epilogue") for name, each in functions.items() if each["rule"] == "matmul"}
    assert {name.removeprefix("encoder.layer.0."): steps for name, steps in epilogues.items()} == {
        "attention.self.query": ("bias",),
        "attention.self.scores": ("scale",),
        "attention.self.context": None,
        "attention.output.dense": ("bias", "add"),
        "intermediate.dense": ("bias", "gelu"),
        "output.dense": ("bias", "add"),
    }
    norm = functions["embeddings.LayerNorm"]
    assert norm["calls"] == 5
    assert norm["places"][:1] == ["encoder.layer.0.attention.output.LayerNorm"]


@pytest.mark.filterwarnings("ignore")
def test_keys_of_grouped_queries_are_not_repeated(functions_of: Functions) -> None:
    functions = {each["name"]: each for each in functions_of("llama.pt2")}
    scores = functions["layers.0.self_attn.scores"]["attrs"]
    assert (scores["batch"], scores["m"], scores["n"], scores["k"]) == (2, 32, 16, 16), "two heads of keys, each for two of queries"
    assert scores["epilogue"] == ("scale", "add"), "the causal mask is added in the same kernel"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_half_precision_computes_in_float32_inside_of_rules(tmp_path: Path) -> None:
    model, inputs = vit()
    model = model.half().eval()
    inputs = tuple(each.half() for each in inputs)
    torch.export.save(torch.export.export(model, inputs), tmp_path / "half.pt2")
    with torch.no_grad():
        exact = model.float()(*(each.float() for each in inputs)).numpy()
        eager = model.half()(*inputs).float().numpy()
    found = run(read_model.fused(read_model.read_model(str(tmp_path / "half.pt2"))), inputs)
    assert np.abs(found - exact).max() <= 2 * np.abs(eager - exact).max()
    functions = extract(str(tmp_path), str(tmp_path / "half.pt2"))["functions"]
    assert {"matmul", "softmax", "layer_norm"} <= {each["rule"] for each in functions}
    assert {each["attrs"]["dtype"] for each in functions if each["rule"] == "matmul"} == {"float16"}


@pytest.mark.parametrize(
    ("places", "name"),
    [
        (["a.self.query", "a.self.key", "a.self.value"], "a.self.qkv"),
        (["m.q_proj", "m.k_proj", "m.v_proj"], "m.qkv_proj"),
        (["mlp.gate_proj", "mlp.up_proj"], "mlp.gate_up_proj"),
        (["q", "k", "v"], "qkv"),
        (["block.attn.q", "block.cross.k"], "block.attn_q_cross_k"),
    ],
)
def test_joined_linears_are_named_together(places: list[str], name: str) -> None:
    assert joined(places) == name


def test_names_are_shortened_from_the_outside() -> None:
    inner = "attention.self.query"
    name = shortened(".".join(["outer_module_of_some_length"] * 3 + [inner]))
    assert len(name) <= LONGEST
    assert name.endswith(inner)
    assert len(shortened("x" * 100)) <= LONGEST
    assert place_of_weight(["onnx::MatMul_12", "encoder.dense.weight"]) == "encoder.dense"


def test_masks_of_an_input_are_made_once() -> None:
    from tvm.script import ir as I  # noqa: N812
    from tvm.script import relax as R  # noqa: N812

    @I.ir_module
    class Masked:
        @R.function
        def main(
            q: R.Tensor((2, 3, 8, 4), "float32"),  # noqa: N805
            k: R.Tensor((2, 3, 8, 4), "float32"),
            mask: R.Tensor((2, 1, 1, 8), "float32"),
        ) -> R.Tensor((2, 3, 8, 8), "float32"):
            with R.dataflow():
                t = R.permute_dims(k, axes=[0, 1, 3, 2])
                s = R.matmul(q, t)
                d = R.divide(s, R.const(2.0, "float32"))
                a = R.add(d, mask)
                y = R.nn.softmax(a, axis=-1)
                R.output(y)
            return y

    fused = read_model.fused(Masked)
    names = {
        name: json.loads(str(func.attrs["kerneldecl.rule"]))
        for name, func, _ in read_model.called(fused)
        if "kerneldecl.rule" in func.attrs
    }
    assert [(rule["rule"], rule["attrs"].get("epilogue")) for rule in names.values()] == [("matmul", ["scale", "add"]), ("softmax", None)]
    rng = np.random.default_rng(0)
    q, k, mask = (rng.standard_normal(shape).astype("float32") for shape in ((2, 3, 8, 4), (2, 3, 8, 4), (2, 1, 1, 8)))
    scores = q @ k.swapaxes(-1, -2) / 2 + mask
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    found = run(fused, tuple(map(torch.from_numpy, (q, k, mask))))
    np.testing.assert_allclose(found, powers / powers.sum(-1, keepdims=True), atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("file", ["bert.pt2", "llama.pt2"])
def test_a_model_deployed_with_schedules_computes_what_torch_does(
    made: dict[str, Any], saved: dict[str, Path], tmp_path: Path, file: str
) -> None:
    from kerneldecl.api import build
    from kerneldecl.extract.extract import extract_model
    from kerneldecl.relax import TIR_PIPELINE, export_model, load_model, pipeline, target_of

    extract_model(str(saved[file]), tmp_path)
    declared = tmp_path / "workloads.toml"
    declared.write_text(declared.read_text().replace("\ntags = ", "\ntop_k = 1\ntags = "))
    build(tmp_path, jobs=1)
    (artifact,) = tmp_path.glob("dist/*/host")
    target = target_of(artifact)
    passes = pipeline(artifact, target, "schedule")
    executable = relax.build(read_model.read_model(str(saved[file])), target, relax_pipeline=passes, tir_pipeline=TIR_PIPELINE)
    export_model(executable, tmp_path / "model.so")
    (given,) = made[file.partition(".")[0]][1]
    result = load_model(tmp_path / "model.so")["main"](tvm.runtime.tensor(given.numpy()))
    np.testing.assert_allclose((result if hasattr(result, "numpy") else result[0]).numpy(), expected_of(made, file), atol=2e-5, rtol=1e-4)
