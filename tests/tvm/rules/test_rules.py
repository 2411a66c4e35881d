"""The standard rules through TVM: unscheduled kernels match the references, and Relax's own functions are the same functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.attention_cases import attributes as attention_attributes
from support.repository import REPOSITORY
from support.thinned import every, second
from support.unoptimised import unoptimised
from tvm import relax

from kerneldecl.arrays import aligned, poisoned, relative_error
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler.canonical import canonical_module, lower
from kerneldecl.compiler.cpu import PIPELINE
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.rule import Rule

ROOT = REPOSITORY
TARGET = unoptimised(load_arch(ROOT, "host"))
FLOATS = ("float16", "bfloat16", "float32", "float64")
CONVOLUTION = {"n": 2, "h": 9, "w": 8, "c": 6, "f": 4, "kh": 3, "kw": 2, "stride": 2, "padding": 1, "groups": 2}
FACTORS = (*FLOATS, "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
ACTIVATIONS = ("relu", "relu6", "tanh", "sigmoid", "gelu", "gelu_tanh", "silu", "hard_sigmoid", "hard_swish")
ONE_OPERAND = (*ACTIVATIONS, "copy", "neg", "abs", "sqrt", "exp")
TWO_OPERANDS = ("add", "sub", "mul", "div", "maximum", "minimum")


def rule(name: str, **attrs: Any) -> Rule:
    instance = load_rule(ROOT, name)(**attrs)
    assert list(instance.problems()) == []
    return instance


def error_of_unscheduled_kernel(instance: Rule) -> float:
    """Build the rule's function as it is, run it on its inputs, and return its error relative to the reference."""
    kernel = tvm.compile(lower(instance), target=TARGET, tir_pipeline=PIPELINE)["main"]
    inputs = [aligned(array) for array in instance.inputs(np.random.default_rng(7))]
    signature = instance.signature()
    updated = [aligned(array.copy()) for array in inputs[len(signature.inputs) :]]
    outputs = [*updated, *(aligned(poisoned(arg)) for arg in signature.made)]
    kernel(*map(tensor, inputs[: len(signature.inputs)]), *map(tensor, outputs))
    reference = instance.reference(*inputs)
    wanted = [reference] if isinstance(reference, np.ndarray) else list(reference)
    assert [array.shape for array in wanted] == [array.shape for array in outputs]
    return max(relative_error(got, want) for got, want in zip(outputs, wanted, strict=True))


@pytest.mark.parametrize(
    ("name", "attrs", "dtype"),
    every(
        2,
        [
            ("matmul", {"m": 17, "n": 13, "k": 33, "layout": "nt", "epilogue": ("bias", "relu", "add")}),
            ("gemv", {"n": 13, "k": 33}),
            (
                "conv2d",
                {"n": 2, "h": 9, "w": 8, "c": 6, "f": 4, "kh": 3, "kw": 2, "stride": 2, "padding": 1, "groups": 2, "epilogue": ("bias",)},
            ),
            ("elementwise", {"op": "add", "shape": (3, 7)}),
            ("transpose", {"shape": (3, 5, 7), "axes": (2, 0, -2)}),
        ],
        FACTORS,
    ),
)
def test_kernel_matches_reference_in_every_dtype(name: str, attrs: dict[str, Any], dtype: str) -> None:
    instance = rule(name, dtype=dtype, **attrs)
    assert error_of_unscheduled_kernel(instance) <= instance.tolerance()


@pytest.mark.parametrize(
    ("name", "attrs", "dtype"),
    every(
        4,
        [
            ("gemv_i4", {"n": 13, "k": 256}),
            ("reduce", {"op": "sum", "shape": (3, 5, 7), "axes": (2, 0)}),
            ("reduce", {"op": "mean", "shape": (3, 5, 7), "axes": (1,), "keepdims": True}),
            ("softmax", {"shape": (3, 5, 7), "axis": 1}),
            ("layer_norm", {"shape": (3, 5, 7)}),
            ("rms_norm", {"shape": (3, 5, 7)}),
            ("group_norm", {"shape": (3, 6, 7), "groups": 2, "activation": "gelu"}),
            *(("elementwise", {"op": op, "shape": (3, 7)}) for op in (*ONE_OPERAND, *TWO_OPERANDS)),
        ],
        FLOATS,
    ),
)
def test_kernel_matches_reference_in_every_floating_dtype(name: str, attrs: dict[str, Any], dtype: str) -> None:
    instance = rule(name, dtype=dtype, **attrs)
    assert error_of_unscheduled_kernel(instance) <= instance.tolerance()


