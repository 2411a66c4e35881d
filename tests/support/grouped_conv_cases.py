"""Owns the small convolutions in groups that their templates are tested with, on the emulated GPU and on a real one.

Knows nothing of how they are run. A case is a line: attributes and parameters that differ from the plain ones.
"""

from __future__ import annotations

from typing import Any

PLAIN: dict[str, Any] = {"n": 2, "h": 9, "w": 7, "c": 32, "f": 32, "kh": 3, "kw": 3, "padding": 1, "groups": 4, "dtype": "float16"}
PARAMS: dict[str, Any] = {"rows": 5, "columns": 7, "block_n": 32, "warps_m": 2, "warps_n": 1, "fragments": 1}
CONVOLUTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eight channels": ({}, {}),
    "stride 2, bias, relu, residual": (
        {"h": 10, "w": 11, "stride": 2, "epilogue": ("bias", "relu", "add")},
        {"rows": 3, "columns": 6, "warps_m": 1, "warps_n": 2, "fragments": 2},
    ),
    "part of a group, dilation, bfloat16 to float32": (
        {"n": 1, "c": 64, "f": 64, "groups": 2, "padding": 2, "dilation": 2, "dtype": "bfloat16", "out_dtype": "float32"},
        {"block_n": 16, "rows": 4},
    ),
    "four channels, gelu": ({"c": 16, "f": 16, "groups": 4, "epilogue": ("bias", "gelu")}, {"block_n": 16, "columns": 3}),
    "two channels": ({"c": 16, "f": 16, "groups": 8, "dtype": "bfloat16"}, {"block_n": 16, "columns": 4, "warps_n": 2}),
    "twelve channels, tiles of two groups": ({"c": 24, "f": 24, "groups": 2}, {"block_n": 24, "columns": 3}),
    "six channels, twice as many filters, 5 x 5": (
        {"n": 1, "c": 24, "f": 48, "groups": 4, "kh": 5, "kw": 5, "padding": 2},
        {"block_n": 24, "columns": 3},
    ),
    "sixteen channels, a quarter as many filters": ({"n": 1, "c": 128, "f": 32, "groups": 8}, {"fragments": 2}),
    "24 channels, weights from shared memory": ({"n": 1, "c": 48, "f": 64, "groups": 2}, {"fragments": 2, "warps_m": 1}),
    "1 x 1, stride 2": ({"kh": 1, "kw": 1, "padding": 0, "stride": 2}, {"columns": 3}),
    "one row, no padding": ({"h": 1, "w": 20, "kh": 1, "kw": 7, "padding": 0, "stride": 3}, {"rows": 1, "columns": 4}),
}
SIMT_PARAMS: dict[str, Any] = {"rows": 4, "columns": 7, "block_n": 32, "strip": 4, "width": 4, "threads": 64}
SIMT_CONVOLUTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32, bias, relu, residual": ({"dtype": "float32", "epilogue": ("bias", "relu", "add")}, {}),
    "float32, part of a group": ({"n": 1, "dtype": "float32", "groups": 2}, {"block_n": 8, "strip": 2}),
    "depthwise": ({"groups": 32, "epilogue": ("bias",)}, {"width": 8, "strip": 3}),
    "depthwise, stride 2, 5 x 5, bfloat16": (
        {"groups": 32, "stride": 2, "kh": 5, "kw": 5, "padding": 2, "h": 11, "w": 13, "dtype": "bfloat16"},
        {"strip": 2, "columns": 5},
    ),
    "two filters a channel, dilation": (
        {"c": 12, "f": 24, "groups": 12, "dtype": "float32", "dilation": 2, "padding": 2},
        {"width": 2, "block_n": 24},
    ),
    "three channels, float16 to float32": ({"c": 12, "f": 12, "out_dtype": "float32"}, {"block_n": 12, "width": 1, "strip": 7}),
    "1 x 1": ({"n": 1, "kh": 1, "kw": 1, "padding": 0, "dtype": "float32"}, {"block_n": 16, "threads": 32}),
}
