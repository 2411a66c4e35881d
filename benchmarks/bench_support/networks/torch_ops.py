"""Owns the networks' operations in torch, as its users write them for speed.

Knows nothing of timing. Images are channels last, as cuDNN's convolutions on tensor cores need; TF32 is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own custom
from bench_support.networks.definitions import Network

Tensor = Any


def own_layout(weight: Tensor) -> Tensor:
    """Return a weight as torch's operations take it."""
    return weight.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last) if weight.dim() == 4 else weight


class TorchNetwork(torch.nn.Module):  # type: ignore[misc]  # torch is missing where types are checked
    """A network with its weights on the GPU; called with the activations in the order of the network's inputs."""

    def __init__(self, network: Network, weights: Mapping[str, Tensor], fixed: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._network, self._fixed = network, dict(fixed)
        self._weights = {name: own_layout(weight) for name, weight in weights.items()}

    def forward(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self._network.inputs, inputs, strict=True)) | self._fixed
        return self._network.build(TorchOps(), given, lambda name, _: self._weights[name])


class TorchOps:
    """The operations; images are kept as torch has them, [n, c, h, w] with channels last in memory."""

    def flatten(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def linear(self, x: Tensor, w: Tensor, b: Tensor = None) -> Tensor:
        return F.linear(x, w, b)

    def relu(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    def softmax(self, x: Tensor) -> Tensor:
        return F.softmax(x, -1)

    def conv2d(self, x: Tensor, w: Tensor, b: Tensor, stride: int, padding: int) -> Tensor:
        return F.conv2d(x if x.shape[1] == w.shape[1] else x.permute(0, 3, 1, 2), w, b, stride, padding)  # the first input is NHWC

    def max_pool(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2, 1)

    def mean_of_image(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))

    def rms_norm(self, x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, w.shape, w, 1e-5)

    def heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(x.shape[0], count, -1).transpose(0, 1)

    def rows(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).reshape(x.shape[1], -1)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float, past: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attend with torch's own fused kernel; cached keys and values are concatenated with the new ones, as a plain cache does."""
        if past is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(past, (k, v), strict=True))
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=past is None, scale=scale)[0]