@pytest.mark.parametrize(
    "instance",
    second(
        [
            rule("matmul", m=1, n=1, k=1, epilogue=("gelu",)),
            rule("matmul", m=1, n=31, k=7, layout="tn", epilogue=("silu", "bias")),
            rule("matmul", m=19, n=1, k=5, layout="tt", batch=3, epilogue=("add",)),
            rule("matmul", m=5, n=6, k=7, layout="nn", batch=1),
            rule("matmul", m=16, n=16, k=2048, dtype="float16", accum_dtype="float16"),
            rule("matmul", m=16, n=16, k=64, dtype="float16", out_dtype="float32", epilogue=("add", "silu")),
            rule("matmul", m=16, n=16, k=64, dtype="int8", out_dtype="float32", epilogue=("bias", "relu")),
            rule("matmul", m=16, n=24, k=64, dtype="int8", out_dtype="float16", epilogue=("scale", "bias", "gelu")),
            rule("matmul", m=16, n=24, k=64, dtype="int8", out_dtype="float32", epilogue=("bias", "scale_rows", "scale_columns"), batch=3),
            rule("matmul", m=16, n=24, k=64, dtype="float8_e4m3fn", out_dtype="bfloat16", epilogue=("scale_rows", "scale_columns", "add")),
            rule("matmul", m=16, n=24, k=64, dtype="float16", accum_dtype="float16", epilogue=("scale",)),
            rule("matmul", m=16, n=24, k=64, dtype="float64", epilogue=("scale", "relu")),
            rule("matmul", m=16, n=24, k=64, layout="tt", precision="tfloat32", batch=2, epilogue=("bias", "relu")),
            rule("matmul", m=1, n=24, k=64, precision="tfloat32", out_dtype="float16"),
            rule("conv2d", n=1, h=6, w=5, c=6, f=6, kh=3, kw=3, dtype="int8", out_dtype="float16", epilogue=("scale_columns", "silu")),
            rule("attention", batch=2, heads=3, queries=5, head_dim=8),
            rule("attention", batch=1, heads=4, kv_heads=2, queries=5, keys=9, head_dim=6, value_dim=4, layout="bshd", dtype="bfloat16"),
            rule("attention", batch=1, heads=2, kv_heads=1, queries=9, keys=5, head_dim=4, causal=True, mask=True, dtype="float32"),
            rule("attention", batch=1, heads=1, queries=1, keys=7, head_dim=1, causal=True, scale=30.0, dtype="float32"),
            rule("attention_decode", batch=3, heads=4, kv_heads=2, queries=5, keys=24, head_dim=6, page_size=8, pages=20, layout="bshd"),
            rule("attention_decode", batch=2, heads=4, kv_heads=1, keys=9, head_dim=6, value_dim=4, latent=True, dtype="float32"),
            rule("matmul_grouped", rows=9, groups=4, n=6, k=8),
            rule("matmul_grouped", rows=9, groups=4, n=130, k=129, dtype="float8_e4m3fn", masked=True),
            rule("matmul_grouped", rows=9, groups=1, n=6, k=8, layout="nn", dtype="float32", used=3),
            rule("gemv", n=1, k=1),
            rule("gemv", n=7, k=3, layout="t", dtype="float16"),
            rule("gemv_i4", n=1, k=2, group=2),
            rule("conv2d", n=1, h=1, w=1, c=1, f=1, kh=1, kw=1),
            rule("conv2d", n=1, h=6, w=5, c=6, f=6, kh=3, kw=3, groups=6, epilogue=("silu",)),
            rule("conv2d", n=1, h=6, w=5, c=3, f=9, kh=2, kw=3, groups=3, dilation=2, padding=2),
            rule("conv2d", n=2, h=6, w=5, c=3, f=12, kh=2, kw=3, stride=2, padding=1, panel=4, epilogue=("bias", "relu")),
            rule("conv2d", n=1, h=6, w=5, c=6, f=12, kh=1, kw=1, groups=3, panel=2, dtype="float16"),
            rule("conv2d", n=1, h=6, w=5, c=3, f=4, kh=3, kw=3, panel=4, dtype="int8"),
            *(rule("elementwise", op=op, shape=(300,), dtype="int8") for op in ("add", "sub", "mul", "neg", "abs", "relu", "minimum")),
            *(rule("elementwise", op=op, shape=(300,), dtype="uint8") for op in ("add", "sub", "mul", "copy", "relu", "maximum")),
            rule("elementwise", op="mul", shape=(300,), dtype="int64"),
            rule("elementwise", op="gelu", shape=(1, 1, 1, 1), dtype="float8_e4m3fn"),
            rule("reduce", op="sum", shape=(300,), axes=(0,), dtype="int32"),
            rule("reduce", op="sum", shape=(1, 1), axes=(1,)),
            *(
                rule("reduce", op=op, shape=(5, 60), axes=(-1,), dtype=dtype)
                for op in ("max", "min")
                for dtype in ("uint8", "int16", "float16")
            ),
            rule("softmax", shape=(1,)),
            rule("softmax", shape=(3, 7), out_dtype="float16"),
            rule("elementwise", op="silu_mul", shape=(3, 7), dtype="float16"),
            rule("matmul", m=5, n=6, k=7, batch=2, heads=3, interleaved="ab", layout="nt", epilogue=("scale",)),
            rule("matmul", m=5, n=6, k=7, batch=2, heads=3, interleaved="bc", epilogue=("bias", "mul", "scale_rows")),
            rule("matmul", m=5, n=6, k=7, batch=2, heads=3, interleaved="abc", layout="tt"),
            rule("rotary", batch=2, tokens=5, heads=3, size=6),
            rule("rotary", batch=2, tokens=5, heads=3, size=6, interleaved="x", dtype="float16"),
            rule("rotary", tokens=5, heads=3, size=6, interleaved="xy", dtype="bfloat16"),
            rule("rotary", batch=2, tokens=5, heads=3, size=6, pairs=True, interleaved="y"),
            rule("rotary_append", batch=3, tokens=2, heads=2, size=6, keys=9),
            rule("rotary_append", batch=1, heads=2, size=6, keys=1, pairs=True, dtype="bfloat16"),
            rule(
                "rotary_append", batch=3, tokens=5, heads=1, size=4, keys=12, page_size=3, interleaved=True, layout="bshd", dtype="float32"
            ),
            rule("rotary_append", batch=2, tokens=8, heads=2, size=4, keys=8, page_size=4, pages=7, pairs=True),
            rule("layer_norm", shape=(1,)),
            rule("rms_norm", shape=(9, 1), eps=0.5),
            rule("group_norm", shape=(2, 3, 5, 6), groups=3, axis=-1, dtype="float16", activation="silu"),
            rule("group_norm", shape=(1, 1), groups=1, eps=0.5, activation="relu"),
            rule("group_norm", shape=(2, 4, 3, 2, 2), groups=4),
            rule("transpose", shape=(1,), axes=(0,)),
            rule("conv1d", n=2, w=9, c=4, f=6, kw=3, pads=(2, 0), dtype="float16", epilogue=("bias", "relu")),
            rule("conv1d", n=2, w=9, c=4, f=6, kw=3, layout="ncw", groups=2, epilogue=("bias", "scale_columns")),
            rule("conv3d", n=1, d=4, h=5, w=6, c=2, f=3, kd=3, kh=2, kw=3, padding=1, stride=2, layout="ncdhw", epilogue=("add",)),
            rule("conv2d", n=2, h=9, w=8, c=4, f=6, kh=3, kw=2, strides=(2, 1), dilations=(1, 2), pads=(1, 0, 2, 1), groups=2),
            rule("conv2d_transpose", n=2, h=4, w=5, c=3, f=4, kh=3, kw=4, stride=2, padding=1, extra=1, epilogue=("bias", "relu")),
            rule("conv2d_transpose", n=1, h=4, w=5, c=3, f=4, kh=4, kw=2, stride=3, padding=1, layout="nchw", dtype="float16"),
            rule("adaptive_pool2d", op="mean", n=2, h=13, w=9, c=4, rows=6, columns=3, dtype="float16"),
            rule("adaptive_pool2d", op="max", n=1, h=8, w=9, c=4, rows=4, columns=2, layout="nchw"),
            rule("cumsum", shape=(3, 5, 4), axis=1, exclusive=True, reverse=True, dtype="bfloat16"),
            rule("topk", shape=(3, 20), k=6, largest=False, dtype="bfloat16", index_dtype="int32"),
            rule("sort", shape=(2, 3, 9), descending=True, dtype="int64"),
            rule("scatter_add", rows=5, columns=3, updates=17, dtype="float16"),
            rule("take", shape=(3, 4, 5), indices=(2, 3), axis=-2),
            rule("concat", shapes=((2, 3), (2, 5), (2, 1)), axis=-1, dtype="int8"),
            rule("where", shapes=((3, 1), (7,), (3, 7)), dtype="float16"),
            rule("cast", shape=(3, 7), dtype="float32", out_dtype="int8"),
            rule("pad", shape=(3, 4), pads=(1, 0, 2, 3), mode="reflect"),
            rule("resize2d", op="bilinear", n=1, h=5, w=7, c=2, rows=8, columns=3, coordinates="align_corners", layout="nchw"),
            rule("resize2d", op="nearest", n=1, h=5, w=7, c=2, rows=8, columns=3, dtype="float16"),
            rule("pool2d", op="max", n=2, h=9, w=8, c=3, kh=3, kw=2, stride=2, padding=1, dtype="bfloat16"),
            rule(
                "pool2d",
                op="mean",
                n=2,
                h=9,
                w=8,
                c=3,
                kh=3,
                kw=3,
                stride=2,
                padding=1,
                count_padding=False,
                layout="nchw",
                dtype="float16",
            ),
            rule("pool2d", op="mean", n=2, h=7, w=7, c=5, kh=7, kw=7),
            rule("batch_norm", shape=(2, 3, 5, 4), activation="relu"),
            rule("batch_norm", shape=(6, 5), axis=-1, dtype="float16"),
            rule("embedding", indices=(3, 5), rows=11, columns=6, dtype="float16"),
            rule("embedding", indices=(1,), rows=1, columns=1, index_dtype="int32", dtype="int8"),
            rule("arg_reduce", op="argmin", shape=(5, 7, 3), axis=1, dtype="int8", index_dtype="int32"),
            rule("arg_reduce", op="argmax", shape=(5, 300), dtype="bfloat16"),
            rule("expression", expr="gelu(x) * y + 1", shapes=((4, 6), (6,))),
            rule(
                "expression",
                expr="where(x < y, -x / 2, max(x, silu(z)))",
                shapes=((4, 6), (4, 1), (1, 6)),
                dtype="float16",
                out_dtype="float32",
            ),
            rule(
                "expression",
                expr="log(abs(x) + 2) * rsqrt(exp(y) + 1) - gelu_tanh(hard_swish(x)) + min(relu6(y), sigmoid(x))",
                shapes=((37,), (37,)),
            ),
        ],
    ),
    ids=str,
)
def test_kernel_matches_reference(instance: Rule) -> None:
    assert error_of_unscheduled_kernel(instance) <= instance.tolerance()


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_convolution_that_makes_sense_matches_its_reference(data: st.DataObject) -> None:
    small = st.integers(1, 3)
    attrs = {name: data.draw(small, name) for name in ("n", "kh", "kw", "stride", "dilation", "groups")}
    attrs |= {name: data.draw(st.integers(1, 9), name) for name in ("h", "w")}
    attrs |= {name: attrs["groups"] * data.draw(small, name) for name in ("c", "f")}
    attrs["panel"] = data.draw(st.integers(0, 3), "panel")
    instance = load_rule(ROOT, "conv2d")(padding=data.draw(st.integers(0, 3), "padding"), **attrs)  # type: ignore[call-arg]
    assume(not list(instance.problems()))
    assert error_of_unscheduled_kernel(instance) <= instance.tolerance()


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_reduction_matches_its_reference(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    axes = data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), min_size=1, unique_by=lambda axis: axis % len(shape)))
    op = data.draw(st.sampled_from(["sum", "max", "min", "mean"]))
    instance = rule("reduce", op=op, shape=shape, axes=tuple(axes), keepdims=data.draw(st.booleans()))
    assert error_of_unscheduled_kernel(instance) <= instance.tolerance()


