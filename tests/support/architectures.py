"""Owns small versions of architectures that people deploy: torchvision's and transformers' own classes with few and narrow layers.

Knows nothing of importers or kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.vision_models import torchvision_models

Made = tuple[Any, tuple[Any, ...]]
"""A module in evaluation mode, float32, and inputs for it."""
PIXELS, CLASSES = 32, 10
WORDS = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 1}


def architecture(name: str) -> Made:
    """Return a small version of an architecture with random weights, biases, scales and statistics; skip where it is not installed."""
    import torch

    models = torchvision_models()  # transformers imports torchvision
    pytest.importorskip("transformers", reason="half of the models are its classes")
    torch.manual_seed(0)
    module, args = (VISION[name](models), (torch.randn(1, 3, PIXELS, PIXELS),)) if name in VISION else LANGUAGE[name]()
    for tensor in (*module.parameters(), *(each for key, each in module.named_buffers() if "running_" in key)):
        if tensor.dim() == 1:  # made 0 or 1
            tensor.data.mul_(1 + 0.2 * torch.rand_like(tensor)).add_(0.1 * torch.rand_like(tensor))
    return module.eval(), args


def _resnet(models: Any) -> Any:
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def _mobilenet_v3(models: Any) -> Any:
    from torchvision.models.mobilenetv3 import InvertedResidualConfig as Block

    blocks = [
        Block(16, 3, 16, 16, use_se=True, activation="RE", stride=2, dilation=1, width_mult=1.0),
        Block(16, 3, 40, 24, use_se=False, activation="RE", stride=2, dilation=1, width_mult=1.0),
        Block(24, 5, 64, 24, use_se=True, activation="HS", stride=1, dilation=1, width_mult=1.0),
    ]
    return models.MobileNetV3(blocks, last_channel=64, num_classes=CLASSES)


def _efficientnet(models: Any) -> Any:
    from torchvision.models.efficientnet import MBConvConfig as Block

    return models.EfficientNet([Block(1, 3, 1, 32, 16, 1), Block(6, 5, 2, 16, 24, 2)], dropout=0.2, num_classes=CLASSES, last_channel=64)


def _densenet(models: Any) -> Any:
    return models.DenseNet(growth_rate=8, block_config=(2, 2), num_init_features=16, bn_size=2, num_classes=CLASSES)


def _convnext(models: Any) -> Any:
    from torchvision.models.convnext import CNBlockConfig as Block

    return models.ConvNeXt([Block(16, 32, 1), Block(32, None, 1)], layer_scale=0.5, num_classes=CLASSES)


def _vit(models: Any) -> Any:
    import torch

    sizes = {"patch_size": 8, "num_layers": 1, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    model = models.VisionTransformer(image_size=PIXELS, num_classes=CLASSES, **sizes)
    torch.nn.init.normal_(model.heads.head.weight, std=0.1)  # which is made 0
    return model


def _swin(models: Any) -> Any:
    sizes = {"patch_size": [4, 4], "embed_dim": 32, "depths": [2, 1], "num_heads": [2, 4], "window_size": [4, 4]}
    return models.SwinTransformer(num_classes=CLASSES, **sizes)


VISION: dict[str, Callable[[Any], Any]] = {
    "resnet": _resnet,
    "mobilenet_v3": _mobilenet_v3,
    "efficientnet": _efficientnet,
    "densenet": _densenet,
    "convnext": _convnext,
    "vit": _vit,
    "swin": _swin,
}


def _first_of(model: Any, *args: str) -> Any:
    """Return a module that calls a model with arguments of these names and gives its first output."""
    import torch

    class First(torch.nn.Module):  # type: ignore[misc]  # torch may be missing
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: Any) -> Any:
            return self.model(**dict(zip(args, given, strict=True)), return_dict=False)[0]

    return First()


def _tokens(count: int = 16) -> Any:
    import torch

    return torch.randint(2, WORDS["vocab_size"], (1, count))


def _bert() -> Made:
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 32}
    return _first_of(transformers.BertModel(transformers.BertConfig(vocab_size=100, **sizes)), "input_ids"), (_tokens(),)


def _gpt2() -> Made:
    import transformers

    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, n_positions=32, use_cache=False, **WORDS)
    return _first_of(transformers.GPT2LMHeadModel(config), "input_ids"), (_tokens(),)


def _llama() -> Made:
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **WORDS, use_cache=False))
    return _first_of(model, "input_ids"), (_tokens(),)


def _llama_decoding() -> Made:
    from bench_support.models.zoo import llama_decoding

    return llama_decoding(31, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)


def _t5() -> Made:
    import transformers

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=100, **sizes, use_cache=False))
    return _first_of(model, "input_ids", "decoder_input_ids"), (_tokens(), _tokens(8))


LANGUAGE: dict[str, Callable[[], Made]] = {"bert": _bert, "gpt2": _gpt2, "llama": _llama, "llama_decoding": _llama_decoding, "t5": _t5}
