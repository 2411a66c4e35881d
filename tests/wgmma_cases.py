"""Owns the small products and convolutions that the templates for wgmma are tested with, on the emulated GPU and on a real one.

Knows nothing of how they are run. A case is a line: attributes and parameters that differ from the plain ones.
"""

from __future__ import annotations

from typing import Any

from kerneldecl.model import Value

Form = tuple[dict[str, Any], dict[str, Value]]
"""Attributes of the rule, parameters of the template."""
SMS = 3
"""Of the GPU that products are made for, so that blocks have several tiles."""
PLAIN: dict[str, Value] = {
    "block_m": 128,
    "block_n": 64,
    "consumers": 2,
    "stages": 3,
    "cluster_m": 1,
    "cluster_n": 1,
    "raster": 2,
    "split": 1,
    "schedule": "cooperative",
    "swap": 0,
    "dependent": 0,
}
FLOAT16: dict[str, Any] = {"m": 136, "n": 136, "k": 200, "layout": "nt", "dtype": "float16"}
ONE = {"block_m": 64, "consumers": 1}
PRODUCTS: dict[str, Form] = {
    "nn": ({"layout": "nn"}, {}),
    "nt": ({"layout": "nt", "m": 300}, {}),
    "tn": ({"layout": "tn"}, {}),
    "tt": ({"layout": "tt", "batch": 2}, {}),
    "attention": ({"layout": "nn", "batch": 3, "m": 70, "n": 64, "k": 72}, {"dependent": 1}),
    "bfloat16 to float32": ({"dtype": "bfloat16", "out_dtype": "float32"}, {"block_n": 96}),
    "int8": ({"dtype": "int8", "k": 304}, {"block_n": 256}),
    "e4m3": ({"dtype": "float8_e4m3fn", "out_dtype": "float16", "k": 304}, {}),
    "e5m2": ({"dtype": "float8_e5m2", "out_dtype": "bfloat16", "k": 304}, {}),
    "one of each": ({"m": 1, "n": 1, "k": 1}, ONE),
    "odd k": ({"m": 130, "k": 131}, {"block_n": 128}),
    "odd k, nn": ({"m": 133, "k": 131, "layout": "nn"}, {"block_n": 64}),
    "odd n and k": ({"n": 131, "k": 75, "epilogue": ["bias", "add"]}, {"block_n": 128}),
    "even n and k": ({"m": 261, "n": 130, "k": 198, "epilogue": ["bias", "relu"]}, {"block_m": 256, "block_n": 128}),
    "odd k to float32": ({"m": 70, "n": 5, "k": 75, "out_dtype": "float32"}, {}),
    "odd k, swapped, in parts": ({"m": 13, "n": 131, "k": 201}, {**ONE, "swap": 1, "split": 2}),
    "odd k, ping-pong": ({"m": 400, "n": 131, "k": 201}, {"schedule": "pingpong", "block_n": 128}),
    "odd n, nn": ({"n": 131, "layout": "nn"}, {"block_n": 128}),
    "even n, tn": ({"m": 130, "n": 134, "layout": "tn", "batch": 3}, {"schedule": "pingpong", "block_n": 64}),
    "odd sizes, tt": ({"m": 151, "n": 131, "k": 137, "layout": "tt"}, {"block_n": 128}),
    "int8, nn": ({"dtype": "int8", "layout": "nn", "n": 144, "k": 144}, {"block_n": 128}),
    "odd sizes of e4m3, tt": (
        {"dtype": "float8_e4m3fn", "out_dtype": "float16", "m": 150, "n": 131, "k": 137, "layout": "tt"},
        {"block_n": 96, "dependent": 1},
    ),
    "odd k of e5m2": ({"dtype": "float8_e5m2", "out_dtype": "float16", "k": 201}, {"split": 2}),
    "parts beyond the reduction": ({"m": 70, "n": 100, "k": 64 * 5}, {"split": 4, "block_n": 64}),
    "cluster of two rows": ({"m": 520}, {"cluster_m": 2, "block_n": 128}),
    "cluster of two by two": ({"m": 520, "layout": "tn"}, {"cluster_m": 2, "cluster_n": 2, "block_n": 128}),
    "cluster of four columns": ({"n": 600, "epilogue": ["silu", "add"]}, {"cluster_n": 4}),
    "ping-pong": ({"m": 600, "epilogue": ["bias", "gelu"]}, {"schedule": "pingpong", "block_m": 64, "block_n": 128}),
    "ping-pong of two slabs": ({"m": 600}, {"schedule": "pingpong", "block_m": 128, "block_n": 128}),
    "three consumers": ({"m": 400}, {"consumers": 3, "block_m": 192, "block_n": 128, "dependent": 1}),
    "one row, swapped": ({"m": 1, "n": 520}, {"swap": 1, "block_n": 8, "stages": 8}),
    "few rows, swapped": ({"m": 21, "epilogue": ["bias", "relu"]}, {**ONE, "swap": 1, "block_n": 24}),
    "few rows, swapped, odd n": ({"m": 19, "n": 133}, {**ONE, "swap": 1, "block_n": 24}),
    "parts": ({"m": 70, "n": 100, "k": 64 * 8, "epilogue": ["bias", "relu"]}, {"split": 4, "block_n": 64}),
    "parts, swapped": ({"m": 13, "k": 64 * 16, "dtype": "bfloat16"}, {**ONE, "swap": 1, "block_n": 16, "split": 8, "dependent": 1}),
    "parts of int8": ({"m": 70, "n": 100, "k": 128 * 4, "dtype": "int8"}, {"split": 2, "block_n": 64}),
    "scales of int8": (
        {"dtype": "int8", "out_dtype": "bfloat16", "k": 304, "epilogue": ["scale_rows", "scale_columns", "bias"]},
        {"block_n": 128},
    ),
    "one step": ({"k": 16}, {"stages": 2}),
}