@settings(max_examples=15, deadline=None)
@given(attention_attributes())
def test_any_attention_matches_its_reference(attrs: dict[str, Any]) -> None:
    instance = rule("attention", **attrs)
    assert error_of_unscheduled_kernel(instance) <= instance.tolerance()


@pytest.mark.parametrize("attrs", [{}, {"causal": True}, {"mask": True, "logsumexp": True}])
def test_attention_keeps_nan_and_infinities(attrs: dict[str, Any]) -> None:
    """NaN among queries, keys and values is in the results that the reference says, and rows of which all keys are masked are zero."""
    instance = rule("attention", batch=1, heads=3, queries=9, head_dim=4, dtype="float32", **attrs)
    inputs = instance.inputs(np.random.default_rng(3))
    for at, array in enumerate(inputs):
        array[(0, at, 5) if array.ndim == 4 else 4] = np.nan if array.ndim == 4 else -np.inf
    kernel = tvm.compile(lower(instance), target=TARGET, tir_pipeline=PIPELINE)["main"]
    outputs = [aligned(poisoned(arg)) for arg in instance.signature().outputs]
    kernel(*map(tensor, map(aligned, inputs)), *map(tensor, outputs))
    reference = instance.reference(*inputs)
    for got, want in zip(outputs, [reference] if isinstance(reference, np.ndarray) else reference, strict=True):
        assert np.isnan(want).any()
        assert relative_error(got, want, any_for_nan=instance.nan_may_vanish()) <= instance.tolerance()


