"""Owns the networks' operations in Relax, and the networks as Relax modules.

Knows nothing of schedules. Accumulators are float32, as torch's are; the rest is in the network's dtype.
"""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.relax import op

from support.networks.definitions import Network, Shape


def module_of(network: Network) -> Any:
    """Return a Relax module whose `main` takes the inputs, then the weights in order of their first use."""
    builder = relax.BlockBuilder()
    given = {name: _var(name, shape, network.dtype) for name, shape in network.shapes.items()}
    weights: dict[str, Any] = {}

    def weight(name: str, shape: Shape) -> Any:
        return weights.setdefault(name, _var(name.replace(".", "_"), shape, network.dtype))

    with builder.function("main"):
        with builder.dataflow():
            output = builder.emit_output(network.build(RelaxOps(builder, network.dtype), given, weight))
        builder.emit_func_output(output, [*given.values(), *weights.values()])
    return relax.transform.FuseTransposeMatmul()(builder.get())


def _var(name: str, shape: Shape, dtype: str) -> Any:
    return relax.Var(name, relax.TensorType(shape, dtype))


class RelaxOps:
    """The operations as a frontend emits them."""

    def __init__(self, builder: Any, dtype: str) -> None:
        self._emit, self._dtype = builder.emit, dtype
        self._accum_dtype = "float32"

    def flatten(self, x: Any) -> Any:
        return self._emit(op.reshape(x, (_extent(x, 0), -1)))

    def linear(self, x: Any, w: Any, b: Any = None) -> Any:
        result = self._matmul(x, self._emit(op.permute_dims(w)))
        return result if b is None else self._emit(op.add(result, b))

    def _matmul(self, x: Any, y: Any) -> Any:
        return self._narrow(self._emit(op.matmul(x, y, out_dtype=self._accum_dtype)))

    def _narrow(self, x: Any) -> Any:
        return x if self._dtype == self._accum_dtype else self._emit(op.astype(x, self._dtype))

    def relu(self, x: Any) -> Any:
        return self._emit(op.nn.relu(x))

    def silu(self, x: Any) -> Any:
        return self._emit(op.nn.silu(x))

    def add(self, x: Any, y: Any) -> Any:
        return self._emit(op.add(x, y))

    def multiply(self, x: Any, y: Any) -> Any:
        return self._emit(op.multiply(x, y))

    def softmax(self, x: Any) -> Any:
        return self._emit(op.nn.softmax(x))

    def conv2d(self, x: Any, w: Any, b: Any, stride: int, padding: int) -> Any:
        layouts = {"data_layout": "NHWC", "kernel_layout": "HWIO", "out_dtype": self._accum_dtype}
        result = self._narrow(self._emit(op.nn.conv2d(x, w, strides=stride, padding=padding, **layouts)))
        return self._emit(op.add(result, b))

    def max_pool(self, x: Any) -> Any:
        return self._emit(op.nn.max_pool2d(x, (3, 3), strides=2, padding=1, layout="NHWC"))

    def mean_of_image(self, x: Any) -> Any:
        return self._emit(op.mean(x, [1, 2]))

    def rms_norm(self, x: Any, w: Any) -> Any:
        return self._emit(op.nn.rms_norm(x, w, axes=[-1], epsilon=1e-5))

    def heads(self, x: Any, count: int) -> Any:
        rows, features = (_extent(x, axis) for axis in (0, 1))
        return self._emit(op.permute_dims(self._emit(op.reshape(x, (rows, count, features // count))), [1, 0, 2]))

    def rows(self, x: Any) -> Any:
        count, rows, size = (_extent(x, axis) for axis in range(3))
        return self._emit(op.reshape(self._emit(op.permute_dims(x, [1, 0, 2])), (rows, count * size)))

    def rope(self, x: Any, cos: Any, sin: Any) -> Any:
        half = _extent(x, 2) // 2
        first, second = (self._emit(op.strided_slice(x, [2], [start], [start + half])) for start in (0, half))
        rotated = (
            op.subtract(op.multiply(first, cos), op.multiply(second, sin)),
            op.add(op.multiply(second, cos), op.multiply(first, sin)),
        )
        return self._emit(op.concat([self._emit(each) for each in rotated], axis=2))

    def attention(self, q: Any, k: Any, v: Any, scale: float, past: Any) -> Any:
        scores = self._scores(q, k, scale)
        rows = _extent(q, 1)
        if rows > 1:
            scores = self._emit(op.add(scores, relax.const(_mask(rows))))
        if past is None:
            return self._matmul(self._probabilities(scores), v)
        # Cached keys are not copied together with the new ones.
        length = _extent(past[0], 1)
        powers = self._probabilities(self._emit(op.concat([self._scores(q, past[0], scale), scores], axis=2)))
        before, now = (self._emit(op.strided_slice(powers, [2], [a], [b])) for a, b in ((0, length), (length, length + rows)))
        return self._emit(op.add(self._matmul(before, past[1]), self._matmul(now, v)))

    def _scores(self, q: Any, k: Any, scale: float) -> Any:
        transposed = self._emit(op.permute_dims(k, [0, 2, 1]))
        return self._emit(op.multiply(self._emit(op.matmul(q, transposed, out_dtype="float32")), relax.const(scale, "float32")))

    def _probabilities(self, scores: Any) -> Any:
        return self._narrow(self._emit(op.nn.softmax(scores)))


def _mask(rows: int) -> Any:
    import numpy as np

    return np.triu(np.full((1, rows, rows), -1e30, np.float32), 1)


def _extent(x: Any, axis: int) -> int:
    return int(x.ty.shape[axis])
