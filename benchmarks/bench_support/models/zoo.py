"""Owns the models that the benchmark compares: torchvision's and transformers' own classes with random weights, and their inputs.

Knows nothing of how they are tuned or timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bench_support.models.torchvision_here import torchvision_models

Made = tuple[Any, tuple[Any, ...]]
"""A module in evaluation mode, float32, and inputs for it."""
LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 1024,  # the block is compared, not the embedding
}
LLAMA_2_7B = LLAMA_3_8B | {"intermediate_size": 11008, "num_key_value_heads": 32}


@dataclass(frozen=True)
class Example:
    """A model with inputs of one shape."""

    name: str
    make: Callable[[], Made]


class First(torch.nn.Module):
    """Gives the first output of a module whose outputs are a dataclass."""

    def __init__(self, module: Any, argument: str) -> None:
        super().__init__()
        self.module, self.argument = module, argument

    def forward(self, x: Any) -> Any:
        return self.module(**{self.argument: x}, return_dict=False)[0]


class UNetBlock(torch.nn.Module):
    """Two residual blocks of a diffusion U-Net: group norm, SiLU, 3x3 convolution, twice, and the shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(*(part for _ in range(2) for part in self._parts(channels))) for _ in range(2)
        )

    @staticmethod
    def _parts(channels: int) -> tuple[Any, ...]:
        return torch.nn.GroupNorm(32, channels), torch.nn.SiLU(), torch.nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x


class Decoding(torch.nn.Module):
    """A decoder layer of Llama for one more token: its input, rotary embedding and KV cache give its output and new keys and values.

    `keys` and `values` are (1, heads, past, head size), in the layout of transformers' caches; a program appends what is given back.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any, cos: Any, sin: Any, keys: Any, values: Any) -> Any:
        cache = Appending(keys, values)
        # Older releases of transformers give a layer's output with its attention weights.
        out = self.layer(x, position_embeddings=(cos, sin), past_key_values=cache)
        return out[0] if isinstance(out, tuple) else out, *cache.new


class Appending:
    """A KV cache of one layer, as transformers' attention calls it."""

    def __init__(self, keys: Any, values: Any) -> None:
        self.past, self.new = (keys, values), (keys, values)

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> Any:
        """Return the keys and values that attention reads: those of before and the new ones."""
        self.new = (keys, values)
        return tuple(torch.cat(pair, dim=-2) for pair in zip(self.past, self.new, strict=True))


class Stepping(torch.nn.Module):
    """A decoder layer of Llama for one more token against a KV cache of fixed size: gives its output, and the cache with the token's row.

    `position` holds the token's place in the cache; it sees the rows up to there.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any, cos: Any, sin: Any, position: Any, keys: Any, values: Any) -> Any:
        cache = Written(keys, values, position)
        mask = (torch.arange(keys.shape[-2], device=position.device) <= position[:, None])[None, None]
        out = self.layer(x, attention_mask=mask, position_embeddings=(cos, sin), past_key_values=cache)
        return out[0] if isinstance(out, tuple) else out, *cache.rows


class Written:
    """A KV cache of one layer and of fixed size, as transformers' attention calls it."""

    def __init__(self, keys: Any, values: Any, position: Any) -> None:
        self.rows, self.position = (keys, values), position

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> Any:
        """Return the keys and values that attention reads: the cache with the new rows in their place."""
        self.rows = tuple(old.index_copy(-2, self.position, new) for old, new in zip(self.rows, (keys, values), strict=True))
        return self.rows


def _vision(name: str, batch: int) -> Made:
    torch.manual_seed(0)
    module = getattr(torchvision_models(), name)(weights=None)
    _set_batch_norms(module, torch.randn(16, 3, 224, 224))
    for linear in (each for each in module.modules() if isinstance(each, torch.nn.Linear) and not each.weight.any()):
        torch.nn.init.normal_(linear.weight, std=0.02)  # a new ViT's head is zero, and so would its result be
    return module.eval(), (torch.randn(batch, 3, 224, 224),)


