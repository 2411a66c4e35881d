"""Constant weights of convolutions come in panels where a target has kernels for that, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from support.graphs import TARGET
from support.thinned import at
from tvm import relax

from kerneldecl.compiler.graph.named_constants import constant
from kerneldecl.compiler.graph.places import RULE
from kerneldecl.compiler.graph.rule_use import Fuses
from kerneldecl.compiler.graph.use_rules import UseRules
from kerneldecl.compiler.model_import.fused_kernels import by_policies
from kerneldecl.hardware.host import detect
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch
from kerneldecl.rule import Rule

IMAGE = (2, 6, 5, 8)
Build = Callable[[Any], Any]


def everything(_: Rule) -> bool:
    return True


def module(build: Build, *params: tuple[int, ...]) -> tvm.IRModule:
    given = [relax.Var(f"x{at}", relax.TensorType(shape, "float32")) for at, shape in enumerate(params)]
    builder = relax.BlockBuilder()
    with builder.function("main", given):
        with builder.dataflow():
            y = builder.emit_output(builder.normalize(build(*given)))
        builder.emit_func_output(y)
    return builder.get()


def weights(*shape: int) -> Any:
    return constant(np.random.default_rng(1).standard_normal(shape), "float32", "layer.weight")


def conv2d(x: Any, w: Any, **options: Any) -> Any:
    return relax.op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO", **options)


def rules(mod: tvm.IRModule) -> list[dict[str, Any]]:
    return [json.loads(str(func.attrs[RULE]))["attrs"] for func in mod.functions.values() if func.attrs and RULE in func.attrs]


def result(mod: tvm.IRModule) -> Any:
    machine = relax.VirtualMachine(relax.build(mod, TARGET), tvm.cpu())
    inputs = [
        np.random.default_rng(7).standard_normal([int(extent) for extent in param.ty.shape]).astype("float32")
        for param in mod["main"].params
    ]
    return machine["main"](*map(tvm.runtime.tensor, inputs)).numpy()


def panels_of(build: Build, *params: tuple[int, ...], fuses: Fuses = everything) -> list[int]:
    """Return each convolution's panel, once the module computes the same as before."""
    mod = module(build, *params)
    found = UseRules(fuses)(mod)
    np.testing.assert_allclose(result(found), result(mod), rtol=1e-4, atol=1e-4)
    return [each.get("panel", 0) for each in rules(found)]


@pytest.mark.parametrize(
    ("kernel", "options"),
    [((3, 3, 8, 32), {"padding": 1, "strides": 2}), ((1, 1, 8, 48), {}), ((2, 3, 4, 64), {"groups": 2, "dilation": 2})],
)
def test_constant_weights_are_put_into_panels_once(kernel: tuple[int, ...], options: dict[str, Any]) -> None:
    assert panels_of(lambda x: relax.op.nn.relu(conv2d(x, weights(*kernel), **options)), IMAGE) == [16]


def test_weights_keep_their_name_so_that_the_function_does() -> None:
    found = UseRules(everything)(module(lambda x: conv2d(x, weights(3, 3, 8, 32)), IMAGE))
    assert [var.name_hint for var, func in found.functions_items() if func.attrs and RULE in func.attrs] == ["layer"]


@pytest.mark.parametrize(
    ("kernel", "options", "image"),
    at(
        {0, 2},
        [
            ((3, 3, 8, 24), {}, IMAGE),  # no whole panels
            ((3, 3, 8, 16), {}, IMAGE),  # one panel is no other order
            ((3, 3, 1, 32), {"groups": 32}, (2, 6, 5, 32)),  # each weight of a depthwise convolution meets its own channel
            ((1, 1, 8, 32), {"groups": 4}, (2, 6, 5, 32)),  # a panel would hold several groups
            ((6, 5, 8, 32), {}, IMAGE),  # a pixel of each image
        ],
    ),
)
def test_rows_stay_where_panels_are_of_no_use(kernel: tuple[int, ...], options: dict[str, Any], image: tuple[int, ...]) -> None:
    assert panels_of(lambda x: conv2d(x, weights(*kernel), **options), image) == [0]


def test_rows_stay_where_weights_are_arguments_or_there_is_no_kernel() -> None:
    assert panels_of(conv2d, IMAGE, (3, 3, 8, 32)) == [0]
    assert panels_of(lambda x: conv2d(x, weights(3, 3, 8, 32)), IMAGE, fuses=lambda _: False) == [0]


@pytest.mark.parametrize(("arch", "panel"), [("x86-64-v3", 16), ("host", 16), ("h200", 0), ("a100-80gb", 0), ("rtx-2080-ti", 0)])
def test_cpus_take_panels_and_gpus_rows(arch: str, panel: int) -> None:
    fuses = by_policies(Path(STANDARD), detect() if arch == "host" else load_arch(STANDARD, arch))

    def build(x: Any) -> Any:
        wide = conv2d(x, weights(3, 3, 8, 64), padding=1)
        return conv2d(relax.op.nn.relu(wide), weights(1, 1, 64, 32), strides=2)

    found = UseRules(fuses)(module(build, IMAGE))
    assert {each.get("panel", 0) for each in rules(found)} == {panel}
