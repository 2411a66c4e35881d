"""The graph passes keep what a module computes where it is nearly, but not quite, what they look for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tvm
import tvm_ffi
from support.graphs import TARGET, random
from tvm import relax

from kerneldecl.compiler.graph.pipeline import GRAPH_PASSES

op, nn = relax.op, relax.op.nn
Build = Callable[[relax.BlockBuilder, Any], Any]


class Case(NamedTuple):
    """A function of one input."""

    shape: tuple[int, ...]
    build: Build
    dtype: str = "float32"


def scalar(value: float, dtype: str = "float32") -> Any:
    return relax.const(value, dtype)


def heads(b: Any, x: Any, count: int, *, axes: tuple[int, ...] = (0, 2, 1, 3)) -> Any:
    """Return [batch, tokens, width] as [batch, heads, tokens, size]."""
    batch, tokens, width = (int(extent) for extent in x.ty.shape)
    return b.emit(op.permute_dims(b.emit(op.reshape(x, (batch, tokens, count, width // count))), axes))


def linear(b: Any, x: Any, columns: int, seed: int = 0) -> Any:
    return b.emit(op.add(b.emit(op.matmul(x, random(int(x.ty.shape[-1]), columns, seed=seed))), random(columns, seed=seed)))


def attention(b: Any, x: Any, count: int, order: str = "standard") -> Any:
    """Return multi-head attention; with `order` "swapped" heads of queries and keys are laid out differently."""
    batch, tokens, width = (int(extent) for extent in x.ty.shape)
    q, k, v = (linear(b, x, width, seed) for seed in range(3))
    q, v = (heads(b, each, count) for each in (q, v))
    k = heads(b, k, count, axes=(0, 2, 3, 1))
    if order == "swapped":
        moved = b.emit(op.permute_dims(b.emit(op.reshape(x, (batch, tokens, width // count, count))), (0, 3, 1, 2)))
        q = b.emit(op.add(q, moved))
    scores = b.emit(op.multiply(b.emit(op.matmul(q, k)), scalar(0.05)))
    context = b.emit(op.matmul(b.emit(nn.softmax(scores)), v))
    return b.emit(op.reshape(b.emit(op.permute_dims(context, (0, 2, 1, 3))), (batch, tokens, width)))


def packed_attention(b: Any, x: Any) -> Any:
    """Return attention as torch's module computes it: tokens first, query, key and value packed, and transposes around all of it."""
    batch, tokens, width = (int(extent) for extent in x.ty.shape)
    packed = linear(b, b.emit(op.permute_dims(x, (1, 0, 2))), 3 * width)
    split = b.emit(op.permute_dims(b.emit(op.reshape(packed, (tokens, batch, 3, width))), (2, 0, 1, 3)))
    q, k, v = (b.emit(op.take(split, relax.const(at, "int64"), axis=0)) for at in range(3))
    q, k, v = (b.emit(op.permute_dims(b.emit(op.reshape(each, (tokens, batch * 2, width // 2))), (1, 0, 2))) for each in (q, k, v))
    scores = b.emit(nn.softmax(b.emit(op.multiply(b.emit(op.matmul(q, b.emit(op.permute_dims(k, (0, 2, 1))))), scalar(0.05)))))
    context = b.emit(op.permute_dims(b.emit(op.matmul(scores, v)), (1, 0, 2)))
    projected = linear(b, b.emit(op.reshape(context, (tokens, batch, width))), width, seed=5)
    return b.emit(op.add(x, b.emit(op.permute_dims(projected, (1, 0, 2)))))


def windows(b: Any, x: Any) -> Any:
    """Return a linear layer of windows of an image, put back to their places."""
    split = b.emit(op.permute_dims(b.emit(op.reshape(x, (1, 2, 3, 2, 3, 4))), (0, 1, 3, 2, 4, 5)))
    rows = linear(b, b.emit(op.reshape(split, (4, 9, 4))), 12)
    back = b.emit(op.permute_dims(b.emit(op.reshape(rows, (1, 2, 2, 3, 3, 12))), (0, 1, 3, 2, 4, 5)))
    return b.emit(op.reshape(back, (1, 6, 6, 12)))


def rotary(b: Any, x: Any, *, first: str = "negated", cut: int = 2, shared: bool = False) -> Any:
    size = int(x.ty.shape[-1])
    low, high = (b.emit(op.strided_slice(x, [3], [begin], [end])) for begin, end in ((0, cut), (cut, size)))
    negated = b.emit(op.negative(high))
    turned = b.emit(op.concat([negated, low] if first == "negated" else [low, negated], axis=-1))
    cos, sin = (random(1, 1, int(x.ty.shape[2]), size, seed=seed) for seed in (1, 2))
    y = b.emit(op.add(b.emit(op.multiply(x, cos)), b.emit(op.multiply(turned, sin))))
    return b.emit(op.add(y, turned)) if shared else y


def conv(b: Any, x: Any, *, channels: int = 6, kernel: int = 3, groups: int = 1, seed: int = 0, **attrs: Any) -> Any:
    depth = int(x.ty.shape[1]) // groups
    return b.emit(nn.conv2d(x, random(channels, depth, kernel, kernel, seed=seed), groups=groups, **attrs))


def hard_swish(b: Any, x: Any, *, shift: float = 3.0, top: float = 6.0, by: float = 6.0) -> Any:
    gate = b.emit(op.clip(b.emit(op.add(x, scalar(shift))), 0, top))
    return b.emit(op.divide(b.emit(op.multiply(x, gate)), scalar(by)))


def normed(b: Any, x: Any, channels: int, seed: int = 0) -> Any:
    given = [random(channels, seed=seed + each) for each in range(4)]
    return b.emit(relax.TupleGetItem(b.emit(nn.batch_norm(x, *given, axis=1, training=False)), 0))


def shared_weights(b: Any, x: Any) -> Any:
    weights = random(6, 6, 3, 3)
    first, second = (b.emit(nn.conv2d(x, weights, padding=1)) for _ in range(2))
    return b.emit(op.add(normed(b, first, 6), second))


def read_twice(b: Any, x: Any) -> Any:
    product = b.emit(op.matmul(x, random(6, 6)))
    return b.emit(op.subtract(b.emit(nn.relu(product)), product))


def residual_twice(b: Any, x: Any) -> Any:
    total = b.emit(op.add(b.emit(op.matmul(x, random(6, 6))), x))
    return b.emit(op.add(b.emit(op.multiply(total, x)), x))


def gate_read_twice(b: Any, x: Any) -> Any:
    gate = b.emit(nn.silu(b.emit(op.matmul(x, random(6, 6)))))
    up = b.emit(op.matmul(x, random(6, 6, seed=1)))
    return b.emit(op.add(b.emit(op.multiply(gate, up)), gate))


def gated(b: Any, x: Any, cut: tuple[int, int, int, int] = (0, 8, 8, 16)) -> Any:
    packed = linear(b, x, 16)
    gate, up = (b.emit(op.strided_slice(packed, [1], [cut[at]], [cut[at + 1]])) for at in (0, 2))
    return b.emit(op.multiply(b.emit(nn.silu(gate)), up))


def sliced_and_whole(b: Any, x: Any) -> Any:
    packed = linear(b, x, 12)
    first, second = (b.emit(op.strided_slice(packed, [1], [begin], [begin + 6])) for begin in (0, 6))
    product = b.emit(op.matmul(b.emit(op.permute_dims(first)), second))
    return b.emit(op.matmul(packed, b.emit(op.concat([product, product], axis=0))))


def grouped_keys(b: Any, x: Any) -> Any:
    """Return scores of four heads of queries with two of keys; all extents are 4."""
    q = heads(b, linear(b, x, 16), 4)
    k = heads(b, linear(b, x, 8, seed=1), 2)
    repeated = b.emit(op.broadcast_to(b.emit(op.expand_dims(k, 2)), (4, 2, 2, 4, 4)))
    k = b.emit(op.reshape(repeated, (4, 4, 4, 4)))
    return b.emit(op.matmul(q, b.emit(op.permute_dims(k, (0, 1, 3, 2)))))


def interleaved_keys(b: Any, x: Any) -> Any:
    """Return scores whose keys are tiled rather than repeated: head i has keys i % 2."""
    q = heads(b, linear(b, x, 16), 4)
    k = heads(b, linear(b, x, 8, seed=1), 2)
    tiled = b.emit(op.broadcast_to(b.emit(op.expand_dims(k, 1)), (4, 2, 2, 4, 4)))
    return b.emit(op.matmul(q, b.emit(op.reshape(tiled, (4, 4, 4, 4)))))


def doubled(b: Any, x: Any) -> Any:
    product = b.emit(op.matmul(x, random(6, 6)))
    return op.add(product, product)


def row_gate(b: Any, x: Any) -> Any:
    image = conv(b, x)
    return op.multiply(image, b.emit(op.mean(image, [3], keepdims=True)))


def x_t(b: Any, x: Any) -> Any:
    return b.emit(op.permute_dims(x, (0, 2, 1)))


def chained(*steps: Callable[[Any], Any]) -> Build:
    """Return a function that applies operators, each to what the last gave."""

    def build(b: Any, x: Any) -> Any:
        for step in steps:
            x = b.emit(step(x))
        return x

    return build


IMAGE, ROWS, TOKENS = (2, 6, 9, 8), (7, 6), (2, 5, 12)
CUBE, BATCH = (4, 4, 4), (2, 5, 3)
CASES = {
    "weights of two convolutions, one with a batch norm": Case(IMAGE, shared_weights),
    "a product that is read twice": Case(ROWS, read_twice),
    "a residual that is read twice": Case((7, 6), residual_twice),
    "a gate that is read twice": Case(ROWS, gate_read_twice),
    "a product that is added to itself": Case(ROWS, doubled),
    "a column that is added to a product": Case(ROWS, lambda b, x: op.add(b.emit(op.matmul(x, random(6, 7))), random(7, 1))),
    "a row that is added to a product": Case(ROWS, lambda b, x: op.add(b.emit(op.matmul(x, random(6, 7))), random(1, 7))),
    "a row of one that a product is added to": Case((1, 6), lambda b, x: op.add(random(5, 1), b.emit(op.matmul(x, random(6, 7))))),
    "a number minus a product": Case(ROWS, lambda b, x: op.divide(scalar(2.0), b.emit(op.matmul(x, random(6, 7))))),
    "a product times a column": Case(ROWS, lambda b, x: op.multiply(b.emit(op.matmul(x, random(6, 7))), random(7, 1))),
    "one row, one column": Case((1, 1), lambda b, x: op.multiply(b.emit(op.matmul(x, random(1, 1))), random(1, 1))),
    "ones that make a value larger": Case((1, 6), lambda _, x: op.multiply(x, relax.const(np.ones((4, 6), "float32")))),
    "zeros that make a value larger": Case((1, 6), lambda _, x: op.add(x, relax.const(np.zeros((4, 6), "float32")))),
    "rows in reverse": Case(ROWS, chained(lambda x: op.strided_slice(x, [0], [6], [-8], [-1]), nn.relu)),
    "every second column of heads": Case(TOKENS, lambda b, x: op.strided_slice(heads(b, x, 3), [3], [0], [4], [2])),
    "a slice across heads": Case(TOKENS, lambda b, x: op.strided_slice(b.emit(op.reshape(heads(b, x, 3), (2, 15, 4))), [1], [3], [9])),
    "a slice of heads": Case(TOKENS, lambda b, x: nn.relu(b.emit(op.strided_slice(heads(b, x, 3), [1], [1], [3])))),
    "a slice of tokens": Case(TOKENS, lambda b, x: op.strided_slice(heads(b, linear(b, x, 12), 3), [2], [1], [2])),
    "the last head": Case(TOKENS, lambda b, x: op.take(heads(b, x, 3), relax.const(2, "int64"), axis=-3)),
    "permutations of equal extents": Case(
        CUBE,
        lambda b, x: op.matmul(b.emit(op.permute_dims(x, (2, 0, 1))), b.emit(op.permute_dims(x, (1, 2, 0)))),
    ),
    "a reshape after a transpose that is no view": Case((4, 6), chained(op.permute_dims, lambda x: op.reshape(x, (4, 6)), op.permute_dims)),
    "a transposed product of a transposed batch": Case(
        (2, 3, 4), lambda b, x: op.permute_dims(b.emit(op.matmul(x, b.emit(op.permute_dims(x, (0, 2, 1))))), (2, 1, 0))
    ),
    "attention with interleaved heads": Case(TOKENS, lambda b, x: attention(b, x, 3)),
    "attention whose extents are equal": Case((4, 4, 16), lambda b, x: attention(b, x, 4)),
    "attention of one token": Case((2, 1, 12), lambda b, x: attention(b, x, 3)),
    "attention of one head": Case(TOKENS, lambda b, x: attention(b, x, 1)),
    "attention of one sequence": Case((1, 5, 12), lambda b, x: attention(b, x, 3)),
    "attention with queries of two layouts": Case(TOKENS, lambda b, x: attention(b, x, 3, "swapped")),
    "attention of packed projections": Case((3, 5, 8), packed_attention),
    "keys that are repeated for a group of queries": Case((4, 4, 4), grouped_keys),
    "keys that are tiled": Case((4, 4, 4), interleaved_keys),
    "windows of an image": Case((1, 6, 6, 4), windows),
    "a residual before heads are put together": Case(
        TOKENS,
        lambda b, x: op.permute_dims(b.emit(op.add(b.emit(op.matmul(heads(b, x, 3), random(2, 3, 4, 4))), heads(b, x, 3))), (0, 2, 1, 3)),
    ),
    "one batch that is broadcast": Case((1, 5, 3), lambda b, x: op.matmul(x, b.emit(op.broadcast_to(random(3, 4), (2, 3, 4))))),
    "a matrix for each of a batch of one": Case((1, 5, 3), lambda _, x: op.matmul(x, random(4, 3, 2))),
    "a matrix times vectors": Case((5, 3), lambda _, x: op.matmul(x, random(3))),
    "a vector times matrices": Case((3,), lambda _, x: op.matmul(x, random(2, 3, 4))),
    "scaled integers": Case((2, 3, 4), lambda b, x: op.matmul(b.emit(op.multiply(x, relax.const(3, "int32"))), x_t(b, x)), "int32"),
    "two scales, one of them zero": Case(
        (2, 3, 4),
        lambda b, x: op.matmul(b.emit(op.multiply(x, scalar(0.0))), b.emit(op.multiply(x_t(b, x), scalar(2.0)))),
    ),
    "no rows": Case((0, 6), lambda b, x: nn.relu(linear(b, x, 4))),
    "rotary embedding": Case((1, 2, 5, 4), rotary),
    "rotary embedding of interleaved heads": Case(TOKENS, lambda b, x: rotary(b, heads(b, linear(b, x, 12), 3))),
    "halves of which the second is negated": Case((1, 2, 5, 4), lambda b, x: rotary(b, x, first="low")),
    "uneven halves": Case((1, 2, 5, 4), lambda b, x: rotary(b, x, cut=1)),
    "halves that are read elsewhere": Case((1, 2, 5, 4), lambda b, x: rotary(b, x, shared=True)),
    "a packed gate": Case(ROWS, gated),
    "a packed gate whose parts overlap": Case(ROWS, lambda b, x: gated(b, x, (0, 8, 6, 14))),
    "a gate beside the whole": Case(ROWS, sliced_and_whole),
    "softmax of another axis": Case(TOKENS, lambda b, x: nn.softmax(heads(b, x, 3), axis=1)),
    "softmax of columns": Case(BATCH, lambda b, x: nn.softmax(b.emit(op.permute_dims(x, (0, 2, 1))), axis=-1)),
    "a norm of two axes": Case(TOKENS, lambda _, x: nn.layer_norm(x, random(5, 12), random(5, 12, seed=1), axes=[-2, -1])),
    "a norm of channels": Case(
        IMAGE, lambda b, x: nn.layer_norm(b.emit(op.permute_dims(conv(b, x), (0, 2, 3, 1))), random(6), random(6, seed=1), axes=[-1])
    ),
    "bounds in the wrong order": Case(ROWS, chained(lambda x: op.clip(x, 1, -1))),
    "a bound at one side": Case(IMAGE, lambda b, x: op.clip(conv(b, x), float("-inf"), 0.5)),
    "relu6 that is not": Case(IMAGE, lambda b, x: op.clip(conv(b, x), 0, 6.5)),
    "hard_swish": Case(IMAGE, lambda b, x: hard_swish(b, conv(b, x))),
    "hard_swish with another shift": Case(IMAGE, lambda b, x: hard_swish(b, conv(b, x), shift=2.9)),
    "hard_swish with another bound": Case(IMAGE, lambda b, x: hard_swish(b, conv(b, x), top=5.0)),
    "hard_swish with another divisor": Case(IMAGE, lambda b, x: hard_swish(b, conv(b, x), by=7.0)),
    "groups, strides and dilation": Case(IMAGE, lambda b, x: conv(b, x, groups=2, strides=(2, 1), dilation=(1, 2), padding=(1, 2, 0, 1))),
    "a batch norm of groups": Case(IMAGE, lambda b, x: normed(b, conv(b, x, groups=3, padding=1), 6)),
    "padding with a number": Case(IMAGE, lambda b, x: conv(b, b.emit(nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], pad_value=0.5)))),
    "reflected padding": Case(IMAGE, lambda b, x: conv(b, b.emit(nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], pad_mode="reflect")))),
    "padding with -inf before pooling": Case(
        IMAGE,
        lambda b, x: nn.max_pool2d(b.emit(nn.pad(conv(b, x), [0, 0, 0, 0, 1, 1, 1, 1], pad_value=float("-inf"))), (3, 3), strides=2),
    ),
    "pooling that counts its padding": Case(
        IMAGE, lambda b, x: nn.avg_pool2d(conv(b, x), (3, 3), strides=2, padding=1, count_include_pad=True)
    ),
    "pooling that does not": Case(IMAGE, lambda b, x: nn.avg_pool2d(conv(b, x), (3, 3), strides=2, padding=1, ceil_mode=True)),
    "a volume that an image is broadcast to": Case(IMAGE, lambda b, x: op.add(conv(b, x, padding=1), random(3, 1, 1, 1, 1))),
    "a row that is broadcast over images": Case(IMAGE, lambda b, x: op.multiply(conv(b, x, padding=1), random(8))),
    "images of one channel": Case((2, 1, 9, 8), lambda b, x: op.add(conv(b, x, channels=1, padding=1), x)),
    "a reduction of axes from the end": Case(IMAGE, lambda b, x: op.max(conv(b, x), [-1, 1], keepdims=False)),
    "a gate for each row of pixels": Case(IMAGE, row_gate),
}


def symbol(name: str) -> str:
    return f"case_{list(CASES).index(name)}"


def module(names: Sequence[str] = tuple(CASES)) -> tvm.IRModule:
    """Return a module with a function for each case: it compiles faster than a module for each."""
    builder = relax.BlockBuilder()
    for name in names:
        case = CASES[name]
        x = relax.Var("x", relax.TensorType(case.shape, case.dtype))
        with builder.function(symbol(name), [x]):
            with builder.dataflow():
                y = builder.emit_output(case.build(builder, x))
            builder.emit_func_output(y)
    return builder.get()


def compiled(mod: tvm.IRModule) -> Any:
    return relax.VirtualMachine(relax.build(mod, TARGET), tvm.cpu())


def assert_same(name: str, before: Any, after: Any) -> None:
    case = CASES[name]
    x = (np.random.default_rng(1).standard_normal(case.shape) * 3).astype(case.dtype)
    expected, found = (machine[symbol(name)](tvm.runtime.tensor(x)).numpy() for machine in (before, after))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def plain() -> Any:
    return compiled(module())


@pytest.fixture(scope="module")
def passed() -> Any:
    return compiled(tvm.transform.Sequential(list(GRAPH_PASSES))(module()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_computes_the_same(plain: Any, passed: Any, name: str) -> None:
    assert_same(name, plain, passed)


OF_EACH_KIND = (
    "attention of packed projections",
    "keys that are repeated for a group of queries",
    "rotary embedding of interleaved heads",
    "a packed gate",
    "a batch norm of groups",
    "hard_swish",
    "padding with a number",
    "a norm of channels",
)
OWN_PASSES = {each.info.name: each for each in GRAPH_PASSES if type(each).__module__.startswith("kerneldecl")}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_PASSES)
def test_each_pass_can_be_used_alone_and_twice(plain: Any, name: str) -> None:
    mod = module(OF_EACH_KIND)
    once = OWN_PASSES[name](mod)
    tvm_ffi.structural_equal(OWN_PASSES[name](once), once) or pytest.fail("a second run changes the module")
    alone = compiled(once)
    for case in OF_EACH_KIND:
        assert_same(case, plain, alone)


def test_the_passes_are_relax_passes_with_documentation() -> None:
    assert len(OWN_PASSES) >= 16
    assert all(isinstance(each, tvm.transform.Pass) and type(each).__doc__ for each in OWN_PASSES.values())
