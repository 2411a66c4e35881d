"""Each graph pass keeps what a module computes, and gives the form that rules have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from support.graphs import TARGET, random
from support.thinned import at
from tvm import relax

from kerneldecl.compiler.dynamic_shapes import callees
from kerneldecl.compiler.graph.adaptive_pooling import ExpandAdaptivePooling
from kerneldecl.compiler.graph.batch_norm import FoldBatchNorm
from kerneldecl.compiler.graph.channels_last import ChannelsLast
from kerneldecl.compiler.graph.constants import FoldConstants
from kerneldecl.compiler.graph.convolutions import MergePadding, SplitPadding
from kerneldecl.compiler.graph.elementwise import OrderOperands, SeparateGates, SimplifyClips, VectorBiases
from kerneldecl.compiler.graph.empty_tensors import EmptyTensors
from kerneldecl.compiler.graph.instance_norms import InstanceNorms
from kerneldecl.compiler.graph.pipeline import GRAPH_PASSES
from kerneldecl.compiler.graph.places import RULE, rule_of
from kerneldecl.compiler.graph.shapes import SimplifyShapes
from kerneldecl.compiler.graph.use_rules import UseRules
from kerneldecl.compiler.model_import.read_model import fused

nn = relax.op.nn
IMAGE = (2, 6, 9, 8)


def module(build: Callable[[relax.BlockBuilder, Any], Any], shape: Sequence[Any] = IMAGE) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(build(builder, x))
        builder.emit_func_output(y)
    return builder.get()


def result(mod: tvm.IRModule, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    machine = relax.VirtualMachine(relax.build(mod, TARGET), tvm.cpu())
    found: np.ndarray[Any, Any] = machine["main"](tvm.runtime.tensor(x)).numpy()
    return found


def operators(mod: tvm.IRModule) -> Counter[str]:
    found: Counter[str] = Counter()

    def note(expr: Any) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
            found[str(expr.op.name).removeprefix("relax.").removeprefix("nn.")] += 1

    relax.analysis.post_order_visit(mod["main"], note)
    return found


def after(mod: tvm.IRModule, *passes: Any, shape: Sequence[int] = IMAGE) -> Counter[str]:
    """Return the operators of the module after some passes, which compute what it computed before."""
    x = np.random.default_rng(1).standard_normal(shape).astype("float32")
    before, rewritten = result(mod, x), tvm.transform.Sequential(list(passes))(mod)
    np.testing.assert_allclose(result(rewritten, x), before, rtol=1e-4, atol=1e-4)
    return operators(rewritten)


def batch_norm(builder: relax.BlockBuilder, x: Any, channels: int, **attrs: Any) -> Any:
    given = {"axis": 1, "training": False, **attrs}
    return builder.emit(nn.batch_norm(x, *(random(channels, seed=seed) for seed in range(4)), **given))


def test_a_batch_norm_goes_into_the_weights_and_the_bias_before_it() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        biased = builder.emit(relax.op.add(builder.emit(nn.conv2d(x, random(4, 6, 3, 3), padding=1)), random(1, 4, 1, 1)))
        return relax.TupleGetItem(batch_norm(builder, biased, 4), 0)

    assert after(module(build), FoldBatchNorm()) == {"conv2d": 1, "add": 1}


@pytest.mark.slow
def test_a_batch_norm_of_a_convolution_that_others_read_leaves_it_as_it_is() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        convolved = builder.emit(nn.conv2d(x, random(6, 6, 1, 1)))
        norm = builder.emit(relax.TupleGetItem(batch_norm(builder, convolved, 6), 0))
        return relax.op.multiply(norm, convolved)

    assert after(module(build), FoldBatchNorm()) == {"conv2d": 1, "add": 1, "multiply": 2}


def test_a_batch_norm_of_an_input_is_a_scale_and_a_shift() -> None:
    assert after(module(lambda builder, x: relax.TupleGetItem(batch_norm(builder, x, 6), 0)), FoldBatchNorm()) == {"add": 1, "multiply": 1}


def test_a_batch_norm_in_training_stays() -> None:
    mod = module(lambda builder, x: relax.TupleGetItem(batch_norm(builder, x, 6, training=True), 0))
    assert operators(FoldBatchNorm()(mod)) == {"batch_norm": 1}


@pytest.mark.parametrize(
    ("widths", "own", "found"),
    at(
        {0},
        [
            ([0, 0, 0, 0, 1, 1, 1, 1], 0, {"conv2d": 1}),
            ([0, 0, 0, 0, 0, 1, 0, 1], 0, {"conv2d": 1, "pad": 1}),
            ([0, 0, 0, 0, 0, 1, 0, 1], (1, 1, 0, 0), {"conv2d": 1}),
            ([0, 0, 0, 2, 1, 1, 1, 1], 0, {"conv2d": 1, "pad": 1}),
        ],
    ),
    ids=["of all sides", "of two sides", "of the other two sides", "of channels, too"],
)
def test_padding_is_part_of_a_convolution_that_has_it_on_all_sides(widths: list[int], own: Any, found: dict[str, int]) -> None:
    channels = IMAGE[1] + sum(widths[2:4])

    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        return nn.conv2d(builder.emit(nn.pad(x, widths)), random(4, channels, 3, 3), strides=2, padding=own)

    assert after(module(build), MergePadding(), SplitPadding()) == found


def test_padding_with_ones_is_no_padding_of_a_convolution() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        return nn.conv2d(builder.emit(nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], pad_value=1.0)), random(4, 6, 3, 3))

    assert after(module(build), MergePadding()) == {"conv2d": 1, "pad": 1}


def test_clips_are_bounds_whose_layout_follows_the_convolutions() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        convolved = builder.emit(nn.conv2d(x, random(6, 6, 1, 1)))
        clipped = builder.emit(relax.op.clip(convolved, 0, 6))
        return nn.conv2d(builder.emit(relax.op.clip(clipped, 1, float("inf"))), random(6, 6, 1, 1))

    found = after(module(build), SimplifyClips(), ChannelsLast(), FoldConstants())
    assert found == {"conv2d": 2, "relu": 1, "minimum": 1, "maximum": 1, "permute_dims": 2}


def test_bounds_that_the_importer_lowered_are_operators_again() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        at_least = builder.emit_te(tvm.topi.maximum, x, relax.const(0.0, "float32"))
        return builder.emit_te(tvm.topi.minimum, at_least, relax.const(6.0, "float32"))

    assert after(module(build), SimplifyClips()) == {"relu": 1, "minimum": 1}


def test_a_maximum_of_two_tensors_is_no_bound() -> None:
    mod = module(lambda builder, x: builder.emit_te(tvm.topi.maximum, x, random(8)))
    assert after(mod, SimplifyClips()) == {"call_tir": 1}


def test_what_accumulates_is_the_first_operand_and_constants_the_last() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        biased = builder.emit(relax.op.add(random(1, 6, 1, 1), builder.emit(nn.conv2d(x, random(6, 6, 1, 1)))))
        return relax.op.add(x, biased)

    mod = module(build)
    assert after(mod, OrderOperands()) == {"conv2d": 1, "add": 2}
    block = OrderOperands()(mod)["main"].body.blocks[0]
    bias, residual = (binding.value for binding in block.bindings[-2:])
    assert isinstance(bias.args[1], tvm.ir.GenericConst)
    assert residual.args[1].same_as(mod["main"].params[0]) or residual.args[1].name_hint == "x"


def test_a_gate_is_no_part_of_what_it_scales() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        gate = builder.emit(relax.op.sigmoid(builder.emit(relax.op.mean(x, [2, 3], keepdims=True))))
        return relax.op.multiply(x, gate)

    assert after(module(build), SeparateGates()) == {"mean": 1, "sigmoid": 1, "reshape": 1, "multiply": 1}


def test_a_permutation_of_ones_is_a_view_and_global_pooling_a_mean() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        pooled = builder.emit(nn.adaptive_avg_pool2d(x, 1, layout="NCHW"))
        return relax.op.reshape(builder.emit(relax.op.permute_dims(pooled, [0, 2, 3, 1])), (2, 6))

    assert after(module(build), SimplifyShapes()) == {"mean": 1, "reshape": 1}


@pytest.mark.parametrize("operator", ["sum", "mean", "max", "min", "prod"])
def test_a_reduction_of_one_element_is_a_view(operator: str) -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        one = builder.emit(getattr(relax.op, operator)(x, [0, 2]))
        return relax.op.nn.relu(one)

    assert after(module(build, (1, 6, 1, 5)), SimplifyShapes(), shape=(1, 6, 1, 5)) == {"reshape": 1, "relu": 1}


def test_a_reduction_of_several_elements_stays() -> None:
    assert after(module(lambda _, x: relax.op.sum(x, [0, 1]), (1, 6, 5)), SimplifyShapes(), shape=(1, 6, 5)) == {"sum": 1}


def test_pooling_to_more_than_a_pixel_stays() -> None:
    assert after(module(lambda _, x: nn.adaptive_avg_pool2d(x, (3, 4))), SimplifyShapes()) == {"adaptive_avg_pool2d": 1}


def test_constants_are_folded_unless_they_grow() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        moved = builder.emit(relax.op.permute_dims(builder.emit(relax.op.multiply(random(8, 9), relax.const(2.0, "float32")))))
        outer = builder.emit(relax.op.multiply(random(512, 1), random(1, 512)))
        return relax.op.add(relax.op.add(x, moved), builder.emit(relax.op.sum(outer)))

    found = after(module(build), FoldConstants())
    assert found == {"add": 2, "multiply": 1, "sum": 1}, "2 KiB became no constant of 1 MiB"


def test_a_bias_is_a_vector() -> None:
    found = VectorBiases()(module(lambda _, x: relax.op.add(x, random(1, 1, 1, 8))))
    (bias,) = (binding.value.args[1] for binding in found["main"].body.blocks[0].bindings)
    assert bias.value.numpy().shape == (8,)


def network(builder: relax.BlockBuilder, x: Any) -> Any:
    """Two convolutions with a batch norm, a residual and a clip, a gate and a classifier, channels first."""
    first = builder.emit(relax.TupleGetItem(batch_norm(builder, builder.emit(nn.conv2d(x, random(6, 6, 3, 3), padding=1)), 6), 0))
    hidden = builder.emit(relax.op.clip(first, 0, 6))
    second = builder.emit(nn.conv2d(hidden, random(6, 1, 3, 3), padding=1, groups=6))
    gate = builder.emit(relax.op.sigmoid(builder.emit(nn.conv2d(builder.emit(nn.adaptive_avg_pool2d(second, 1)), random(6, 6, 1, 1)))))
    gated = builder.emit(relax.op.multiply(gate, second))
    pooled = builder.emit(relax.op.mean(builder.emit(relax.op.add(hidden, gated)), [2, 3]))
    return relax.op.add(random(5), builder.emit(relax.op.matmul(pooled, builder.emit(relax.op.permute_dims(random(5, 6))))))


def transposes(build: Callable[[relax.BlockBuilder, Any], Any]) -> int:
    """Return how often all passes transpose, by an operator or by a call of rule transpose; they keep what the module computes."""
    left = after(module(build), *GRAPH_PASSES)
    assert "batch_norm" not in left
    rewritten = tvm.transform.Sequential(list(GRAPH_PASSES))(module(build))
    by_rule = {var.name_hint for var, func in rewritten.functions_items() if (rule_of(func) or ("",))[0] == "transpose"}
    return left["permute_dims"] + sum(name in by_rule for name in callees(rewritten["main"]))


def test_all_passes_leave_one_transpose_of_the_image() -> None:
    assert transposes(network) == 1


def test_an_image_that_two_convolutions_read_is_transposed_once() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        first, second = (builder.emit(nn.conv2d(x, random(4, 6, size, size), padding=size // 2)) for size in (1, 3))
        return relax.op.sum(builder.emit(relax.op.multiply(first, second)), [1, 2, 3])

    assert transposes(build) == 1


@pytest.mark.slow
def test_a_module_of_any_number_of_images_is_rewritten_as_well() -> None:
    images = tvm.tirx.Var("n", "int64")
    found = after(module(network, (images, *IMAGE[1:])), *GRAPH_PASSES)
    assert "batch_norm" not in found
    assert found["conv2d"] == 3


def test_a_module_without_convolutions_keeps_its_layout() -> None:
    mod = module(lambda _, x: relax.op.mean(x, [2, 3]))
    assert after(mod, *GRAPH_PASSES) == {"mean": 1}


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [(relax.op.sum, 0), (relax.op.prod, 1), (relax.op.max, -np.inf), (relax.op.min, np.inf), (relax.op.mean, np.nan)],
)
def test_a_reduction_over_nothing_has_its_value(reduce: Callable[..., Any], expected: float) -> None:
    mod = EmptyTensors()(module(lambda _, x: reduce(x, [1], keepdims=True), (2, 0, 3)))
    assert operators(mod) == {}
    np.testing.assert_array_equal(result(mod, np.zeros((2, 0, 3), "float32")), np.full((2, 1, 3), expected, "float32"))


def test_a_gemm_over_nothing_is_zero_and_one_of_no_rows_stays() -> None:
    assert operators(EmptyTensors()(module(lambda _, x: relax.op.matmul(x, random(0, 4)), (2, 0)))) == {}
    assert operators(EmptyTensors()(module(lambda _, x: relax.op.matmul(x, random(5, 4)), (0, 5)))) == {"matmul": 1}


@pytest.mark.parametrize(("parts", "left"), [((2, 0), {}), ((0, 2, 0, 1), {"concat": 1}), ((0, 0), {"concat": 1})])
def test_a_concatenation_leaves_out_what_has_no_elements(parts: Sequence[int], left: dict[str, int]) -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        sliced = [builder.emit(relax.op.strided_slice(x, [1], [0], [extent])) for extent in parts]
        return builder.emit(relax.op.concat(sliced, 1))

    mod = module(build, (3, 4))
    after = EmptyTensors()(mod)
    assert {name: count for name, count in operators(after).items() if name == "concat"} == left
    x = np.arange(12, dtype="float32").reshape(3, 4)
    if any(parts):
        np.testing.assert_array_equal(result(after, x), result(mod, x))


@pytest.mark.parametrize(
    ("shape", "size", "layout"), [((2, 3, 1, 1), 7, "NCHW"), ((1, 13, 10, 4), (6, 5), "NHWC"), ((1, 2, 9, 9), (3, 3), "NCHW")]
)
def test_adaptive_pooling_is_torchs_for_windows_of_any_sizes(shape: Sequence[int], size: Any, layout: str) -> None:
    torch = pytest.importorskip("torch", reason="compared with torch")
    mod = module(lambda builder, x: builder.emit(relax.op.nn.adaptive_avg_pool2d(x, size, layout)), shape)
    after = ExpandAdaptivePooling()(mod)
    assert operators(after)["adaptive_avg_pool2d"] == (shape == (1, 2, 9, 9)), "windows of one size stay"
    x = np.random.default_rng(3).standard_normal(shape).astype("float32")
    images = torch.from_numpy(x if layout == "NCHW" else x.transpose(0, 3, 1, 2).copy())
    expected = torch.nn.functional.adaptive_avg_pool2d(images, size).numpy()
    np.testing.assert_allclose(result(after, x), expected if layout == "NCHW" else expected.transpose(0, 2, 3, 1), rtol=1e-5, atol=1e-6)


def test_a_length_that_the_model_computes_is_there_before_what_has_it() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        count = builder.emit(relax.op.astype(builder.emit(relax.op.max(x, [0], keepdims=True)), "int64"))
        extent = tvm.tirx.Var("n", "int64")
        builder.match_cast(builder.emit(relax.op.tensor_to_shape(count)), relax.ShapeType([extent]))
        places = builder.emit(relax.op.astype(builder.emit(relax.op.arange(0, extent, 1, "int64")), "float32"))
        return relax.op.multiply(places, builder.emit(relax.op.sum(x)))

    x = np.array([1, 4, 2], "float32")
    np.testing.assert_array_equal(result(fused(module(build, (3,)), TARGET), x), np.arange(4, dtype="float32") * 7)


def rules(mod: tvm.IRModule) -> list[dict[str, Any]]:
    """Return the attributes of the rules that a module's functions are made of."""
    found = (json.loads(str(func.attrs[RULE])) for func in mod.functions.values() if RULE in (func.attrs or {}))
    return [each["attrs"] for each in found]


