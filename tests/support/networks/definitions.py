"""Owns networks written by hand in the kernels' own layouts: each one's function, of few operations, its inputs and weights.

Knows nothing of compilers. A network is a function of `ops`, an object with the operations (those in NumPy are here), of
its inputs by name, and of `weight`, which returns the weight of a name and a shape as the operations' type of tensor.
Images are NHWC, weights of convolutions HWIO, weights of linear layers [outputs, inputs]; batch norms are folded into biases.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Shape = tuple[int, ...]
Weight = Callable[[str, Shape], Any]
LAYERS = ((64, 1), (128, 2), (256, 2), (512, 2))
"""Channels and first stride of ResNet-18's stages, of two blocks each."""


@dataclass(frozen=True)
class Network:
    """A network with its sizes."""

    name: str
    dtype: str
    inputs: Mapping[str, Shape]
    """Shapes of the activations; other inputs, such as tables of angles, are `fixed`."""
    build: Callable[..., Any]
    """(ops, inputs, weight) -> output"""
    fixed: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each input."""
        return {**self.inputs, **{name: make().shape for name, make in self.fixed.items()}}

    def arrays(self) -> dict[str, Any]:
        """Return random inputs, the same in every call."""
        rng = np.random.default_rng(7)
        random = {name: rng.standard_normal(shape, np.float32).astype(self.dtype) for name, shape in self.inputs.items()}
        return random | {name: make().astype(self.dtype) for name, make in self.fixed.items()}

    def reference(self) -> Any:
        """Return the network's output, computed in NumPy and float32."""
        weights = Weights(self.dtype)
        given = {name: array.astype(np.float32) for name, array in self.arrays().items()}
        return self.build(NumpyOps(), given, lambda name, shape: weights(name, shape).astype(np.float32))


