"""Transformers that torch writes as ONNX with dynamic axes compute what onnxruntime does, at any sizes and at declared ones."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tvm
from support.unoptimised import unoptimised
from support.vision_models import torchvision_models
from tvm import relax

from kerneldecl.compiler.actions import extract
from kerneldecl.compiler.cpu import PIPELINE
from kerneldecl.compiler.model_import.read_model import fused, read_model
from kerneldecl.hardware import host

torch = pytest.importorskip("torch", reason="the models are torch's")
torchvision_models()  # transformers imports torchvision
transformers = pytest.importorskip("transformers", reason="the models are its classes")
onnx = pytest.importorskip("onnx", reason="pip install -e '.[models]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="pip install -e '.[models]'")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZES = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


class _Encoder(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True).to_tuple()[0]


class _Decoder(torch.nn.Module):  # type: ignore[misc]
    """A decoder with the inputs and outputs that optimum gives one: past_key_values in, present out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any) -> Any:
        cache = transformers.DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        found = self.model(**inputs, past_key_values=cache, use_cache=True, return_dict=True)
        return (found.logits, *(each for layer in found.past_key_values.layers for each in (layer.keys, layer.values)))


class Case(NamedTuple):
    module: Any
    args: tuple[Any, ...]
    axes: Mapping[str, Mapping[int, str]]
    """The names of each input's dynamic axes."""


def encoder(model: Any) -> Case:
    tokens = {0: "batch", 1: "seq"}
    args = (torch.randint(0, 100, (2, 16)), torch.ones(2, 16, dtype=torch.int64))
    return Case(_Encoder(model), args, {"input_ids": tokens, "attention_mask": tokens})


def bert() -> Case:
    return encoder(transformers.BertModel(transformers.BertConfig(**SIZES, max_position_embeddings=64), add_pooling_layer=False))


def t5() -> Case:
    config = transformers.T5Config(vocab_size=100, d_model=64, d_kv=16, num_layers=2, num_heads=4, d_ff=128)
    return encoder(transformers.T5EncoderModel(config))


def llama() -> Case:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
    batch, new, old = 2, 3, 5
    past = [torch.randn(batch, 2, old, 16) for _ in range(4)]
    places = torch.arange(old, old + new)[None].repeat(batch, 1)
    args = (torch.randint(0, 100, (batch, new)), torch.ones(batch, new + old, dtype=torch.int64), places, *past)
    names = [f"past_key_values.{layer}.{what}" for layer in range(2) for what in ("key", "value")]
    tokens = {0: "batch", 1: "seq"}
    axes = {"input_ids": tokens, "attention_mask": {0: "batch", 1: "past + seq"}, "position_ids": tokens}
    return Case(_Decoder(model), args, {**axes, **{name: {0: "batch", 2: "past"} for name in names}})


CASES: Mapping[str, Callable[[], Case]] = {"bert": bert, "t5": t5, "llama": llama}
FILES = ("bert.torchscript", "bert.dynamo", "t5.torchscript", "llama.torchscript", "llama.dynamo")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    @functools.cache
    def save(file: str) -> Path:
        name, _, exporter = file.partition(".")
        torch.manual_seed(0)
        case = CASES[name]()
        path = folder / f"{file}.onnx"
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for parameter in case.module.eval().parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)  # biases of 0 would prove nothing
            _export(case, path, exporter == "dynamo")
        return path

    return save


def _export(case: Case, path: Path, dynamo: bool) -> None:
    names = list(case.axes)
    if not dynamo:
        axes = {name: dict(each) for name, each in case.axes.items()}
        torch.onnx.export(case.module, case.args, path, dynamo=False, input_names=names, dynamic_axes=axes, opset_version=17)
        return
    each = [dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in case.axes.values()]
    shapes = (*each[:3], tuple(each[3:])) if len(each) > 3 else tuple(each)  # those of *past are one
    torch.onnx.export(
        case.module, case.args, path, dynamo=True, input_names=names, dynamic_shapes=shapes, external_data=False, verbose=False
    )


def inputs(path: Path, case: Mapping[str, Any], sizes: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return random inputs of a file, and the sizes of its own dimensions, which the exporter may have given other names."""
    rng = np.random.default_rng(3)
    arrays, own = {}, {}
    for info in onnx.load(path).graph.input:
        axes, dims = case[info.name], info.type.tensor_type.shape.dim
        shape = [eval(axes[axis], {}, dict(sizes)) if axis in axes else dim.dim_value for axis, dim in enumerate(dims)]
        own |= {dim.dim_param: extent for dim, extent in zip(dims, shape, strict=True) if dim.dim_param.isidentifier()}
        if info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            arrays[info.name] = rng.standard_normal(shape, dtype="float32")
        elif "mask" in info.name:
            arrays[info.name] = np.ones(shape, "int64")
            arrays[info.name][-1, :2] = 0
        else:
            arrays[info.name] = rng.integers(0, shape[1], shape)
    return arrays, own


def machine(mod: tvm.IRModule) -> Any:
    target = unoptimised(host.detect())
    return relax.VirtualMachine(relax.build(fused(mod, target), target, tir_pipeline=PIPELINE), tvm.cpu())["main"]


def flat(found: Any) -> Sequence[Any]:
    return [found.numpy()] if hasattr(found, "numpy") else [array for each in found for array in flat(each)]


def check(main: Any, path: Path, arrays: Mapping[str, Any]) -> None:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wanted = session.run(None, dict(arrays))
    found = flat(main(*map(tvm.runtime.tensor, arrays.values())))
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5, rtol=1e-4)


POOL = ({"batch": 2, "seq": 16, "past": 7}, {"batch": 1, "seq": 5, "past": 3}, {"batch": 3, "seq": 33, "past": 12})


@pytest.mark.parametrize("file", FILES)
def test_a_model_of_dynamic_axes_computes_what_onnxruntime_does(saved: Callable[[str], Path], file: str) -> None:
    path, axes = saved(file), CASES[file.partition(".")[0]]().axes
    main = machine(read_model(path))
    for sizes in POOL:
        check(main, path, inputs(path, axes, sizes)[0])


@pytest.mark.parametrize("file", FILES)
def test_a_model_that_is_read_for_sizes_has_static_functions_and_takes_others(
    saved: Callable[[str], Path], file: str, tmp_path: Path
) -> None:
    path, axes = saved(file), CASES[file.partition(".")[0]]().axes
    arrays, own = inputs(path, axes, POOL[0])
    declared = {dim: [size] for dim, size in own.items()}
    main = machine(read_model(path, sizes=declared))
    check(main, path, arrays)
    check(main, path, inputs(path, axes, POOL[1])[0])
    found = extract(str(tmp_path), str(path), sizes=declared)
    standard = sum(each["work"]["flops"] * each["calls"] for each in found["functions"] if each["rule"] != "tensor_ir")
    assert standard >= 0.95 * sum(each["work"]["flops"] * each["calls"] for each in found["functions"])