# The functions that Relax makes of the same operators


def relax_function(instance: Rule, build: Callable[..., Any]) -> Any:
    """Return the one PrimFunc that Relax's pipeline makes of an expression over the rule's inputs."""
    args = [relax.Var(arg.name, relax.TensorType(arg.shape, arg.dtype)) for arg in instance.signature().inputs]
    builder = relax.BlockBuilder()
    with builder.function("main", args):
        with builder.dataflow():
            out = builder.emit_output(build(*args))
        builder.emit_func_output(out)
    passes = [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]
    mod = tvm.transform.Sequential(passes)(builder.get())
    (func,) = (func for func in mod.functions.values() if isinstance(func, tvm.tirx.PrimFunc))
    return func


def relax_conv2d(**options: Any) -> Callable[..., Any]:
    return lambda x, w, *_: relax.op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO", **options)


MATMUL = {"m": 4, "n": 6, "k": 5}
CONV2D = {"n": 1, "h": 8, "w": 9, "c": 4, "f": 8, "kh": 3, "kw": 2}
SHAPE = {"shape": (3, 4, 5)}
op = relax.op


def scalar(value: float) -> Any:
    return relax.const(value, "float32")


def relu6(x: Any) -> Any:
    return op.minimum(op.nn.relu(x), scalar(6))


