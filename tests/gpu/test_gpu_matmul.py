"""GEMMs on a GPU compute what the rule's reference computes: layouts, dtypes, odd sizes, epilogues, both templates."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from support.gpu_kernels import Case, Checked, given, proposed

pytestmark = pytest.mark.gpu

TENSOR_CORES, CUDA_CORES = proposed("gpu_matmul_tc", step=10), proposed("gpu_matmul_simt", step=10)
BOTH = {"tensor cores": TENSOR_CORES, "CUDA cores": CUDA_CORES}
LAYOUTS = ("nn", "nt", "tn", "tt")
SIZES = [(256, 256, 256), (1000, 1003, 517), (16, 512, 1024), (129, 66, 40), (17, 31, 16), (64, 192, 72)]
EPILOGUES = [["bias"], ["bias", "relu"], ["gelu"], ["bias", "silu", "add"], ["bias", "relu6"], ["hard_swish", "add"]]
TILING: dict[str, Any] = {
    "block_m": 64,
    "block_n": 64,
    "block_k": 32,
    "warps_m": 2,
    "warps_n": 2,
    "stages": 3,
    "raster_group": 1,
    "smem_epilogue": 0,
    "split_k": 1,
}
CONVOLUTIONS: list[dict[str, Any]] = [
    {"n": 2, "f": 64, "h": 40, "w": 64, "c": 3, "kh": 7, "kw": 7, "stride": 2, "padding": 3},
    {"n": 3, "f": 40, "h": 19, "w": 37, "c": 5, "kh": 3, "kw": 2, "padding": 1, "epilogue": ["bias", "relu"]},
    {"n": 3, "f": 17, "h": 19, "w": 21, "c": 4, "kh": 3, "kw": 3, "dilation": 2, "dtype": "bfloat16"},
]
STRIDED = {"n": 2, "f": 72, "h": 30, "w": 23, "c": 24, "kh": 1, "kw": 1, "stride": 2, "padding": 3}


def gemm(choice: Any, size: tuple[int, int, int], name: str = "", **attrs: Any) -> Case:
    sizes = dict(zip("mnk", size, strict=True))
    return Case("-".join(map(str, (*size, *attrs.values(), name))), "matmul", {**sizes, **attrs}, choice)


def convolution(name: str, choice: Any, attrs: dict[str, Any]) -> Case:
    return Case(f"{name}-{attrs['kh']}x{attrs['kw']}", "conv2d", {"dtype": "float16", **attrs}, choice)


def tiled(**params: Any) -> Any:
    return given("gpu_matmul_tc", TILING | params)


ON_TENSOR_CORES = [
    gemm(TENSOR_CORES, size, layout=layout, dtype=dtype)
    for dtype, layout, size in itertools.product(("float16", "bfloat16"), LAYOUTS, SIZES)
]
INTEGERS = [
    gemm(choice, size, name, layout=layout, dtype="int8")
    for (name, choice), layout, size in itertools.product(BOTH.items(), LAYOUTS, [(256, 256, 256), (129, 66, 40), (64, 64, 1024)])
]
INTEGERS += [
    gemm(TENSOR_CORES, size, layout=layout, dtype="uint8") for layout, size in itertools.product(LAYOUTS, [(256, 256, 256), (129, 66, 40)])
]
OTHER_FORMATS = [
    gemm(TENSOR_CORES, size, layout=layout, dtype=dtype, **attrs)
    for (dtype, attrs), layout, size in itertools.product(
        [("float64", {}), ("float8_e4m3fn", {"out_dtype": "bfloat16"}), ("float8_e5m2", {"out_dtype": "float16"})],
        LAYOUTS,
        [(256, 256, 256), (129, 66, 40)],
    )
]
TURING = {"compute_capability": (7, 5), "async_copy": False, "wgmma_arch": ""}
OLDER = [
    replace(gemm(TENSOR_CORES, size, "7.5", layout=layout, dtype=dtype), gpu=TURING)
    for dtype, layout, size in itertools.product(("float16", "int8", "uint8"), LAYOUTS, [(256, 256, 256), (129, 66, 40)])
]
LONG = [(30, 80, 4072), (6, 203, 3001), (203, 7, 3001), (1, 3, 9000)]
ON_CUDA_CORES = [
    gemm(CUDA_CORES, size, layout=layout, dtype="float32")
    for layout, size in itertools.product(LAYOUTS, [*SIZES, *LONG, (1, 1, 1), (5, 7, 3)])
]
ON_CUDA_CORES += [gemm(CUDA_CORES, (6, 203, 3001), layout=layout, dtype=dtype) for layout in LAYOUTS for dtype in ("int8", "float64")]
WITH_EPILOGUES = [
    gemm(choice, size, name, batch=3, layout="nt", dtype="float16", epilogue=epilogue)
    for (name, choice), size, epilogue in itertools.product(BOTH.items(), [(128, 256, 64), (100, 203, 117)], EPILOGUES)
]
WITH_SPLIT_K = [
    gemm(tiled(**params), (200, 136, 1000), str(params), layout=layout, dtype="float16", epilogue=["bias", "relu"])
    for layout in ("nt", "tn")
    for params in (
        {"split_k": 3},
        {"split_k": 2, "smem_epilogue": 1},
        {"smem_epilogue": 1},
        {"block_m": 96, "block_n": 96},
        {"block_k": 64, "double_buffer": 1},
    )
]
FLOAT16_ACCUM = gemm(TENSOR_CORES, (128, 128, 256), layout="nn", dtype="float16", accum_dtype="float16")
IMAGES = [
    {"rows": 4, "columns": 32, "block_n": 32, "warps_rows": 2, "warps_columns": 2, "warps_n": 1, "smem_epilogue": smem_epilogue}
    for smem_epilogue in (0, 1)
]
FROM_THE_IMAGE = [convolution("image", given("gpu_conv2d_tc", *IMAGES), attrs) for attrs in CONVOLUTIONS]
ON_CORES = [{"rows": 4, "columns": 16, "row_tiles": row_tiles, "block_n": 32, "thread_m": 8, "thread_n": 4} for row_tiles in (1, 2)]
FROM_THE_IMAGE += [
    convolution(f"image on CUDA cores {dtype}", given("gpu_conv2d_simt", *ON_CORES), {**attrs, "dtype": dtype})
    for dtype in ("float32", "float16")
    for attrs in CONVOLUTIONS
]
EPILOGUES = [TILING | {"stages": 2, "smem_epilogue": smem_epilogue} for smem_epilogue in (0, 1)]
AS_GEMMS = [convolution("gemm", given("gpu_matmul_tc", *EPILOGUES), attrs) for attrs in (*CONVOLUTIONS, STRIDED)]


@pytest.mark.parametrize("case", [*ON_TENSOR_CORES, FLOAT16_ACCUM], ids=str)
def test_tensor_cores(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", OTHER_FORMATS, ids=str)
def test_other_formats_on_tensor_cores(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", OLDER, ids=str)
def test_instructions_of_older_gpus(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", INTEGERS, ids=str)
def test_integers_are_exact(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", ON_CUDA_CORES, ids=str)
def test_cuda_cores(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", WITH_EPILOGUES, ids=str)
def test_epilogues_and_batches(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", WITH_SPLIT_K, ids=str)
def test_split_k_and_epilogues_through_shared_memory(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", [*FROM_THE_IMAGE, *AS_GEMMS], ids=str)
def test_convolutions(case: Case, check: Checked) -> None:
    check(case)
