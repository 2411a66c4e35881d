"""Owns the test that models of torchvision and transformers, imported, compute what torch computes, in torch's dtypes.

Knows nothing of kernels: TVM alone compiles the models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tvm
from support.vision_models import torchvision_models
from tvm import relax

from kerneldecl.compiler.model_import.from_torch import from_torch, module_of_program, module_with_parameters
from kerneldecl.compiler.model_import.half_precision import half_precision
from kerneldecl.compiler.model_import.model_error import ModelError
from kerneldecl.compiler.model_import.read_model import fused

torch = pytest.importorskip("torch", reason="torch programs need torch")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of its own deprecated functions
MODELS = ("resnet18", "vit", "bert", "llama", "attention", "lstm")


def images(name: str) -> tuple[Any, tuple[Any, ...]]:
    models = torchvision_models()
    if name == "resnet18":
        return models.resnet18(num_classes=10), (torch.randn(1, 3, 64, 64),)
    model = models.VisionTransformer(image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10)
    torch.nn.init.normal_(model.heads.head.weight)
    return model, (torch.randn(1, 3, 32, 32),)


def words(name: str) -> tuple[Any, tuple[Any, ...]]:
    torchvision_models()  # transformers imports torchvision
    transformers = pytest.importorskip("transformers", reason="the model is transformers'")
    sizes = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    if name == "bert":
        model = transformers.BertModel(transformers.BertConfig(**sizes, max_position_embeddings=64))
    else:
        model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False))
    return Hidden(model), (torch.randint(0, 100, (2, 16)),)


class Hidden(torch.nn.Module):  # type: ignore[misc]  # torch may be missing
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return self.model(*args)[0]


class Masked(torch.nn.Module):  # type: ignore[misc]
    """Attention with a mask that is an input, one of whose rows sees nothing."""

    def forward(self, q: Any, mask: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)


class Grouped(torch.nn.Module):  # type: ignore[misc]
    """Attention of four heads of queries, two for each head of keys and values."""

    def forward(self, q: Any, k: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)


def model_of(name: str) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    if name == "attention":
        mask = torch.rand(2, 1, 6, 6) > 0.5
        mask[0, 0, 3] = False
        return Masked(), (torch.randn(2, 2, 6, 8), mask)
    if name == "lstm":
        return Hidden(torch.nn.LSTM(16, 32, 2, batch_first=True, bidirectional=True)), (torch.randn(2, 5, 16),)
    return (words if name in {"bert", "llama"} else images)(name)


def as_dtype(args: tuple[Any, ...], dtype: str) -> tuple[Any, ...]:
    return tuple(arg.to(getattr(torch, dtype)) if arg.is_floating_point() else arg for arg in args)


def computed(mod: tvm.IRModule, args: tuple[Any, ...]) -> Any:
    machine = relax.VirtualMachine(relax.build(fused(mod), "llvm"), tvm.cpu())
    return torch.from_dlpack(machine["main"](*map(tvm.runtime.from_dlpack, args))[0])


def error_of(found: Any, expected: Any) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_is_as_exact_as_torch(name: str, dtype: str) -> None:
    model, args = model_of(name)
    model = model.eval()
    with torch.no_grad():
        exact = model(*args)
        model, args = model.to(getattr(torch, dtype)), as_dtype(args, dtype)
        theirs = model(*args)
        program = torch.export.export(model, args)
    ours = computed(module_of_program(program), args)
    assert ours.dtype == theirs.dtype
    assert error_of(ours, exact) <= max(2 * error_of(theirs, exact), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("resnet18", "float16"), ("bert", "float16"), ("llama", "bfloat16")])
def test_a_model_made_half_precision_is_as_exact_as_torchs(name: str, dtype: str) -> None:
    model, args = model_of(name)
    model = model.eval()
    with torch.no_grad():
        exact = model(*args)
        mod = half_precision(module_of_program(torch.export.export(model, args)), dtype)
        args = as_dtype(args, dtype)
        theirs = model.to(getattr(torch, dtype))(*args)
    ours = computed(mod, args)
    assert ours.dtype == theirs.dtype
    assert error_of(ours, exact) <= 2 * error_of(theirs, exact)


def test_keys_of_grouped_queries_are_a_view() -> None:
    args = (torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8))
    mod = module_of_program(torch.export.export(Grouped(), args))
    assert "R.repeat" not in mod.script()
    assert error_of(computed(mod, args), Grouped()(*args)) <= 1e-6


def linear(dtype: str) -> Any:
    n = torch.export.Dim("n", min=2, max=64)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4)).to(getattr(torch, dtype))
    return torch.export.export(model, (torch.zeros(4, 8, dtype=getattr(torch, dtype)),), dynamic_shapes=({0: n},))


def test_half_precision_gemms_have_float32_accumulators_and_a_cast() -> None:
    text = module_of_program(linear("float16")).script()
    assert 'out_dtype="float32"' in text
    assert 'R.astype(lv1, dtype="float16")' in text


def test_dimensions_have_the_names_that_people_gave(tmp_path: Path) -> None:
    program = linear("float32")
    assert "(n, 8)" in module_of_program(program).script()
    torch.export.save(program, tmp_path / "model.pt2")  # which writes no names
    assert "(input_0, 8)" in from_torch(tmp_path / "model.pt2").script()
    assert "(rows, 8)" in from_torch(tmp_path / "model.pt2", ("rows",)).script()


def test_parameters_have_torchs_names() -> None:
    _, values, names = module_with_parameters(linear("float32"))
    assert set(values) == set(names)
    assert sorted(names.values()) == ["0.bias", "0.weight"]


def test_an_unknown_operator_is_named_with_its_node() -> None:
    class Eigenvalues(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return torch.linalg.eigvalsh(x)

    program = torch.export.export(Eigenvalues(), (torch.eye(3),))
    with pytest.raises(ModelError, match=r"no converter for torch's operator aten\._linalg_eigh\.default \(node .*\)"):
        module_of_program(program)