def hard_sigmoid(x: Any) -> Any:
    return op.divide(relu6(op.add(x, scalar(3))), scalar(6))


@pytest.mark.parametrize(
    ("instance", "build"),
    [
        (rule("matmul", **MATMUL), op.matmul),
        (rule("matmul", **MATMUL, batch=3), op.matmul),
        (rule("matmul", **MATMUL, dtype="float16", accum_dtype="float16"), op.matmul),
        (rule("matmul", **MATMUL, dtype="float16", out_dtype="float32"), lambda a, b: op.matmul(a, b, out_dtype="float32")),
        (rule("matmul", **MATMUL, dtype="float16"), lambda a, b: op.astype(op.matmul(a, b, out_dtype="float32"), "float16")),
        (rule("matmul", **MATMUL, epilogue=("bias", "relu")), lambda a, b, bias: op.nn.relu(op.add(op.matmul(a, b), bias))),
        (rule("matmul", **MATMUL, epilogue=("bias", "gelu")), lambda a, b, bias: op.nn.gelu(op.add(op.matmul(a, b), bias))),
        (rule("matmul", **MATMUL, epilogue=("add", "silu")), lambda a, b, c: op.nn.silu(op.add(op.matmul(a, b), c))),
        (rule("gemv", n=4, k=5), op.matmul),
        (rule("conv2d", **CONV2D), relax_conv2d()),
        (rule("conv2d", **CONV2D, stride=2, padding=1, dilation=2), relax_conv2d(strides=2, padding=1, dilation=2)),
        (rule("conv2d", **CONV2D, groups=4, padding=1), relax_conv2d(groups=4, padding=1)),
        (rule("conv2d", **CONV2D, epilogue=("bias", "relu")), lambda x, w, bias: op.nn.relu(op.add(relax_conv2d()(x, w), bias))),
        (rule("softmax", **SHAPE), op.nn.softmax),
        (rule("softmax", **SHAPE, axis=1), lambda x: op.nn.softmax(x, 1)),
        (rule("layer_norm", **SHAPE), lambda x, gamma, beta: op.nn.layer_norm(x, gamma, beta, axes=-1, epsilon=1e-5)),
        (rule("rms_norm", **SHAPE), lambda x, gamma: op.nn.rms_norm(x, gamma, axes=-1, epsilon=1e-5)),
        (rule("rms_norm", **SHAPE, dtype="float16"), lambda x, gamma: op.nn.rms_norm(x, gamma, axes=-1, epsilon=1e-5)),
        (rule("transpose", **SHAPE, axes=(2, 0, 1)), lambda x: op.permute_dims(x, [2, 0, 1])),
        *((rule("elementwise", op=name, **SHAPE), getattr(op, name)) for name in ("add", "maximum", "minimum", "abs", "sqrt", "exp")),
        *((rule("elementwise", op=name, **SHAPE), getattr(op, name)) for name in ("tanh", "sigmoid")),
        *((rule("elementwise", op=name, **SHAPE), getattr(op.nn, name)) for name in ("relu", "gelu", "gelu_tanh", "silu")),
        (rule("elementwise", op="relu6", **SHAPE), relu6),
        (rule("elementwise", op="hard_sigmoid", **SHAPE), hard_sigmoid),
        (rule("elementwise", op="hard_swish", **SHAPE), lambda x: op.divide(op.multiply(x, relu6(op.add(x, scalar(3)))), scalar(6))),
        (rule("conv2d", **CONV2D, epilogue=("bias", "relu6")), lambda x, w, bias: relu6(op.add(relax_conv2d()(x, w), bias))),
        (rule("elementwise", op="sub", **SHAPE), op.subtract),
        (rule("elementwise", op="mul", **SHAPE), op.multiply),
        (rule("elementwise", op="div", **SHAPE), op.divide),
        (rule("elementwise", op="neg", **SHAPE), op.negative),
        (rule("elementwise", op="add", **SHAPE, dtype="float16"), op.add),
        (rule("reduce", op="sum", **SHAPE, axes=(-1,)), lambda x: op.sum(x, [-1])),
        (rule("reduce", op="sum", **SHAPE, axes=(2, 0)), lambda x: op.sum(x, [2, 0])),
        (rule("reduce", op="mean", **SHAPE, axes=(-1,)), lambda x: op.mean(x, [-1])),
        (rule("reduce", op="mean", **SHAPE, axes=(1,), keepdims=True), lambda x: op.mean(x, [1], keepdims=True)),
        (rule("reduce", op="max", **SHAPE, axes=(1,), keepdims=True), lambda x: op.max(x, [1], keepdims=True)),
        (rule("reduce", op="min", **SHAPE, axes=(0, 1, 2)), lambda x: op.min(x, [0, 1, 2])),
    ],
    ids=lambda value: str(value) if isinstance(value, Rule) else "",
)
def test_relax_lowers_to_the_same_function(instance: Rule, build: Callable[..., Any]) -> None:
    ours, theirs = lower(instance), canonical_module(relax_function(instance, build))
    assert tvm_ffi.structural_equal(ours, theirs), tvm_ffi.get_first_structural_mismatch(ours, theirs)


