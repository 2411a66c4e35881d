"""Products are recognised in TensorIR that others wrote: layouts, batches, convolutions, padding, transposes; what is none is told why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.compilers import needs_nvcc
from support.prim_funcs import (
    GEMMS,
    REFUSED,
    attention_scores,
    behind_a_transpose,
    behind_padding,
    conv2d_nchw,
    conv2d_nhwc,
    integers,
    nn,
    nt_with_other_names_and_loops,
    of_casts_and_an_epilogue,
    of_three,
    padded_conv2d,
    shared_weights,
    tn,
    tt,
)
from support.repository import REPOSITORY
from support.spaces import Space
from support.thinned import at
from tvm import te, topi

from kerneldecl.analysis.contraction import IS_GEMV, Contraction, contraction_of
from kerneldecl.compiler import canonical
from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.compiler.cuda import compile_cuda_object, cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.dlight import CUDA, DefaultPolicy, TensorCorePolicy, get_tensorized_func_and_tags, why_no_tensor_cores
from kerneldecl.plugins.load import load_rule
from kerneldecl.policies.gpu_matmul import tensor_cores
from kerneldecl.store.local import LocalStore


def read(func: Any) -> Contraction:
    found = contraction_of(iter_space(canonical_module(func)))
    assert isinstance(found, Contraction), found
    return found


@pytest.mark.parametrize(
    ("func", "layout", "extents", "dims"),
    [
        (nn, "nn", (1, 96, 80, 128), [0, 1]),
        (nt_with_other_names_and_loops, "nt", (1, 96, 80, 128), [0, 1]),
        (tn, "tn", (1, 96, 80, 128), [0, 1]),
        (tt, "tt", (1, 96, 80, 128), [0, 1]),
        (attention_scores, "nt", (8, 64, 72, 32), [2, 3]),
        (shared_weights, "nn", (1, 96, 48, 64), [1, 2]),
        (conv2d_nhwc, "nn", (1, 512, 64, 288), [2, 3]),
        (conv2d_nchw, "nn", (1, 64, 512, 288), [1, 3]),
        (padded_conv2d, "nn", (1, 128, 64, 288), [2, 3]),
        (behind_a_transpose, "nt", (1, 96, 80, 128), [0, 1]),
        (behind_padding, "nn", (1, 96, 80, 128), [0, 1]),
        (of_casts_and_an_epilogue, "nn", (1, 96, 80, 128), [0, 1]),
        (integers, "nt", (1, 96, 80, 128), [0, 1]),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__name__") else None,
)
def test_products_are_recognised(func: Any, layout: str, extents: tuple[int, ...], dims: list[int]) -> None:
    gemm = read(func)
    assert (gemm.layout, gemm.extents) == (layout, extents)
    assert why_no_tensor_cores(func, "h200") == ""
    same, tags = get_tensorized_func_and_tags(func, "h200")
    assert same is func
    assert tags == {"tensorcore_config": dims, "use_async_copy": 1}


@pytest.mark.parametrize("func", at(range(0, len(GEMMS), 8), GEMMS), ids=lambda func: func.__name__)
def test_both_templates_give_one_kernel_for_a_gemm(func: Any) -> None:
    arch = CUDA("h200")
    policies = (TensorCorePolicy(func, arch), TensorCorePolicy(func, arch, {"use_wgmma": 0}), DefaultPolicy(func, arch))
    for policy, instruction in zip(policies, ("mma", "mma.sync", ""), strict=True):
        # Split-K adds its parts in a second kernel.
        config = next(each for each in policy.emit_config(200) if each.params.get("split_k", 1) == 1)
        applied = apply_candidate(Path(), canonical_module(func), config.candidate, arch.arch)
        assert applied is not None, config
        code = cuda_source(applied.mod, arch.arch, "kd_function")
        assert instruction in code
        assert code.count("__launch_bounds__") == 2, "one declaration and one definition"


@pytest.mark.parametrize("func", REFUSED, ids=lambda func: func.__name__)
def test_what_is_no_product_for_tensor_cores_is_told_why(func: Any) -> None:
    assert why_no_tensor_cores(func, "h200") == REFUSED[func]
    same, tags = get_tensorized_func_and_tags(func, "h200")
    assert same is func
    assert tags is None
    assert DefaultPolicy(func, "h200").emit_config(1)


def test_an_operand_behind_a_transpose_is_read_as_it_is_stored() -> None:
    direct, transposed = read(nt_with_other_names_and_loops).b, read(behind_a_transpose).b
    assert (transposed.is_k_last, transposed.contiguous, transposed.shape) == (True, 128, (80, 128))
    assert (direct.is_k_last, direct.contiguous, direct.shape) == (True, 128, (80, 128))


def test_a_padded_row_may_start_anywhere_and_is_loaded_in_single_elements() -> None:
    gemm = read(behind_padding)
    assert (gemm.a.contiguous, gemm.b.contiguous) == (1, 80)


def test_rows_of_a_window_are_longer_than_what_it_covers() -> None:
    pixels = read(conv2d_nchw).b
    assert not pixels.is_k_last, "16 neighbours along the image, 3 along the window"


GPU_ENTRIES = """\
edition = 1

