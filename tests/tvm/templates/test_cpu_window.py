"""Reductions over windows on CPUs: register tiles compute what NumPy does; convolutions with channels last stay with `cpu_conv2d`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from numpy.lib.stride_tricks import sliding_window_view
from support.relax_functions import model
from tvm import relax
from tvm.relax import op

from kerneldecl.arrays import relative_error
from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.compiler.cpu import PIPELINE, target_of
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.hardware import host
from kerneldecl.model import Arch
from kerneldecl.policies import cpu_conv2d, cpu_window
from kerneldecl.templates import cpu_window as template

RNG = np.random.default_rng(4)
X = RNG.standard_normal((2, 8, 12, 14)).astype("float32")
LAST = np.ascontiguousarray(X.transpose(0, 2, 3, 1))
DEPTHWISE = RNG.standard_normal((8, 1, 3, 3)).astype("float32")
WEIGHTS = RNG.standard_normal((6, 8, 3, 3)).astype("float32")


def windows(x: Any, fill: float) -> Any:
    """Return the 3x3 windows of images with channels first, padded by 1: [n, c, h, w, 3, 3]."""
    return sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=fill), (3, 3), axis=(2, 3))


def last(x: Any) -> Any:
    return x.transpose(0, 2, 3, 1)


OF_EACH = np.einsum("nchwij,cij->nchw", windows(X, 0), DEPTHWISE[:, 0])
CASES: dict[str, tuple[Callable[..., Any], list[Any], Any]] = {
    "max_pool": (lambda _, x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1, 1, 1)), [X], windows(X, -np.inf).max((-1, -2))[:, :, ::2, ::2]),
    "max_pool_last": (
        lambda _, x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1, 1, 1), layout="NHWC"),
        [LAST],
        last(windows(X, -np.inf).max((-1, -2))[:, :, ::2, ::2]),
    ),
    "average_pool": (
        lambda _, x: op.nn.avg_pool2d(x, (3, 3), padding=(1, 1, 1, 1), count_include_pad=True),
        [X],
        windows(X, 0).mean((-1, -2)),
    ),
    "depthwise": (lambda _, x, w: op.nn.relu(op.nn.conv2d(x, w, padding=1, groups=8)), [X, DEPTHWISE], np.maximum(OF_EACH, 0)),
    "depthwise_last": (
        lambda _, x, w: op.nn.conv2d(x, w, padding=1, groups=8, data_layout="NHWC", kernel_layout="HWIO"),
        [LAST, np.ascontiguousarray(DEPTHWISE.transpose(2, 3, 1, 0))],
        last(OF_EACH),
    ),
    "channels_first": (lambda _, x, w: op.nn.conv2d(x, w, padding=1), [X, WEIGHTS], np.einsum("nchwij,fcij->nfhw", windows(X, 0), WEIGHTS)),
}


def lowered(build: Callable[..., Any], inputs: list[Any]) -> tvm.IRModule:
    """Return the function of a model as its operators are, without the passes that would make its images channels last."""
    fuse = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern(), relax.transform.FuseOps(), relax.transform.FuseTIR()]
    mod = tvm.transform.Sequential(fuse)(model("window", build, inputs, []).module)
    (func,) = (func for func in mod.functions.values() if isinstance(func, tvm.tirx.PrimFunc))
    return canonical_module(func)


@pytest.fixture(scope="module")
def arch() -> Arch:
    return host.detect()


@pytest.mark.parametrize("case", CASES)
def test_register_tiles_compute_what_numpy_does(case: str, arch: Arch) -> None:
    build, inputs, want = CASES[case]
    mod = lowered(build, inputs)
    proposals = cpu_window.propose(iter_space(mod), arch, 1000)
    assert {dict(each.candidate.params)["pad_at"] for each in proposals} == ({"inline", "task"} if "last" in case else {"task"})
    for each in proposals[:: max(1, len(proposals) // 2)]:  # the best, the worst, and some between
        scheduled = template.apply(mod, dict(each.candidate.params), arch)
        assert scheduled is not None, each
        out = tvm.runtime.tensor(np.full(want.shape, np.nan, "float32"))
        tvm.compile(scheduled.mod, target=target_of(arch), tir_pipeline=PIPELINE)["main"](*map(tvm.runtime.tensor, inputs), out)
        assert relative_error(out.numpy(), want) < 1e-5, each


def test_convolutions_that_reduce_channels_which_lie_together_are_not_windows(arch: Arch) -> None:
    weights = np.ascontiguousarray(WEIGHTS.transpose(2, 3, 1, 0))
    build = lambda _, x, w: op.nn.conv2d(x, w, padding=1, data_layout="NHWC", kernel_layout="HWIO")  # noqa: E731
    space = iter_space(lowered(build, [LAST, weights]))
    assert not cpu_window.propose(space, arch, 4)
    assert cpu_conv2d.propose(space, arch, 4)


def test_a_transposed_convolution_is_left_to_others(arch: Arch) -> None:
    weights = RNG.standard_normal((8, 4, 4, 4)).astype("float32")
    mod = lowered(lambda _, x, w: op.nn.conv2d_transpose(x, w, strides=(2, 2)), [X, weights])
    assert not cpu_window.propose(iter_space(mod), arch, 4)
