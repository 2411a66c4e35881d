"""Convolutions of any rank and layout, scans, sorted rows and movers on a real GPU: what policies propose computes the reference."""

from __future__ import annotations

from typing import Any

import pytest
from support.gpu_kernels import Case, Checked, proposed

pytestmark = pytest.mark.gpu

PLACES = proposed("gpu_scan", "gpu_topk", "gpu_scatter_add", "gpu_gather", "gpu_unaligned_elementwise", "gpu_elementwise", "gpu_fallback")
POOLS = proposed("gpu_pool", step=3)
WINDOWS = proposed("gpu_matmul", "gpu_matmul_tc", "gpu_matmul_simt", "gpu_grouped_conv2d", "gpu_window", "gpu_fallback")
SCANS: list[tuple[str, dict[str, Any]]] = [
    *(("cumsum", {"shape": (5, extent), "dtype": d}) for extent in (1, 31, 4096) for d in ("float32", "float16", "int32")),
    *(("cumsum", {"shape": (2, 100001), "reverse": r, "exclusive": e}) for r in (False, True) for e in (False, True)),
    *(("cumsum", {"shape": shape, "axis": 1, "dtype": d}) for shape in ((3, 70, 33), (2, 5000, 8)) for d in ("bfloat16", "int64")),
    *(("cumsum", {"shape": (40, 1000, 64), "axis": 1, "reverse": r, "exclusive": r}) for r in (False, True)),
    ("cumsum", {"shape": (1 << 23,)}),
    ("cumsum", {"shape": (3, 5000002), "dtype": "float16", "reverse": True, "exclusive": True}),
    ("cumsum", {"shape": ((1 << 24) + 4,), "dtype": "int32"}),
    *(("topk", {"shape": (7, extent), "k": k}) for extent, k in ((1, 1), (100, 100), (5000, 1), (5000, 300), (40000, 8), (40000, 3000))),
    *(("topk", {"shape": (3, 10001), "k": 9, "largest": False, "dtype": d}) for d in ("float16", "bfloat16", "uint8", "int32")),
    *(("sort", {"shape": (9, extent), "descending": d, "dtype": "float16"}) for extent in (33, 4096, 10000) for d in (False, True)),
    *(("scatter_add", {"rows": r, "columns": c, "updates": u}) for r, c, u in ((1, 1, 1), (1000, 96, 5000), (7, 4096, 300))),
    *(("scatter_add", {"rows": 99, "columns": 777, "updates": 3000, "dtype": d}) for d in ("float16", "float32", "int64")),
    ("scatter_add", {"rows": 333, "columns": 70, "updates": 2000, "base": False, "dtype": "float16", "index_dtype": "int32"}),
]
MOVERS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("pad", {"shape": (5, 30, 64), "pads": (1, 0, 2, 0, 3, 1), "mode": mode, "dtype": "float16"})
        for mode in ("constant", "edge", "reflect")
    ),
    ("concat", {"shapes": ((4, 3, 64), (4, 5, 64), (4, 1, 64)), "axis": 1, "dtype": "float16"}),
    *(("concat", {"shapes": ((40, 333), (40, 334)), "axis": -1, "dtype": d}) for d in ("float16", "float32", "uint8")),
    ("pad", {"shape": (50, 333), "pads": (1, 1, 0, 3), "dtype": "float16"}),
    *(("where", {"shapes": ((501, 1), (501, 333), other), "dtype": "float16"}) for other in ((1, 1), (333,), (501, 333))),
    ("cast", {"shape": (71, 97), "dtype": "float32", "out_dtype": "int8"}),
    ("where", {"shapes": ((64, 1, 32), (9, 32), (1,)), "dtype": "bfloat16"}),
    *(
        ("cast", {"shape": (70, 96), "dtype": a, "out_dtype": b})
        for a, b in (("float32", "float8_e4m3fn"), ("int8", "float16"), ("float16", "int32"))
    ),
    *(
        ("adaptive_pool2d", {"op": op, "n": 2, "h": 13, "w": 9, "c": 16, "rows": 6, "columns": 3, "dtype": "float16"})
        for op in ("max", "mean")
    ),
    ("take", {"shape": (9, 400, 16), "indices": (5, 7), "axis": 1, "dtype": "float16"}),
    ("take", {"shape": (3, 50, 6, 129), "indices": (333,), "axis": 1, "index_dtype": "int32"}),
    *(("embedding", {"rows": 3000, "columns": c, "indices": (n,), "dtype": "float16"}) for c, n in ((4096, 512), (768, 4096), (2, 1))),
    *(
        ("resize2d", {"op": op, "n": 2, "h": 13, "w": 17, "c": 16, "rows": 40, "columns": 9, "coordinates": where, "dtype": "float16"})
        for op in ("nearest", "bilinear")
        for where in ("half_pixel", "asymmetric", "align_corners")
    ),
]
IMAGE = {"n": 2, "h": 19, "w": 23, "c": 64, "f": 96, "kh": 3, "kw": 3, "dtype": "float16"}
CONVOLUTIONS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("conv1d", {"n": 2, "w": 301, "c": 64, "f": 96, "kw": 3, "pads": (2, 0), "layout": layout, "dtype": "float16"})
        for layout in ("nwc", "ncw")
    ),
    ("conv1d", {"n": 2, "w": 300, "c": 64, "f": 64, "kw": 4, "padding": 1, "groups": 64, "dtype": "float16"}),
    *(
        (
            "conv3d",
            {
                "n": 1,
                "d": 6,
                "h": 13,
                "w": 14,
                "c": 32,
                "f": 64,
                "kd": 3,
                "kh": 3,
                "kw": 3,
                "padding": 1,
                "layout": layout,
                "dtype": "float16",
            },
        )
        for layout in ("ndhwc", "ncdhw")
    ),
    ("conv2d", {**IMAGE, "strides": (2, 1), "pads": (1, 0, 2, 1), "dilations": (1, 2), "epilogue": ("bias", "relu")}),
    ("conv2d", {**IMAGE, "layout": "nchw", "padding": 1, "epilogue": ("bias", "relu")}),
    ("conv2d", {**IMAGE, "layout": "nchw", "padding": 1, "stride": 2, "dtype": "float32"}),
    *(("conv2d_transpose", {**IMAGE, "kh": 4, "kw": 4, "stride": 2, "padding": 1, "layout": layout}) for layout in ("nhwc", "nchw")),
]
POOL = {"n": 3, "h": 45, "w": 37, "c": 64, "kh": 3, "kw": 3, "padding": 1}
PLANES = POOL | {"layout": "nchw"}
POOLED: list[dict[str, Any]] = [
    *({**POOL, "op": op, "stride": 2, "dtype": d} for op in ("max", "mean") for d in ("float16", "bfloat16", "float32")),
    {**POOL, "op": "mean", "count_padding": False, "c": 36, "dtype": "float16"},
    {**POOL, "op": "max", "kh": 5, "kw": 2, "dtype": "bfloat16"},
    *(
        {**PLANES, "op": "max", "w": w, "stride": s, "dtype": d}
        for w, s, d in ((112, 2, "float16"), (67, 2, "bfloat16"), (30, 1, "float32"))
    ),
    *({**PLANES, "op": "mean", "w": w, "count_padding": False, "dtype": "float16"} for w in (11, 56)),
]


@pytest.mark.parametrize("case", [Case(str(attrs), rule, attrs, PLACES) for rule, attrs in (*SCANS, *MOVERS)], ids=str)
def test_places_compute_the_reference(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", [Case(str(attrs), rule, attrs, WINDOWS) for rule, attrs in CONVOLUTIONS], ids=str)
def test_windows_compute_the_reference(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", [Case(str(attrs), "pool2d", attrs, POOLS) for attrs in POOLED], ids=str)
def test_pools_compute_the_reference(case: Case, check: Checked) -> None:
    check(case)