[artifact]
name = "products"
version = "1.0"

[target.h200]
arch = "h200"

[defaults]
top_k = 1

[[workload]]
name = "half"
rule = "matmul"
m = 64
n = 64
k = 64
dtype = "float16"

[[workload]]
name = "single"
rule = "matmul"
m = 64
n = 64
k = 64

[[workload]]
name = "relu"
rule = "elementwise"
op = "relu"
shape = [64]
"""


@needs_nvcc
@pytest.mark.slow
def test_records_report_tensor_cores_and_show_prints_it(tmp_path: Path) -> None:
    space = Space(tmp_path).write({"workloads.toml": GPU_ENTRIES})
    space.run("build", CUDA_VISIBLE_DEVICES="")
    told = {name: space.run_json("show", name)["tensor_cores"] for name in ("half", "single", "relu")}
    assert told == {"half": "used", "single": "there is no mma.sync of float32 with float32 accumulators", "relu": ""}
    assert "tensor cores: used\n" in space.run("show", "half").stdout
    assert "tensor cores: not used: there is no mma.sync of float32 with float32 accumulators\n" in space.run("show", "single").stdout
    assert "tensor cores" not in space.run("show", "relu").stdout


def test_a_product_whose_candidates_all_failed_is_told_so() -> None:
    arch = CUDA("h200").arch
    space = iter_space(canonical_module(nn))
    assert tensor_cores(space, arch, "gpu_matmul_tc") == "used"
    assert tensor_cores(space, arch, "gpu_matmul_simt") == "no schedule for them that was tried is correct"
    assert tensor_cores(iter_space(canonical_module(of_three)), arch, "gpu_fallback") == REFUSED[of_three]
    assert tensor_cores(iter_space(canonical_module(of_three)), arch, "gpu_gemv_i4") == "used"


UNEVEN = {"n": 4, "h": 9, "w": 9, "c": 64, "f": 32, "kh": 3, "kw": 3, "stride": 2, "padding": 1, "dtype": "float16"}


@pytest.mark.parametrize(
    ("rule", "attrs", "words"),
    [
        ("conv2d_transpose", UNEVEN, " by mma.sync, not wgmma: its stride does not divide the sides of the result"),
        ("conv2d_transpose", UNEVEN | {"extra": 1}, ""),
        ("conv2d_transpose", UNEVEN | {"layout": "nchw"}, " by mma.sync, not wgmma: its channels are not last"),
        ("conv2d", UNEVEN | {"c": 6}, " by mma.sync, not wgmma: its channels are not a multiple of 8, and too few for a k-tile of 64"),
        ("matmul", {"m": 64, "n": 64, "k": 64, "dtype": "float16"}, ""),
    ],
)
def test_what_falls_back_to_mma_sync_is_told_so(rule: str, attrs: dict[str, Any], words: str) -> None:
    space = iter_space(canonical.lower(load_rule(REPOSITORY, rule).of(REPOSITORY, attrs)))
    assert tensor_cores(space, CUDA("h200").arch, "gpu_matmul_tc") == f"used{words}"
    assert tensor_cores(space, CUDA("a100-80gb").arch, "gpu_matmul_tc") == "used"


def operators() -> Iterator[tuple[str, list[int] | None, tuple[Any, ...]]]:
    """Yield products as TVM's own operators compute them, each with the dimensions that m and n index."""

    def given(*shape: int) -> Any:
        return te.placeholder(shape, "float16", "x")

    a, b, q, k = given(64, 128), given(128, 96), given(4, 64, 32), given(4, 48, 32)
    nchw, oihw, nhwc, hwio, grouped = (
        given(2, 32, 28, 28),
        given(64, 32, 3, 3),
        given(2, 28, 28, 32),
        given(3, 3, 32, 64),
        given(64, 8, 3, 3),
    )
    yield "matmul", [0, 1], (a, b, topi.matmul(a, b))
    yield "batch_matmul", [1, 2], (q, k, topi.nn.batch_matmul(q, k))
    yield "conv2d_nchw", [1, 3], (nchw, oihw, topi.nn.conv2d_nchw(nchw, oihw, 1, 1, 1, "float32"))
    yield "conv2d_nhwc", [2, 3], (nhwc, hwio, topi.nn.conv2d_nhwc(nhwc, hwio, 2, 1, 1, "float32"))
    yield "group_conv2d", None, (nchw, grouped, topi.nn.group_conv2d_nchw(nchw, grouped, 1, 1, 1, 4, "float32"))
    yield "softmax", None, (a, topi.nn.softmax(a))