# Functions from files

SCRIPT = """
from tvm.script import ir as I
from tvm.script import tirx as T

ROWS = 5


@T.prim_func(s_tir=True)
def double(X: T.Buffer((ROWS, 3), "float16"), Y: T.Buffer((ROWS, 3), "float16")):
    for i, j in T.grid(ROWS, 3):
        with T.sblock("double"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = X[vi, vj] + X[vi, vj]


@I.ir_module
class Both:
    @T.prim_func(s_tir=True)
    def sum_and_difference(
        X: T.Buffer((4,), "float32"), Z: T.Buffer((4,), "float32"), S: T.Buffer((4,), "float32"), D: T.Buffer((4,), "float32")
    ):
        for i in range(4):
            with T.sblock("both"):
                vi = T.axis.spatial(4, i)
                S[vi] = X[vi] + Z[vi]
                D[vi] = X[vi] - Z[vi]

    @T.prim_func(s_tir=True)
    def output_first(Y: T.Buffer((4,), "float32"), X: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("copy"):
                vi = T.axis.spatial(4, i)
                Y[vi] = X[vi]
"""
REFERENCE = """
def reference(x):
    return 2 * x.astype("float64")


def wrong(x):
    return 3 * x.astype("float64")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "kernels.py"
    path.write_text(SCRIPT)
    (tmp_path / "references.py").write_text(REFERENCE)
    return str(path)


def test_function_of_a_script_is_its_own_reference(script: str) -> None:
    instance = rule("tensor_ir", file=script, function="sum_and_difference")
    assert [arg.name for arg in instance.signature().inputs] == ["X", "Z"]
    assert [arg.name for arg in instance.signature().outputs] == ["S", "D"]
    assert instance.flops() == 8
    x, z = inputs = instance.inputs(np.random.default_rng(0))
    total, difference = instance.reference(*inputs)
    np.testing.assert_allclose(total, x + z)
    np.testing.assert_allclose(difference, x - z)


def test_function_of_a_script_with_a_reference_in_numpy(script: str) -> None:
    references = script.replace("kernels", "references")
    instance = rule("tensor_ir", file=script, function="double", reference_file=references)
    assert error_of_unscheduled_kernel(instance) <= instance.tolerance()
    wrong = rule("tensor_ir", file=script, function="double", reference_file=references, reference_function="wrong")
    assert error_of_unscheduled_kernel(wrong) > wrong.tolerance()


def test_saved_function_equals_the_scripts(script: str, tmp_path: Path) -> None:
    double = rule("tensor_ir", file=script, function="double").lower()
    for name, saved in (("func", double), ("mod", tvm.IRModule({"double": double.with_attr("global_symbol", "double")}))):
        path = tmp_path / f"{name}.json"
        path.write_text(tvm.ir.save_json(saved))
        instance = rule("tensor_ir", file=str(path))
        assert tvm_ffi.structural_equal(lower(instance), canonical_module(double))
        assert error_of_unscheduled_kernel(instance) == 0


def test_edited_script_is_read_again(script: str) -> None:
    instance = rule("tensor_ir", file=script, function="double")
    assert instance.signature().inputs[0].shape == (5, 3)
    Path(script).write_text(SCRIPT.replace("ROWS = 5", "ROWS = 6"))
    assert instance.signature().inputs[0].shape == (6, 3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("", ["function is not said", "double, output_first, sum_and_difference"]),
        ("treble", ["function treble is not in it", "double, output_first, sum_and_difference"]),
        ("output_first", ["['Y']", "not its last ones"]),
    ],
)
def test_mistakes_in_a_script_are_reported(script: str, function: str, message: Sequence[str]) -> None:
    instance = rule("tensor_ir", file=script, function=function)
    with pytest.raises(ValueError, match=r"kernels\.py") as caught:
        instance.signature()
    for word in message:
        assert word in str(caught.value)
