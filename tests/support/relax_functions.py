"""Owns Relax models of one operator each, with inputs and NumPy's results.

Knows nothing of how they are built or deployed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

Array = Any


@dataclass(frozen=True)
class Model:
    """One model: its module, the arrays that it is called with, the arrays that it returns."""

    name: str
    module: tvm.IRModule
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]


def model(name: str, build: Callable[..., Any], inputs: Sequence[Array], outputs: Array | Sequence[Array]) -> Model:
    """Return the model that applies `build` to variables of the inputs' shapes and dtypes."""
    args = [relax.Var(f"x{at}", relax.TensorType(array.shape, array.dtype.name)) for at, array in enumerate(inputs)]
    builder = relax.BlockBuilder()
    with builder.function("main", args):
        with builder.dataflow():
            result = builder.emit_output(builder.normalize(build(builder, *args)))
        builder.emit_func_output(result)
    several = (outputs,) if isinstance(outputs, np.ndarray) else tuple(outputs)
    return Model(name, builder.get(), tuple(inputs), several)


def _split(b: relax.BlockBuilder, x: Any) -> Any:
    halves = b.emit(op.split(op.nn.relu(x), 2, 1))
    return b.emit(op.matmul(halves[0], op.permute_dims(halves[1])))


def models() -> list[Model]:
    """Return the models; each has a function that only one of this repository's special cases gets right."""
    rng = np.random.default_rng(7)
    x, y = (rng.standard_normal((6, 8)).astype("float32") for _ in range(2))
    positive = np.maximum(x, 0)
    rows = np.array([3, 0, 5], "int64")
    columns = rng.integers(0, 8, (6, 3))
    ints = rng.integers(-128, 127, (40,), endpoint=True).astype("int8")
    divisors = np.where(np.arange(40) % 2, 7, -5).astype("int8")
    a, b = x > 0, y > 0
    return [
        model("split", _split, [x], positive[:, :4] @ positive[:, 4:].T),
        model("halves", lambda _, x: op.split(op.nn.relu(x), 2, 1), [x], [positive[:, :4], positive[:, 4:]]),
        model("rows", lambda _, x, i: op.take(x, i, axis=0), [x, rows], x[rows]),
        model("elements", lambda _, x, i: op.gather_elements(x, i, axis=1), [x, columns], np.take_along_axis(x, columns, 1)),
        model("points", lambda _, x, i: op.gather_nd(x, i), [x, np.array([[5, 7], [0, 1]])], x[[5, 0], [7, 1]]),
        model("quotient", lambda _, x, y: op.floor_divide(x, y), [ints, divisors], ints // divisors),
        model("same_sign", lambda _, x, y: op.equal(op.greater(x, relax.const(0.0)), op.greater(y, relax.const(0.0))), [x, y], a == b),
        model("any_so_far", lambda _, a: op.cumsum(a, 1), [a], np.logical_or.accumulate(a, 1)),
        model("where", lambda _, a, x, y: op.where(a, x, y), [a, x, y], np.where(a, x, y)),
        model("arg_max", lambda _, x: op.argmax(x, 1), [x], x.argmax(1)),
        model("largest", lambda _, x: op.topk(x, 2, axis=1, ret_type="values"), [x], -np.sort(-x, 1)[:, :2]),
        model("sums_so_far", lambda _, x: op.cumsum(op.nn.relu(x), 1), [x], positive.cumsum(1)),
        model("nothing", lambda _, x: op.nn.relu(x), [x[:0]], positive[:0]),
        model("padded", lambda _, x: op.nn.pad(x, (1, 1, 0, 2)), [x], np.pad(x, ((1, 1), (0, 2)))),
        model("joined", lambda _, x, y: op.concat([op.nn.relu(x), y], 1), [x, y], np.concatenate([positive, y], 1)),
    ]


UNSCHEDULED = frozenset({"nothing"})
"""Models that TVM runs: there is no kernel of nothing."""


def dynamic_mlp(k: int, n: int) -> tvm.IRModule:
    """Return relu(x @ w + bias) of any number of rows of x, the dynamic dimension n."""
    shapes = {"x": (tvm.tirx.Var("n", "int64"), k), "w": (k, n), "bias": (n,)}
    args = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]
    builder = relax.BlockBuilder()
    with builder.function("main", args):
        with builder.dataflow():
            x, w, bias = args
            result = builder.emit_output(builder.normalize(op.nn.relu(op.add(op.matmul(x, w), bias))))
        builder.emit_func_output(result)
    return builder.get()
