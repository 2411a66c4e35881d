"""Quantised GEMMs compute what the rule does on a real GPU: what the policies propose, every kind of scale, few and many rows."""

from __future__ import annotations

from typing import Any

import pytest
from support.gpu_kernels import Case, Checked, given, proposed

pytestmark = pytest.mark.gpu

INT4: dict[str, Any] = {"n": 1024, "k": 2048, "layout": "packed"}
FLOAT8: dict[str, Any] = {
    "n": 1024, "k": 2048, "weights": "float8_e4m3fn", "dtype": "float8_e4m3fn", "scales": "block", "activation_scales": "group",
}  # fmt: skip
INT8: dict[str, Any] = {**FLOAT8, "weights": "int8", "dtype": "int8"}
W4A8: dict[str, Any] = {**INT4, "dtype": "int8", "activation_scales": "token"}
MXFP4: dict[str, Any] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32}
NVFP4: dict[str, Any] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn", "group": 16, "tensor_scale": True}
CLUSTERS: tuple[dict[str, Any], ...] = (
    {"rows": 32, "warps_n": 4, "warps_k": 2, "stages": 3, "split_k": 2, "stream": 0},
    {"rows": 64, "warps_n": 1, "warps_k": 2, "stages": 2, "split_k": 8, "stream": 1},
    {"rows": 16, "warps_n": 1, "warps_k": 4, "stages": 4, "split_k": 4, "stream": 1},
)
TILES: tuple[dict[str, Any], ...] = tuple(
    {"consumers": 2, "cluster_m": 1, "cluster_n": 1, "raster_group": 2, "split_k": 1, "workspace": 0, "pdl": 1, **each}
    for each in (
        {"block_m": 256, "block_n": 128, "partials": 1, "stages": 4, "cluster_n": 2, "kernel_schedule": "staggered"},
        {"block_m": 256, "block_n": 112, "partials": 1, "stages": 4, "cluster_m": 2, "kernel_schedule": "cooperative"},
        {"block_m": 128, "block_n": 128, "partials": 2, "stages": 6, "kernel_schedule": "staggered"},
        {"block_m": 128, "block_n": 192, "partials": 1, "stages": 4, "kernel_schedule": "staggered"},
        {"block_m": 128, "block_n": 160, "partials": 1, "stages": 5, "cluster_m": 2, "kernel_schedule": "cooperative"},
        {"block_m": 128, "block_n": 112, "partials": 2, "stages": 4, "split_k": 2},
    )
)
"""Tiles of float8 GEMMs with block scales, for CTAs with several of them."""
STREAMED: tuple[dict[str, Any], ...] = tuple(
    {"cluster_m": 1, "cluster_n": 1, "raster_group": 16, "workspace": 0, "pdl": 1, "partials": 2, **each}
    for each in (
        {"block_m": 64, "block_n": 112, "consumers": 1, "stages": 10, "split_k": 2, "prefetch": 3, "l2_fetch": 256},
        {"block_m": 64, "block_n": 56, "consumers": 1, "stages": 12, "split_k": 1, "prefetch": 7},
        {"block_m": 64, "block_n": 56, "consumers": 1, "stages": 6, "split_k": 2, "prefetch": 12, "l2_fetch": 256},
        {"block_m": 128, "block_n": 112, "consumers": 2, "stages": 7, "split_k": 2, "prefetch": 3, "l2_fetch": 256},
        {"block_m": 128, "block_n": 128, "consumers": 2, "stages": 6, "split_k": 2, "workspace": 1, "l2_fetch": 256},
    )
)
"""The same of few rows, whose weights come from DRAM."""
IN_BULK: tuple[dict[str, Any], ...] = (
    {"rows": 64, "warps_n": 1, "warps_k": 4, "stages": 3, "split_k": 1, "stream": 1, "bulk": 1, "prefetch": 1},
    {"rows": 32, "warps_n": 4, "warps_k": 2, "stages": 3, "split_k": 2, "stream": 0, "bulk": 1, "prefetch": 0},
)
KEPT: tuple[dict[str, Any], ...] = tuple(
    {"bulk": 1, "prefetch": 1, **each}
    for each in (
        {"rows": 32, "warps_n": 9, "warps_k": 2, "stages": 3, "split_k": 4, "stream": 3},
        {"rows": 32, "warps_n": 4, "warps_k": 4, "stages": 3, "split_k": 2, "stream": 3},
        {"rows": 64, "warps_n": 2, "warps_k": 2, "stages": 2, "split_k": 8, "stream": 3},
        {"rows": 16, "warps_n": 4, "warps_k": 4, "stages": 4, "split_k": 1, "stream": 3},
    )
)
"""Activations that stay in shared memory."""
SHARED: tuple[dict[str, Any], ...] = tuple(
    {"block_n": 64, "block_k": 128, "cluster_m": 1, "raster_group": 8, "pdl": 1, **each}
    for each in (
        {"block_m": 128, "consumers": 2, "stages": 7, "split_k": 2, "workspace": 0},
        {"block_m": 128, "consumers": 2, "stages": 6, "split_k": 3, "workspace": 1, "cluster_m": 2},
        {"block_m": 192, "consumers": 3, "stages": 5, "split_k": 2, "workspace": 1, "cluster_m": 2},
    )
)
"""CTAs that share activations, or k."""
PERSISTENT: tuple[dict[str, Any], ...] = tuple(
    {"rows": 16, "step": 128, "warps": 8, "tiles": 4, "stages": 8, "held": 4, "split_k": 1, "bulk": 0, "prefetch": 0, "cover": 0, **each}
    for each in (
        {},
        {"bulk": 1, "prefetch": 2, "held": 1},
        {"rows": 32, "tiles": 3, "held": 2, "stages": 5, "prefetch": 2},
        {"step": 256, "stages": 4, "warps": 4, "bulk": 1},
        {"split_k": 2, "warps": 4, "stages": 12, "tiles": 7, "held": 2, "cover": 1},
        {"split_k": 4, "warps": 4, "tiles": 5, "held": 5, "bulk": 1, "prefetch": 1},
        {"rows": 32, "tiles": 3, "held": 2, "stages": 5, "prefetch": 2, "interleave": 1},
    )
)
GEMVS: tuple[dict[str, Any], ...] = tuple(
    {"rows": 64, "step": 64, "warps": 16, "tiles": 1, "stages": 3, "blocks": 1, "bulk": 0, "prefetch": 1, **each}
    for each in (
        {},
        {"bulk": 1, "stages": 2},
        {"rows": 32, "step": 128, "warps": 8, "blocks": 2, "tiles": 2, "bulk": 1},
        {"rows": 16, "step": 256, "warps": 5, "tiles": 4, "stages": 2},
    )
)
OTHERS: dict[str, dict[str, Any]] = {
    "bfloat16, zero points, groups of 32": {"m": 40, "dtype": "bfloat16", "zero_points": True, "group": 32},
    "columns, bias and residual": {"m": 17, "scales": "column", "epilogue": ["bias", "add"]},
    "groups of 64": {"m": 300, "group": 64},
    "MXFP4, one row": {**MXFP4, "m": 1},
    "MXFP4, bfloat16": {**MXFP4, "m": 70, "dtype": "bfloat16", "epilogue": ["bias"]},
    "NVFP4": {**NVFP4, "m": 17},
    "NVFP4, bfloat16, without a scale of the tensor": {**NVFP4, "m": 300, "dtype": "bfloat16", "tensor_scale": False},
}
CASES = [
    *(Case(f"int4, {m} rows", "matmul_quantized", INT4 | {"m": m}, proposed("wgmma_matmul_quantized", step=9)) for m in (1, 16, 64, 256)),
    *(Case(name, "matmul_quantized", INT4 | attrs, proposed("wgmma_matmul_quantized", step=20)) for name, attrs in OTHERS.items()),
    *(
        Case(f"int4, {m} rows by mma.sync", "matmul_quantized", INT4 | {"m": m}, proposed("gpu_matmul_packed", step=9))
        for m in (1, 3, 8, 16, 31, 64)
    ),
    *(
        Case(f"int4, {m} rows by mma.sync in clusters", "matmul_quantized", INT4 | {"m": m}, given("gpu_matmul_packed", *CLUSTERS))
        for m in (1, 17)
    ),
    *(
        Case(f"int4, {m} rows by mma.sync in bulk", "matmul_quantized", INT4 | {"m": m}, given("gpu_matmul_packed", *IN_BULK))
        for m in (1, 9)
    ),
    *(
        Case(f"int4, {m} rows by mma.sync, which stay", "matmul_quantized", INT4 | {"m": m}, given("gpu_matmul_packed", *KEPT))
        for m in (1, 9, 16)
    ),
    Case("int4, 60 rows that CTAs share", "matmul_quantized", INT4 | {"m": 60}, given("wgmma_matmul_quantized", *SHARED)),
    *(
        Case(
            f"int4, {m} rows by mma.sync, persistent",
            "matmul_quantized",
            {"n": 8192, "k": 8192, "layout": "packed", "m": m},
            proposed("gpu_matmul_packed", step=4),
        )
        for m in (1, 8, 16)
    ),
    *(
        Case(f"{name}, by mma.sync, persistent", "matmul_quantized", INT4 | attrs, given("gpu_matmul_packed_persistent", *PERSISTENT))
        for name, attrs in (
            ("int4, 5 rows", {"m": 5}),
            ("MXFP4, 5 rows", {**MXFP4, "m": 5}),
            ("NVFP4, 5 rows, bfloat16", {**NVFP4, "m": 5, "dtype": "bfloat16"}),
            ("groups of 64, bfloat16, zero points", {"m": 3, "n": 1040, "dtype": "bfloat16", "zero_points": True, "group": 64}),
            (
                "columns, k that warps divide unevenly, bias and residual",
                {"m": 2, "k": 2304, "scales": "column", "epilogue": ["bias", "add"]},
            ),
        )
    ),
    *(
        Case(f"{name}, GEMV", "matmul_quantized", INT4 | attrs, given("gpu_gemv_packed", *GEMVS))
        for name, attrs in (
            ("int4, one row", {"m": 1}),
            ("int4, 8192 x 8192", {"m": 1, "n": 8192, "k": 8192}),
            ("groups of 64, bfloat16, zero points", {"m": 1, "n": 1040, "dtype": "bfloat16", "zero_points": True, "group": 64}),
            (
                "3 rows, columns, k that warps divide unevenly, bias and residual",
                {"m": 3, "k": 2304, "scales": "column", "epilogue": ["bias", "add"]},
            ),
        )
    ),
    *(
        Case(f"{name}, by mma.sync", "matmul_quantized", INT4 | attrs, proposed("gpu_matmul_packed", step=9))
        for name, attrs in OTHERS.items()
        if attrs["m"] <= 64
    ),
    *(
        Case(f"float8, {m} rows", "matmul_quantized", FLOAT8 | {"m": m}, proposed("wgmma_matmul_block_scaled", step=9))
        for m in (1, 4, 64, 70, 1000)
    ),
    *(
        Case(f"float8, {m} rows, weights streamed", "matmul_quantized", FLOAT8 | {"m": m}, given("wgmma_matmul_block_scaled", *STREAMED))
        for m in (64, 128)
    ),
    *(
        Case(f"int8, {name}, {m} rows", "matmul_quantized", INT8 | attrs | {"m": m}, proposed("wgmma_matmul_block_scaled", step=9))
        for m in (1, 64, 70, 1000)
        for name, attrs in (
            ("blocks", {}),
            ("columns and groups", {"scales": "group"}),
            ("columns and groups, odd n", {"scales": "group", "n": 1023}),
            ("columns and groups, tokens", {"scales": "group", "activation_scales": "token"}),
        )
    ),
    *(
        Case(f"int4 by int8, {m} rows, {scales}", "matmul_quantized", attrs | {"m": m}, proposed("wgmma_matmul_quantized_int8", step=9))
        for m in (1, 16, 70, 300)
        for scales, attrs in (("token", W4A8), ("group", W4A8 | {"activation_scales": "group"}))
    ),
    Case("float8, several tiles of a CTA", "matmul_quantized", FLOAT8 | {"m": 1000}, given("wgmma_matmul_block_scaled", *TILES), sms=6),
    Case("int4 in rows by mma.sync", "matmul_quantized", INT4 | {"m": 64, "layout": "rows"}, proposed("gpu_matmul_tc", step=20)),
    *(
        Case(f"{name} in rows by mma.sync", "matmul_quantized", {"m": 64, "n": 512, "k": 512, **attrs}, proposed("gpu_matmul_tc", step=20))
        for name, attrs in (("MXFP4", MXFP4), ("NVFP4", NVFP4))
    ),
    Case("MXFP4 in rows, one row", "matmul_quantized", {"m": 1, "n": 512, "k": 512, **MXFP4}, proposed("gpu_gemv", step=20)),
    Case("int8 by mma.sync", "matmul_quantized", {"m": 64, "n": 512, "k": 512, "weights": "int8"}, proposed("gpu_matmul_tc", step=20)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_computes_what_the_rule_does(case: Case, check: Checked) -> None:
    check(case)