def _set_batch_norms(module: Any, sample: Any) -> None:
    """Give batch norms the statistics of a sample: with those of a new module, values vanish below what float16 holds."""
    norms = [each for each in module.modules() if isinstance(each, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        with torch.no_grad():
            module.train()(sample)


def _bert(batch: int, tokens: int, **sizes: int) -> Made:
    torchvision_models()
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertEncoder

    torch.manual_seed(0)
    encoder = BertEncoder(BertConfig(**sizes, attn_implementation="sdpa")).eval()
    return First(encoder, "hidden_states"), (torch.randn(batch, tokens, sizes["hidden_size"]),)


def _llama(tokens: int, **sizes: int) -> Made:
    torchvision_models()
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(**sizes, use_cache=False, attn_implementation="sdpa")).eval()
    return First(model, "inputs_embeds"), (torch.randn(1, tokens, sizes["hidden_size"]),)


def llama_decoding(past: int, **sizes: int) -> Made:
    """Return a decoder layer of Llama for the token after `past` ones, whose cache grows."""
    layer, x, embedding, cache = _llama_layer(past, past, **sizes)
    return Decoding(layer).eval(), (x, *embedding, torch.randn(cache), torch.randn(cache))


def llama_step(past: int, **sizes: int) -> Made:
    """Return a decoder layer of Llama for the token after `past` ones, which fills up a cache of fixed size."""
    layer, x, embedding, cache = _llama_layer(past, past + 1, **sizes)
    return Stepping(layer).eval(), (x, *embedding, torch.tensor([past]), torch.randn(cache), torch.randn(cache))


def _llama_layer(position: int, rows: int, **sizes: int) -> tuple[Any, Any, tuple[Any, Any], tuple[int, ...]]:
    """Return a decoder layer of Llama, a token for it, the rotary embedding of its position, and the shape of a cache of so many rows."""
    torchvision_models()
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    torch.manual_seed(0)
    config = LlamaConfig(**sizes, attn_implementation="sdpa")
    x = torch.randn(1, 1, config.hidden_size)
    embedding = LlamaRotaryEmbedding(config)(x, torch.tensor([[position]]))
    cache = (1, config.num_key_value_heads, rows, config.hidden_size // config.num_attention_heads)
    return LlamaDecoderLayer(config, 0), x, embedding, cache


def _unet_block() -> Made:
    torch.manual_seed(0)
    return UNetBlock(320).eval(), (torch.randn(2, 320, 64, 64),)


BERT_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "num_hidden_layers": 12}
BERT_LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 6}
EXAMPLES: tuple[Example, ...] = (
    Example("resnet18.b1", lambda: _vision("resnet18", 1)),
    Example("resnet50.b1", lambda: _vision("resnet50", 1)),
    Example("resnet50.b32", lambda: _vision("resnet50", 32)),
    Example("mobilenet_v2.b32", lambda: _vision("mobilenet_v2", 32)),
    Example("mobilenet_v3_small.b1", lambda: _vision("mobilenet_v3_small", 1)),
    Example("efficientnet_b0.b32", lambda: _vision("efficientnet_b0", 32)),
    Example("vit_b_16.b32", lambda: _vision("vit_b_16", 32)),
    Example("unet_block.b2", _unet_block),
    Example("bert_base.b1.s128", lambda: _bert(1, 128, **BERT_BASE)),
    Example("bert_base.b16.s128", lambda: _bert(16, 128, **BERT_BASE)),
    Example("bert_large.b8.s384", lambda: _bert(8, 384, **BERT_LARGE)),
    Example("llama3_8b.block.decode2047", lambda: llama_decoding(2047, **LLAMA_3_8B)),
    Example("llama3_8b.block.step2047", lambda: llama_step(2047, **LLAMA_3_8B)),
    Example("llama3_8b.block.s512", lambda: _llama(512, **LLAMA_3_8B)),
    Example("llama3_8b.block.s2048", lambda: _llama(2048, **LLAMA_3_8B)),
    Example("llama2_7b.block.s512", lambda: _llama(512, **LLAMA_2_7B)),
)


def example(name: str) -> Example:
    """Return the example of a name; raise KeyError where there is none."""
    return {each.name: each for each in EXAMPLES}[name]