@pytest.mark.parametrize(("shape", "channel"), at({0}, [((2, 6, 9, 8), 1), ((2, 9, 8, 6), 3), ((3, 6, 11), 1), ((1, 6, 2, 3, 4), 1)]))
def test_a_group_norm_and_its_activation_are_one_function(shape: tuple[int, ...], channel: int) -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        axes = [axis for axis in range(1, len(shape)) if axis != channel]
        return nn.relu(builder.emit(nn.group_norm(x, random(6), random(6, seed=1), 3, channel, axes, 1e-3)))

    norm = module(build, shape)
    assert after(norm, UseRules(), shape=shape) == {"call_tir": 1}
    axis = {} if channel == 1 else {"axis": -1}
    assert rules(UseRules()(norm)) == [{"shape": list(shape), "groups": 3, "eps": pytest.approx(1e-3), "activation": "relu", **axis}]


def test_a_group_norm_of_16_bits_that_is_computed_in_32_is_one_of_16() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        half = builder.emit(relax.op.astype(x, "float16"))
        wide = builder.emit(relax.op.astype(half, "float32"))
        weights = (relax.const(np.full(6, value, "float32")) for value in (1.5, 0.25))
        norm = builder.emit(nn.group_norm(wide, *weights, 2, 1, [2, 3]))
        return relax.op.astype(builder.emit(nn.silu(norm)), "float16")

    (attrs,) = rules(UseRules()(module(build)))
    assert (attrs["dtype"], attrs["activation"], attrs["groups"]) == ("float16", "silu", 2)
    finer = module(lambda _, x: nn.group_norm(x, relax.const(np.full(6, 1 / 3, "float32")), random(6), 2, 1, [2, 3]))
    assert rules(UseRules()(finer))[0].get("dtype", "float32") == "float32"