@pytest.mark.parametrize(("dims", "tensors"), [pytest.param(dims, tensors, id=name) for name, dims, tensors in operators()])
def test_tvms_own_operators(dims: list[int] | None, tensors: tuple[Any, ...]) -> None:
    func, tags = get_tensorized_func_and_tags(te.create_prim_func(list(tensors)), "h200")
    assert (tags and tags["tensorcore_config"]) == dims
    assert bool(why_no_tensor_cores(func, "h200")) == (dims is None)


@needs_nvcc
@pytest.mark.parametrize("policy", at({0}, [TensorCorePolicy, DefaultPolicy]), ids=lambda policy: policy.__name__)
def test_8_bit_products_whose_tiles_reach_beyond_the_operands_compile(policy: Any, tmp_path: Path) -> None:
    arch = CUDA("h200")
    for config in policy(integers, arch).emit_config(20)[2::8]:
        applied = apply_candidate(Path(), canonical_module(integers), config.candidate, arch.arch)
        assert applied is not None
        assert compile_cuda_object(applied.mod, arch.arch, "kd_function", LocalStore(tmp_path)).content


@pytest.mark.parametrize("channels", [3, 8])
def test_filters_of_one_image_are_rows_of_no_gemm(channels: int) -> None:
    """Its depthwise convolution has one row, the image, which is no dimension of the filters."""
    sizes = {"n": 1, "h": 8, "w": 8, "c": channels, "f": channels, "groups": channels, "kh": 3, "kw": 3}
    assert contraction_of(iter_space(canonical.lower(load_rule(REPOSITORY, "conv2d").of(REPOSITORY, sizes)))) == IS_GEMV
    one_row = {"batch": channels, "m": 1, "n": 36, "k": 9}
    found = contraction_of(iter_space(canonical.lower(load_rule(REPOSITORY, "matmul").of(REPOSITORY, one_row))))
    assert isinstance(found, Contraction)
    assert found.extents == (channels, 1, 36, 9)
