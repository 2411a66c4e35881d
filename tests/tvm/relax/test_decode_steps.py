"""One step of decoding as people export it: its cache is written, its attention is of the rule that its targets have kernels for."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.thinned import at, only
from support.vision_models import torchvision_models
from tvm import relax

import kerneldecl
from kerneldecl.compiler.graph.places import noted_of, rule_of
from kerneldecl.compiler.model_import import fused_kernels, read_model
from kerneldecl.plugins.load import load_arch

torch = pytest.importorskip("torch", reason="the models are torch's")
torchvision_models()  # transformers imports torchvision
transformers = pytest.importorskip("transformers", reason="the models are its classes")

ROOT = Path(kerneldecl.__file__).parent.parent
KEYS, PAST, LAYERS = 24, 9, 2
SIZES = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


class _Caches:
    """KV caches of all layers, as transformers' attention calls them: one is written at positions, or grows where there are none."""

    def __init__(self, keys: Any, values: Any, positions: Any = None) -> None:
        self.keys, self.values, self.positions = list(keys), list(values), positions

    def update(self, keys: Any, values: Any, layer: int, *_: Any, **__: Any) -> Any:
        for cache, new in ((self.keys, keys), (self.values, values)):
            grown = torch.cat((cache[layer], new), -2) if self.positions is None else cache[layer].index_copy(2, self.positions, new)
            cache[layer] = grown
        return self.keys[layer], self.values[layer]


class _Step(torch.nn.Module):  # type: ignore[misc]
    """Llama's layers on the tokens at positions, with the mask that says which keys they see."""

    def __init__(self, writes: bool, follows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES, num_hidden_layers=LAYERS, attn_implementation="sdpa")
        self.model, self.writes, self.follows = transformers.LlamaModel(config).eval(), writes, follows

    def forward(self, x: Any, position: Any, keys: Any, values: Any) -> Any:
        positions = position + torch.arange(x.shape[1]) if self.follows else position
        caches = _Caches(keys, values, positions if self.writes else None)
        total = keys[0].shape[2] + (0 if self.writes else x.shape[1])
        mask = (torch.arange(total) <= positions[:, None])[None, None] if self.writes or x.shape[1] > 1 else None
        embeddings = self.model.rotary_emb(x, positions[None])
        for layer in self.model.layers:
            x = layer(x, attention_mask=mask, position_embeddings=embeddings, past_key_values=caches)
        return x, *caches.keys, *caches.values


class _Grown(_Step):
    """A cache that grows by a step whose positions are known when it is exported."""

    def forward(self, x: Any, keys: Any, values: Any) -> Any:  # type: ignore[override]
        return super().forward(x, torch.arange(PAST, PAST + x.shape[1]), keys, values)


def _caches(keys: int) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(1)
    return [torch.randn(1, 2, keys, 16) for _ in range(LAYERS)], [torch.randn(1, 2, keys, 16) for _ in range(LAYERS)]


def _grown(tokens: int) -> tuple[Any, tuple[Any, ...]]:
    return _Grown(writes=False), (torch.randn(1, tokens, 64), *_caches(PAST))


def _written(positions: list[int]) -> tuple[Any, tuple[Any, ...]]:
    return _Step(writes=True), (torch.randn(1, len(positions), 64), torch.tensor(positions), *_caches(KEYS))


def _following(tokens: int) -> tuple[Any, tuple[Any, ...]]:
    return _Step(writes=True, follows=True), (torch.randn(1, tokens, 64), torch.tensor([PAST]), *_caches(KEYS))


def _benchmarked() -> tuple[Any, tuple[Any, ...]]:
    from bench_support.models.zoo import llama_step

    return llama_step(KEYS - 1, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)


DECODE = {"batch": 1, "heads": 4, "kv_heads": 2, "keys": KEYS, "head_dim": 16}
PLAIN, MASKED = {"rule": "attention"}, {"rule": "attention", "mask": True}
STEPS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "grows": (lambda: _grown(1), PLAIN | {"queries": 1, "keys": PAST + 1}, PLAIN),
    "grows by four": (lambda: _grown(4), PLAIN | {"queries": 4, "causal": True}, PLAIN | {"causal": True}),
    "written": (lambda: _written([PAST]), DECODE | {"rule": "attention_decode", "queries": 1}, MASKED),
    "written by three that follow": (lambda: _following(3), DECODE | {"rule": "attention_decode", "queries": 3}, MASKED),
    "written, in the benchmark": (_benchmarked, DECODE | {"rule": "attention_decode", "queries": 1}, MASKED),
    "written by three": (lambda: _written([PAST, 2, 11]), MASKED | {"queries": 3}, MASKED),
}
"""A step, what its attention is where there are kernels for a cache, and where there are none."""


@pytest.fixture(scope="module", params=only(("written",), STEPS))
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return a step's name, and its file as torch.export writes it."""
    path = tmp_path_factory.mktemp("steps") / "step.pt2"
    with warnings.catch_warnings(action="ignore"):  # torch's own
        torch.export.save(torch.export.export(*STEPS[request.param][0](), strict=False), path)
    return request.param, path


def attentions(mod: tvm.IRModule) -> list[dict[str, Any]]:
    rules = (rule_of(func) for _, func, _ in read_model.called(mod))
    return [{"rule": found[0], **found[1]} for found in rules if found is not None and found[0].startswith("attention")]


@pytest.mark.slow
def test_a_step_computes_what_torch_does(step: tuple[str, Path]) -> None:
    name, path = step
    mod = read_model.fused(read_model.read_model(str(path)), fuses=lambda _: True)
    assert [each["rule"] for each in attentions(mod)] == [STEPS[name][1]["rule"]], "layers call one function"
    target = tvm.target.Target({"kind": "llvm", "opt-level": 0})
    machine = relax.VirtualMachine(relax.build(mod, target), tvm.cpu())
    model, inputs = STEPS[name][0]()
    with torch.no_grad():
        wanted = model(*inputs)
    flat = [each for given in inputs for each in (given if isinstance(given, list) else [given])]
    for got, want in zip(machine["main"](*(tvm.runtime.tensor(each.numpy()) for each in flat)), wanted, strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("arch", "policy"), at({0}, [("h200", "auto"), ("host", "auto"), ("host", "cpu_attention")]))
def test_a_step_has_the_attention_that_its_target_has_a_kernel_for(step: tuple[str, Path], arch: str, policy: str) -> None:
    name, path = step
    fuses = fused_kernels.by_policies(ROOT, load_arch(ROOT, arch), policy)
    mod = read_model.fused(read_model.read_model(str(path), dtype="float16"), fuses=fuses)
    wanted = STEPS[name][1 if policy == "auto" else 2]
    [found] = attentions(mod)
    assert {key: found.get(key) for key in wanted} == wanted
    assert "mask" in wanted or "mask" not in found
    noted = "the positions of its queries are not known to follow each other"
    assert [each.endswith(noted) for each in noted_of(mod)] == [True] * (LAYERS if (name, policy) == ("written by three", "auto") else 0)
    lengths = [each for each, _, calls in read_model.called(mod) if "clip" in each and calls == 1]
    assert len(lengths) == (wanted["rule"] == "attention_decode"), "all layers have the same lengths"