def test_an_instance_norm_is_one_of_a_channel_each_also_over_the_axis_of_one_image() -> None:
    for axes in ([2, 3], [0, 2, 3]):
        norm = module(lambda _, x, axes=axes: nn.instance_norm(x, random(6), random(6, seed=1), 1, axes), (1, 6, 9, 8))
        assert after(norm, UseRules(), shape=(1, 6, 9, 8)) == {"call_tir": 1}
        assert rules(UseRules()(norm))[0]["groups"] == 6


@pytest.mark.parametrize(("images", "axes"), [(2, [0, 2, 3]), (2, [2]), ("n", [2, 3])])
def test_norms_over_other_axes_and_of_any_number_of_images_stay(images: Any, axes: list[int]) -> None:
    images = tvm.tirx.Var("n", "int64") if images == "n" else images
    norm = module(lambda _, x: nn.instance_norm(x, random(6), random(6, seed=1), 1, axes), (images, 6, 9, 8))
    assert operators(UseRules()(norm)) == {"instance_norm": 1}


def joined_norm(repeated: Any) -> tvm.IRModule:
    """Return an instance norm of two images as torch writes it: of one that has the channels of both."""

    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        flat = builder.emit(relax.op.reshape(x, (1, 12, 9, 8)))
        weights = [builder.emit(repeated(random(6, seed=seed))) for seed in (0, 1)]
        return relax.op.reshape(builder.emit(nn.instance_norm(flat, *weights, 1, [0, 2, 3])), IMAGE)

    return module(build)