TILES: dict[str, Value] = {
    "block_m": 128,
    "block_n": 64,
    "consumers": 2,
    "tile_w": 4,
    "tile_h": 4,
    "stages": 3,
    "cluster_m": 1,
    "cluster_n": 1,
    "raster": 2,
    "split": 1,
    "swap": 0,
    "schedule": "cooperative",
    "dependent": 0,
}
SMALL: dict[str, Any] = {"n": 9, "h": 8, "w": 8, "c": 64, "f": 64, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16"}
RAGGED: dict[str, Any] = {"n": 3, "h": 15, "w": 13, "c": 40, "f": 72, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16"}
SWAPPED: dict[str, Value] = {"swap": 1, "block_m": 64, "block_n": 128, "consumers": 1, "tile_w": 8}
PINGPONG: dict[str, Value] = {"schedule": "pingpong", "block_m": 64}
CONVOLUTIONS: list[Form] = [
    (SMALL, {}),
    (SMALL, {"dependent": 1, "stages": 2, "tile_w": 1, "tile_h": 1}),
    (SMALL | {"dtype": "bfloat16", "f": 128}, {"block_n": 128, "cluster_m": 2}),
    (SMALL | {"f": 128}, {"cluster_n": 2, "tile_w": 8, "tile_h": 8}),
    (SMALL | {"out_dtype": "float32", "f": 24}, {"block_n": 24}),
    (SMALL | {"c": 128, "f": 192}, {"block_n": 192, "block_m": 64, "consumers": 1}),
    (SMALL | {"kh": 1, "kw": 1, "padding": 0, "stride": 2, "c": 128}, {}),
    (SMALL | {"kh": 1, "kw": 1, "padding": 3, "stride": 2}, {"tile_w": 8, "tile_h": 2}),
    (RAGGED, {"block_n": 72, "tile_w": 16, "tile_h": 8}),
    (RAGGED | {"stride": 2, "epilogue": ("bias", "relu")}, {"block_n": 128}),
    (RAGGED | {"stride": 3, "padding": 2}, PINGPONG | {"tile_w": 2}),
    (RAGGED | {"dilation": 2, "padding": 2, "epilogue": ("bias", "add", "relu")}, {"cluster_m": 2, "block_n": 128, "tile_w": 8}),
    (RAGGED | {"kh": 5, "kw": 2, "c": 136, "f": 136}, PINGPONG | {"tile_h": 8, "tile_w": 8, "raster": 3}),
    (RAGGED | {"c": 128, "n": 1}, {"split": 2}),
    (RAGGED | {"c": 8, "f": 8, "kh": 7, "kw": 7, "padding": 3, "stride": 2}, {"block_n": 8}),
    (RAGGED | {"h": 3, "w": 3, "padding": 0, "f": 64}, {"tile_w": 1, "tile_h": 1}),
    (SMALL, SWAPPED),
    (SMALL | {"f": 136, "epilogue": ("bias", "add", "relu")}, SWAPPED | {"cluster_m": 2, "schedule": "pingpong", "consumers": 2}),
    (RAGGED | {"stride": 2, "f": 128, "epilogue": ("bias", "relu")}, SWAPPED | {"consumers": 2, "block_m": 128, "cluster_n": 2}),
    (RAGGED | {"out_dtype": "float32", "f": 24, "c": 128}, SWAPPED | {"split": 2}),
]
