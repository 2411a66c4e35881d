"""Convolutions on wgmma: right results of every kind on the emulated GPU, no spills, and None for what they do not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from emulation import emulate, host
from support.compilers import compiled_cubin, needs_nvcc
from support.emulated_kernel import error
from support.thinned import at
from support.wgmma_cases import CONV_PARAMS, CONVOLUTIONS, PINGPONG, SMALL
from tvm import te, topi

import kerneldecl
from kerneldecl.arrays import relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import wgmma_conv2d as policy
from kerneldecl.templates import wgmma_conv2d
from kerneldecl.toolchain import nvcc

ROOT = Path(kerneldecl.__file__).parent.parent
H200 = load_arch(ROOT, "h200")


def rule_of(attrs: dict[str, Any]) -> Any:
    return load_rule(ROOT, "conv2d").of(ROOT, attrs)


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({29}, CONVOLUTIONS))
def test_right_results(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert error(wgmma_conv2d, rule_of(attrs), CONV_PARAMS | params, H200) <= 1


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize(
    "params", at({1}, [{}, {"block_m": 256, "block_n": 128}, PINGPONG | {"block_m": 128, "block_n": 128, "stages": 5}])
)
def test_registers_suffice(params: dict[str, Any]) -> None:
    attrs = SMALL | {"n": 128, "h": 28, "w": 28, "c": 128, "f": 128, "epilogue": ("bias", "relu")}
    mod = wgmma_conv2d.apply(canonical.lower(rule_of(attrs)), CONV_PARAMS | params, H200)
    assert mod is not None
    source = host.lower(mod["main"]).source
    assert "wgmma.mma_async.sync.aligned.m64n" in source
    [usage] = compiled_cubin(source, "sm_90a", nvcc.FAST_MATH_FLAGS).usage.values()
    assert usage.spill_bytes == 0


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"c": 3}, {}),
        ({"c": 12}, {}),
        ({"f": 36}, {}),
        ({}, {"pack": 1}),
        ({"groups": 2}, {}),
        ({"dtype": "int8"}, {}),
        ({"stride": 9, "h": 64, "w": 64}, {}),
        ({}, {"tile_w": 3}),
        ({}, {"tile_w": 16, "tile_h": 16}),
        ({}, {"block_n": 60}),
        ({"f": 128}, {"cluster_m": 2}),
    ],
)
def test_none_where_it_does_not_apply(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(SMALL | attrs))
    assert wgmma_conv2d.apply(mod, CONV_PARAMS | params, H200) is None


def convolution(pad_value: float = 0.0, weights: str = "hwio", before: int = 1, after: int = 1, channels: int = 64) -> tvm.IRModule:
    """Return a 3 x 3 convolution of 4 images of 8 x 8 with padding, weights with contiguous filters (hwio) or channels (ohwi)."""
    x = te.placeholder((4, 8, 8, channels), "float16", "X")
    w = te.placeholder((3, 3, channels, 64) if weights == "hwio" else (64, 3, 3, channels), "float16", "W")
    padded = topi.nn.pad(x, [0, before, before, 0], [0, after, after, 0], pad_value, name="padded")
    r, s, c = te.reduce_axis((0, 3), "r"), te.reduce_axis((0, 3), "s"), te.reduce_axis((0, channels), "c")

    def element(n: Any, i: Any, j: Any, f: Any) -> Any:
        operand = w(r, s, c, f) if weights == "hwio" else w(f, r, s, c)
        return te.sum(padded(n, i + r, j + s, c).astype("float32") * operand.astype("float32"), axis=[r, s, c])

    side = 8 + before + after - 2
    accum = te.compute((4, side, side, 64), element, name="accum")
    y = te.compute(accum.shape, lambda *i: accum(*i).astype("float16"), name="Y")
    return tvm.IRModule({"main": te.create_prim_func([x, w, y])})


@needs_nvcc
@pytest.mark.parametrize(
    ("weights", "before", "after", "channels"), at({0}, [("hwio", 2, 0, 64), ("ohwi", 1, 1, 64), ("ohwi", 0, 2, 64), ("ohwi", 1, 1, 75)])
)
def test_other_paddings_and_weights_are_recognised(weights: str, before: int, after: int, channels: int) -> None:
    params = CONV_PARAMS | {"pack": int(channels % 8 > 0)}
    mod = wgmma_conv2d.apply(convolution(weights=weights, before=before, after=after, channels=channels), params, H200)
    assert mod is not None
    random = np.random.default_rng(0)
    x = random.standard_normal((4, 8, 8, channels)).astype(np.float16)
    w = random.standard_normal((3, 3, channels, 64)).astype(np.float16)
    padded = np.pad(x.astype(np.float32), ((0, 0), (before, after), (before, after), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    want = np.einsum("nijcrs,rscf->nijf", windows, w.astype(np.float32))
    given = w if weights == "hwio" else np.ascontiguousarray(w.transpose(3, 0, 1, 2))
    *_, got = emulate(mod["main"], x, given, np.empty(want.shape, np.float16))
    assert relative_error(got, want) < 2e-3


def test_padding_with_other_values_is_not_taken() -> None:
    assert wgmma_conv2d.apply(convolution(pad_value=1.0), CONV_PARAMS, H200) is None


@pytest.mark.parametrize(
    "attrs",
    at(
        {3},
        [
            {},
            {"n": 128, "h": 7, "w": 7, "c": 512, "f": 512, "epilogue": ("bias", "add", "relu")},
            {"n": 128, "h": 56, "w": 56, "c": 256, "f": 512, "kh": 1, "kw": 1, "stride": 2, "padding": 0},
            {"n": 1, "h": 56, "w": 57, "c": 24, "f": 200},
            {"n": 5, "out_dtype": "float32", "f": 8},
        ],
    ),
)
def test_the_policys_proposals_apply(attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(SMALL | attrs))
    proposals = policy.propose(iter_space(mod), H200, 8)
    assert proposals
    for proposal in proposals:
        assert wgmma_conv2d.apply(mod, dict(proposal.candidate.params), H200) is not None, proposal.candidate