def test_an_instance_norm_has_the_shape_of_its_images() -> None:
    assert after(joined_norm(lambda weight: relax.op.tile(weight, [2])), InstanceNorms()) == {"instance_norm": 1}
    own = relax.op.concat(relax.Tuple([random(6), random(6, seed=9)]))
    assert operators(InstanceNorms()(joined_norm(lambda _: own)))["reshape"] == 2


def test_a_norm_before_the_first_convolution_has_its_layout() -> None:
    """So a residual block transposes its image once, for the norm and for what is added to its result."""

    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        norm = builder.emit(nn.silu(builder.emit(nn.group_norm(x, random(6), random(6, seed=1), 2, 1, [2, 3]))))
        return relax.op.add(x, builder.emit(nn.conv2d(norm, random(6, 6, 3, 3), padding=1)))

    found = after(module(build), ChannelsLast(), relax.transform.EliminateCommonSubexpr(), FoldConstants())
    assert found == {"permute_dims": 2, "conv2d": 1, "group_norm": 1, "silu": 1, "add": 1}


def test_group_norms_between_convolutions_have_their_layout() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        first = builder.emit(nn.conv2d(x, random(6, 6, 3, 3), padding=1))
        norm = builder.emit(nn.silu(builder.emit(nn.group_norm(first, random(6), random(6, seed=1), 2, 1, [2, 3]))))
        return nn.conv2d(norm, random(4, 6, 1, 1))

    transposes = 4  # of the image, of two weights, and of the result
    assert after(module(build), ChannelsLast()) == {"permute_dims": transposes, "conv2d": 2, "group_norm": 1, "silu": 1}


def test_a_gemm_of_a_vector_that_is_a_view_and_one_of_two_batch_axes_stay() -> None:
    vector = module(lambda builder, x: relax.op.matmul(builder.emit(relax.op.reshape(x, (72,))), random(72, 5)), (9, 8))
    assert after(vector, *GRAPH_PASSES, shape=(9, 8))
    heads = module(lambda builder, x: relax.op.matmul(builder.emit(relax.op.permute_dims(x, [0, 2, 1, 3])), random(8, 5)))
    assert after(heads, *GRAPH_PASSES)


def test_an_empty_slice_of_a_view_stays() -> None:
    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        moved = builder.emit(relax.op.permute_dims(x, [0, 2, 1, 3]))
        nothing = builder.emit(relax.op.strided_slice(moved, [3], [8], [8]))
        return relax.op.concat([builder.emit(nn.relu(moved)), nothing], 3)

    assert after(module(build), *GRAPH_PASSES)
