"""Products are recognised in TensorIR that others wrote: layouts, batches, convolutions, padding, transposes; what is none is told why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from products import (
    PRODUCTS,
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
    padded_conv2d,
    shared_weights,
    tn,
    tt,
)

from kerneldecl.compiler.codegen import apply_candidate
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.space import iter_space
from kerneldecl.compiler.tensorir import canonical_module
from kerneldecl.contraction import Contraction, contraction_of
from kerneldecl.dlight import CUDA, DefaultPolicy, TensorCorePolicy, get_tensorized_func_and_tags, why_no_tensor_cores


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
    product = read(func)
    assert (product.layout, product.extents) == (layout, extents)
    assert why_no_tensor_cores(func, "h200") == ""
    same, tags = get_tensorized_func_and_tags(func, "h200")
    assert same is func
    assert tags == {"tensorcore_config": dims, "use_async_copy": 1}


@pytest.mark.parametrize("func", PRODUCTS, ids=lambda func: func.__name__)
def test_both_templates_make_one_kernel_of_a_product(func: Any) -> None:
    arch = CUDA("h200")
    for policy, instruction in ((TensorCorePolicy, "mma.sync"), (DefaultPolicy, "")):
        config = policy(func, arch).emit_config(1)[0]
        schedule = apply_candidate(Path(), canonical_module(func), config.candidate, arch.arch)
        assert schedule is not None, config
        code = cuda_source(schedule.mod, arch.arch, "kd_function")
        assert instruction in code
        assert code.count("__launch_bounds__") == 2, "one declaration and one definition"


@pytest.mark.parametrize("func", REFUSED, ids=lambda func: func.__name__)
def test_what_is_no_product_for_tensor_cores_is_told_why(func: Any) -> None:
    assert why_no_tensor_cores(func, "h200") == REFUSED[func]
    same, tags = get_tensorized_func_and_tags(func, "h200")
    assert same is func
    assert tags is None
    assert DefaultPolicy(func, "h200").emit_config(1)


def test_a_factor_behind_a_transpose_is_read_as_it_is_stored() -> None:
    stored, turned = read(nt_with_other_names_and_loops).right, read(behind_a_transpose).right
    assert (turned.is_k_last, turned.run, turned.shape) == (stored.is_k_last, stored.run, stored.shape) == (True, 128, (80, 128))


def test_a_padded_row_may_start_anywhere_and_is_loaded_in_single_elements() -> None:
    product = read(behind_padding)
    assert (product.left.run, product.right.run) == (1, 80)


def test_rows_of_a_window_are_longer_than_what_it_covers() -> None:
    pixels = read(conv2d_nchw).right
    assert not pixels.is_k_last, "16 neighbours along the image, 3 along the window"