class Weights:
    """Random weights, which depend on name and shape alone; kept in the order of their first use."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.arrays: dict[str, Any] = {}

    def __call__(self, name: str, shape: Shape) -> Any:
        if name not in self.arrays:
            rng = np.random.default_rng(list(name.encode()))
            values = rng.standard_normal(shape, np.float32)
            self.arrays[name] = (values * _scale(shape) + (len(shape) == 1)).astype(self.dtype)
        return self.arrays[name]


def _scale(shape: Shape) -> float:
    """Return a standard deviation that preserves that of the activations; relu halves their second moment."""
    if len(shape) == 1:
        return 0.1
    terms = math.prod(shape[:3]) if len(shape) == 4 else shape[1]
    return math.sqrt((2 if len(shape) == 4 else 1) / terms)


def mlp(ops: Any, inputs: Mapping[str, Any], weight: Weight, *, features: int = 224 * 224 * 3, classes: int = 10) -> Any:
    """Flatten, 128, relu, 64, relu, 10, softmax."""
    sizes = (features, 128, 64, classes)
    x = ops.flatten(inputs["x"])
    for at in range(1, 4):
        x = ops.linear(x, weight(f"w{at}", (sizes[at], sizes[at - 1])), weight(f"b{at}", (sizes[at],)))
        x = ops.relu(x) if at < 3 else ops.softmax(x)
    return x


def resnet18(ops: Any, inputs: Mapping[str, Any], weight: Weight, *, width: int = 64, classes: int = 1000) -> Any:
    """ResNet-18 (He et al., 2016) with a width of 64; stages of other widths keep their proportions."""

    def conv2d(x: Any, name: str, sizes: tuple[int, int, int], stride: int, padding: int) -> Any:
        side, c, f = sizes
        return ops.conv2d(x, weight(f"{name}.w", (side, side, c, f)), weight(f"{name}.b", (f,)), stride, padding)

    x = ops.relu(conv2d(inputs["x"], "stem", (7, 3, width), 2, 3))
    x = ops.max_pool(x)
    channels = width
    for stage, (wide, first_stride) in enumerate(LAYERS):
        outputs = wide * width // 64
        for block in range(2):
            name, stride = f"layer{stage}.{block}", first_stride if block == 0 else 1
            hidden = ops.relu(conv2d(x, f"{name}.conv1", (3, channels, outputs), stride, 1))
            kept = conv2d(x, f"{name}.down", (1, channels, outputs), stride, 0) if channels != outputs else x
            x = ops.relu(ops.add(conv2d(hidden, f"{name}.conv2", (3, outputs, outputs), 1, 1), kept))
            channels = outputs
    return ops.linear(ops.mean_of_image(x), weight("head.w", (classes, channels)), weight("head.b", (classes,)))


def llama_block(ops: Any, inputs: Mapping[str, Any], weight: Weight, *, hidden: int, heads: int, ffn: int) -> Any:
    """One decoder block as Llama has it, causal; with inputs `keys` and `values` of [heads, past, size] these come before."""
    size = hidden // heads
    x, past = inputs["x"], (inputs["keys"], inputs["values"]) if "keys" in inputs else None
    h = ops.rms_norm(x, weight("attention.norm", (hidden,)))
    q, k, v = (ops.heads(ops.linear(h, weight(name, (hidden, hidden))), heads) for name in ("wq", "wk", "wv"))
    q, k = (ops.rope(each, inputs["cos"], inputs["sin"]) for each in (q, k))
    attended = ops.linear(ops.rows(ops.attention(q, k, v, 1 / math.sqrt(size), past)), weight("wo", (hidden, hidden)))
    x = ops.add(attended, x)
    h = ops.rms_norm(x, weight("ffn.norm", (hidden,)))
    gate, up = ops.linear(h, weight("gate", (ffn, hidden))), ops.linear(h, weight("up", (ffn, hidden)))
    return ops.add(ops.linear(ops.multiply(ops.silu(gate), up), weight("down", (hidden, ffn))), x)


def _angles(function: Callable[[Any], Any], rows: int, size: int, first: int = 0) -> Any:
    """Return cosines or sines for each position and each pair of features (Su et al., RoFormer, 2021)."""
    return function(np.outer(np.arange(first, first + rows), 10000.0 ** (-np.arange(0, size, 2) / size)))


def mlp_network(dtype: str, batch: int = 128, side: int = 224) -> Network:
    return Network("mlp", dtype, {"x": (batch, side, side, 3)}, functools.partial(mlp, features=side * side * 3))


def resnet18_network(dtype: str, batch: int = 128, side: int = 224, width: int = 64, classes: int = 1000) -> Network:
    return Network("resnet18", dtype, {"x": (batch, side, side, 3)}, functools.partial(resnet18, width=width, classes=classes))


def llama_network(dtype: str, rows: int, past: int = 0, *, hidden: int = 4096, heads: int = 32, ffn: int = 11008) -> Network:
    """Return a decoder block with the sizes of Llama 2 7B unless others are given: `rows` tokens after `past` ones."""
    size = hidden // heads
    inputs = {"x": (rows, hidden)} | ({"keys": (heads, past, size), "values": (heads, past, size)} if past else {})
    fixed = {name: functools.partial(_angles, function, rows, size, past) for name, function in (("cos", np.cos), ("sin", np.sin))}
    build = functools.partial(llama_block, hidden=hidden, heads=heads, ffn=ffn)
    return Network("llama_decode" if past else "llama_prefill", dtype, inputs, build, fixed=fixed)


def networks() -> list[Network]:
    """Return the networks to measure."""
    images = [make(dtype) for make in (mlp_network, resnet18_network) for dtype in ("float16", "float32")]
    return [*images, llama_network("float16", 1, 2048), llama_network("float16", 512)]


def small_networks() -> list[Network]:
    """Return the same networks with sizes that a CPU computes quickly, some of them odd."""
    images = [make for dtype in ("float16", "float32") for make in (mlp_network(dtype, 4, 8), resnet18_network(dtype, 2, 32, 16, 10))]
    sizes = {"hidden": 64, "heads": 4, "ffn": 96}
    return [*images, llama_network("float16", 1, 7, **sizes), llama_network("float32", 8, **sizes)]


class NumpyOps:
    """The operations in NumPy: the reference."""

    def flatten(self, x: Any) -> Any:
        return x.reshape(len(x), -1)

    def linear(self, x: Any, w: Any, b: Any = 0.0) -> Any:
        return x @ w.T + b

    def relu(self, x: Any) -> Any:
        return np.maximum(x, 0)

    def silu(self, x: Any) -> Any:
        return x / (1 + np.exp(-x))

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def multiply(self, x: Any, y: Any) -> Any:
        return x * y

    def softmax(self, x: Any) -> Any:
        powers = np.exp(x - x.max(axis=-1, keepdims=True))
        return powers / powers.sum(axis=-1, keepdims=True)

    def conv2d(self, x: Any, w: Any, b: Any, stride: int, padding: int) -> Any:
        return np.einsum("nhwcrs,rscf->nhwf", _sliding_windows(x, w.shape[0], stride, padding, 0.0), w, optimize=True) + b

    def max_pool(self, x: Any) -> Any:
        return _sliding_windows(x, 3, 2, 1, -np.inf).max(axis=(4, 5))

    def mean_of_image(self, x: Any) -> Any:
        return x.mean(axis=(1, 2))

    def rms_norm(self, x: Any, w: Any) -> Any:
        return x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + 1e-5) * w

    def heads(self, x: Any, count: int) -> Any:
        """Return [heads, rows, size] of [rows, heads x size]."""
        return x.reshape(len(x), count, -1).swapaxes(0, 1)

    def rows(self, x: Any) -> Any:
        return x.swapaxes(0, 1).reshape(x.shape[1], -1)

    def rope(self, x: Any, cos: Any, sin: Any) -> Any:
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def attention(self, q: Any, k: Any, v: Any, scale: float, past: tuple[Any, Any] | None) -> Any:
        keys, values = (k, v) if past is None else (np.concatenate(pair, axis=1) for pair in zip(past, (k, v), strict=True))
        scores = q @ keys.swapaxes(1, 2) * scale
        later = np.triu(np.ones(scores.shape[1:], bool), 1 + scores.shape[2] - scores.shape[1])
        return self.softmax(np.where(later, -np.inf, scores)) @ values


def _sliding_windows(x: Any, side: int, stride: int, padding: int, around: float) -> Any:
    """Return the sliding windows as [n, rows, columns, channels, side, side]."""
    padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)), constant_values=around)
    return np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(1, 2))[:, ::stride, ::stride]
