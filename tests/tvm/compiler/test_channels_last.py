"""Images become channels last, whatever follows a convolution: the module computes what it did, and few transposes are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from support.thinned import at
from tvm import relax
from tvm.relax.op import nn

from kerneldecl.compiler.graph.channels_last import ChannelsLast

IMAGE = (2, 3, 8, 8)
Build = Callable[[relax.BlockBuilder, Any], Any]


def weights(*shape: int) -> Any:
    return relax.const(np.random.default_rng(sum(shape)).standard_normal(shape).astype("float32"))


def conv(x: Any, out: int, channels: int = 3) -> Any:
    return nn.conv2d(x, weights(out, channels, 3, 3), padding=1)


def patches(b: relax.BlockBuilder, x: Any) -> Any:
    """A vision transformer's beginning, at which TVM's ConvertLayout ends in a bad allocation."""
    rows = b.emit(relax.op.permute_dims(b.emit(relax.op.reshape(b.emit(conv(x, 4)), (2, 4, 64))), [0, 2, 1]))
    return relax.op.concat([weights(2, 1, 4), rows], axis=1)


def beside_an_input(b: relax.BlockBuilder, x: Any) -> Any:
    return relax.op.subtract(x, b.emit(relax.op.clip(b.emit(conv(x, 3)), -1, 1)))


def of_two_branches(b: relax.BlockBuilder, x: Any) -> Any:
    branches = b.emit(relax.op.concat([b.emit(conv(x, 4)), b.emit(nn.relu(b.emit(conv(x, 5)))), x], axis=1))
    return conv(b.emit(nn.max_pool2d(branches, pool_size=[2, 2], strides=[2, 2])), 2, 12)


def reduced(b: relax.BlockBuilder, x: Any) -> Any:
    return relax.op.max(b.emit(relax.op.sum(b.emit(conv(x, 4)), [-1])), [2])


def scaled_by_rows(b: relax.BlockBuilder, x: Any) -> Any:
    """An operand of lower rank broadcasts along the last axis of the old layout."""
    return relax.op.multiply(b.emit(nn.pad(b.emit(conv(x, 4)), [0, 0, 0, 0, 1, 2, 3, 4])), weights(15))


def chosen(b: relax.BlockBuilder, x: Any) -> Any:
    made = b.emit(conv(x, 3))
    return relax.op.where(b.emit(relax.op.greater(made, relax.const(0.0))), made, x)


def result(mod: tvm.IRModule, x: Any) -> Any:
    machine = relax.VirtualMachine(relax.build(mod, "llvm"), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(x)).numpy()


def operators(mod: tvm.IRModule) -> Counter[str]:
    found: Counter[str] = Counter()

    def note(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            found[str(expr.op.name)] += not isinstance(expr.args[0], tvm.ir.GenericConst)
            found["channels first"] += getattr(expr.attrs, "data_layout", "") in {"NCW", "NCHW", "NCDHW"}

    relax.analysis.post_order_visit(mod["main"], note)
    return found


def rows_and_columns(b: relax.BlockBuilder, x: Any) -> Any:
    """A sequence that is convolved, and attention's scores: a transpose of matrices is no image."""
    hidden = b.emit(nn.relu(b.emit(nn.conv1d(x, weights(8, 8, 3), padding=1))))
    rows = b.emit(relax.op.permute_dims(hidden, [0, 2, 1]))
    other = b.emit(relax.op.permute_dims(b.emit(relax.op.matmul(rows, weights(8, 8))), [0, 2, 1]))
    return relax.op.matmul(rows, b.emit(relax.op.multiply(other, relax.const(0.5))))


def volumes(b: relax.BlockBuilder, x: Any) -> Any:
    """A volume that is convolved, pooled, normalised and added up along one side."""
    hidden = b.emit(nn.conv3d(b.emit(relax.op.expand_dims(x, 2)), weights(4, 3, 1, 3, 3), padding=[0, 1, 1]))
    pooled = b.emit(nn.max_pool3d(hidden, pool_size=[1, 2, 2], strides=[1, 2, 2]))
    norm = b.emit(nn.instance_norm(pooled, weights(4), weights(4), channel_axis=1, axes=[2, 3, 4]))
    return relax.op.sum(norm, [3])


@pytest.mark.parametrize(
    ("build", "transposes"),
    # Of the image, and of what is returned; besides, of patches that become rows, of sums along one side, and of a constant row.
    at({4}, [(patches, 3), (beside_an_input, 2), (of_two_branches, 2), (reduced, 2), (scaled_by_rows, 3), (chosen, 2)]),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_module_computes_what_it_did(build: Build, transposes: int) -> None:
    check(build, transposes, IMAGE)


# Of the sequence and of the matrix; of the volume and of what is returned.
@pytest.mark.parametrize(("build", "transposes", "shape"), at({1}, [(rows_and_columns, 2, (2, 8, 9)), (volumes, 2, IMAGE)]))
def test_so_do_those_of_sequences_and_volumes(build: Build, transposes: int, shape: tuple[int, ...]) -> None:
    check(build, transposes, shape)


def check(build: Build, transposes: int, shape: tuple[int, ...]) -> None:
    b = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with b.function("main", [x]):
        with b.dataflow():
            made = b.emit_output(build(b, x))
        b.emit_func_output(made)
    mod = b.get()
    passes = [ChannelsLast(), relax.transform.EliminateCommonSubexpr(), relax.transform.DeadCodeElimination()]
    changed = tvm.transform.Sequential(passes)(mod)
    found = operators(changed)
    assert found["relax.permute_dims"] == transposes
    assert not found["channels first"]
    array = np.random.default_rng(3).standard_normal(shape).astype("float32")
    np.testing.assert_allclose(result(changed, array), result(mod, array), rtol=1e-4, atol=1e-4)
