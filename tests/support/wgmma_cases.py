"""Owns the small GEMMs and convolutions that the templates for wgmma are tested with, on the emulated GPU and on a real one.

Knows nothing of how they are run. A case is a line: attributes and parameters that differ from the plain ones.
"""

from __future__ import annotations

from typing import Any

from kerneldecl.model import Value

Case = tuple[dict[str, Any], dict[str, Value]]
"""Attributes of the rule, parameters of the template."""
SMS = 3
"""SMs of the GPU that kernels are built for: so few that CTAs have several tiles."""
PLAIN: dict[str, Value] = {
    "block_m": 128,
    "block_n": 64,
    "consumers": 2,
    "stages": 3,
    "cluster_m": 1,
    "cluster_n": 1,
    "raster_group": 2,
    "split_k": 1,
    "kernel_schedule": "cooperative",
    "swap_ab": 0,
    "pdl": 0,
    "pack": 0,
    "stream_k": 0,
}
FLOAT16: dict[str, Any] = {"m": 136, "n": 136, "k": 200, "layout": "nt", "dtype": "float16"}
TFLOAT32 = {"dtype": "float32", "precision": "tfloat32"}
ONE = {"block_m": 64, "consumers": 1}
PACKED = {"block_n": 128, "pack": 1}
STREAMED_GEMMS: dict[str, Case] = {
    "residual": ({"m": 300, "epilogue": ["bias", "add"]}, {"block_n": 64, "pdl": 1}),
    "residual of odd rows": ({"m": 261, "n": 200, "epilogue": ["add", "relu"]}, {"block_n": 96}),
    "residual of bfloat16, ping-pong": (
        {"m": 600, "n": 72, "dtype": "bfloat16", "epilogue": ["bias", "add", "mul"]},
        {"kernel_schedule": "pingpong", "block_m": 64, "block_n": 128},
    ),
    "residual, staggered": (
        {"m": 1000, "k": 320, "epilogue": ["gelu", "add"]},
        {"kernel_schedule": "staggered", "stages": 4, "block_m": 256, "block_n": 64},
    ),
    "residual, swapped": ({"m": 40, "n": 264, "epilogue": ["bias", "add"]}, {**ONE, "swap_ab": 1, "block_n": 24, "stages": 4}),
    "residual of one MMA tile's rows, swapped": ({"m": 200, "n": 264, "epilogue": ["add"]}, {"swap_ab": 1, "block_n": 128}),
    "residual, clusters of three consumers": (
        {"m": 800, "epilogue": ["add"]},
        {"consumers": 3, "block_m": 192, "block_n": 64, "cluster_m": 2},
    ),
    "residual of a batch, float16 accumulators": (
        {"m": 136, "batch": 3, "accum_dtype": "float16", "epilogue": ["add"]},
        {"block_n": 128},
    ),
}
"""GEMMs whose residual TMA loads."""
GEMMS: dict[str, Case] = {
    "four consumers": ({**FLOAT16, "m": 300, "epilogue": ("bias", "relu")}, {"block_m": 256, "block_n": 48, "consumers": 4, "stages": 3}),
    "four consumers, through registers": ({**FLOAT16, "k": 203}, {"block_m": 256, "block_n": 48, "consumers": 4, "stages": 3}),
    "nn": ({"layout": "nn"}, {}),
    "nt": ({"layout": "nt", "m": 300}, {}),
    "tn": ({"layout": "tn"}, {}),
    "tt": ({"layout": "tt", "batch": 2}, {}),
    "attention": ({"layout": "nn", "batch": 3, "m": 70, "n": 64, "k": 72}, {"pdl": 1}),
    "scores of interleaved heads": (
        {"batch": 2, "heads": 3, "interleaved": "ab", "m": 70, "n": 72, "k": 64, "epilogue": ["scale"]},
        {"pdl": 1},
    ),
    "context of interleaved heads": (
        {"layout": "nn", "batch": 2, "heads": 3, "interleaved": "bc", "m": 70, "n": 64, "k": 72},
        {**ONE, "swap_ab": 1, "block_n": 24},
    ),
    "heads of all matrices, transposed": ({"layout": "tt", "batch": 2, "heads": 2, "interleaved": "abc", "epilogue": ["bias", "mul"]}, {}),
    "prefetched": ({"m": 60, "n": 130, "k": 330, "epilogue": ["bias"]}, {**ONE, "stages": 4, "pdl": 1}),
    "prefetched by clusters": ({"m": 250, "n": 60, "k": 328}, {"cluster_m": 2, "pdl": 1}),
    "prefetched, split-K": ({"m": 60, "n": 24, "k": 330}, {**ONE, "block_n": 24, "split_k": 2, "swap_ab": 1, "pdl": 1}),
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
    "odd k, swapped, split-K": ({"m": 13, "n": 131, "k": 201}, {**ONE, "swap_ab": 1, "split_k": 2}),
    "odd k, ping-pong": ({"m": 400, "n": 131, "k": 201}, {"kernel_schedule": "pingpong", "block_n": 128}),
    "odd n, nn": ({"n": 131, "layout": "nn"}, {"block_n": 128}),
    "even n, tn": ({"m": 130, "n": 134, "layout": "tn", "batch": 3}, {"kernel_schedule": "pingpong", "block_n": 64}),
    "odd sizes, tt": ({"m": 151, "n": 131, "k": 137, "layout": "tt"}, {"block_n": 128}),
    "int8, nn": ({"dtype": "int8", "layout": "nn", "n": 144, "k": 144}, {"block_n": 128}),
    "odd sizes of e4m3, tt": (
        {"dtype": "float8_e4m3fn", "out_dtype": "float16", "m": 150, "n": 131, "k": 137, "layout": "tt"},
        {"block_n": 96, "pdl": 1},
    ),
    "odd k of e5m2": ({"dtype": "float8_e5m2", "out_dtype": "float16", "k": 201}, {"split_k": 2}),
    "split-K in the stages' place": ({"m": 136, "n": 264, "k": 64 * 11}, {"split_k": 2, "block_n": 256, "stages": 4}),
    "split-K in the stages' place, swapped": (
        {"m": 200, "n": 300, "k": 64 * 13, "epilogue": ["bias"]},
        {"block_n": 160, "split_k": 3, "stages": 4, "swap_ab": 1, "pdl": 1},
    ),
    "split-K beyond k": ({"m": 70, "n": 100, "k": 64 * 5}, {"split_k": 4, "block_n": 64}),
    "cluster of two rows": ({"m": 520}, {"cluster_m": 2, "block_n": 128}),
    "cluster of two by two": ({"m": 520, "layout": "tn"}, {"cluster_m": 2, "cluster_n": 2, "block_n": 128}),
    "cluster of two by two, a tile without rows and columns": (
        {"m": 300, "n": 300, "k": 512},
        {"cluster_m": 2, "cluster_n": 2, "block_n": 128},
    ),
    "split-K by a workspace, cluster of two by two": (
        {"m": 300, "n": 300, "k": 64 * 8},
        {"cluster_m": 2, "cluster_n": 2, "split_k": 2, "block_n": 128, "workspace": 1},
    ),
    "cluster of four columns": ({"n": 600, "epilogue": ["gelu_tanh", "add"]}, {"cluster_n": 4}),
    "cluster of two rows, a tile without rows": ({"m": 130, "n": 72, "k": 328}, {**ONE, "cluster_m": 2, "pdl": 1}),
    "cluster of two columns, a tile without rows, swapped": (
        {"m": 53, "n": 130, "k": 328, "epilogue": ["bias", "add"]},
        {**ONE, "cluster_n": 2, "swap_ab": 1, "block_n": 24, "pdl": 1},
    ),
    "cluster of two rows, three boxes": ({"m": 520}, {"cluster_m": 2, "block_n": 24}),
    "cluster of four rows, one box": ({"m": 8, "n": 520, "k": 400}, {**ONE, "cluster_m": 4, "swap_ab": 1, "block_n": 8, "pdl": 1}),
    "cluster of two columns, one MMA tile": ({"layout": "tn", "n": 304}, {**ONE, "cluster_n": 2}),
    "ping-pong": ({"m": 600, "epilogue": ["bias", "gelu"]}, {"kernel_schedule": "pingpong", "block_m": 64, "block_n": 128}),
    "ping-pong of two MMA tiles": ({"m": 600}, {"kernel_schedule": "pingpong", "block_m": 128, "block_n": 128}),
    "staggered": ({"m": 600, "k": 320, "epilogue": ["bias", "gelu"]}, {"kernel_schedule": "staggered", "stages": 4, "block_n": 128}),
    "staggered in clusters": (
        {"m": 520, "layout": "tn", "dtype": "bfloat16", "k": 64 * 7},
        {"kernel_schedule": "staggered", "stages": 6, "cluster_m": 2, "block_n": 128},
    ),
    "staggered, as many k-tiles as stages": ({"m": 1000, "layout": "nn"}, {"kernel_schedule": "staggered", "stages": 4, "block_m": 256}),
    "gelu behind the second MMA tile": ({"m": 300, "layout": "nn", "k": 400, "epilogue": ["gelu", "add"]}, {"block_m": 256}),
    "gelu behind the second MMA tile, staggered": (
        {"m": 520, "n": 300, "k": 64 * 9, "epilogue": ["bias", "gelu"]},
        {"kernel_schedule": "staggered", "stages": 4, "block_m": 256, "cluster_n": 2},
    ),
    **STREAMED_GEMMS,
    "staggered, through registers": ({"m": 600, "k": 201}, {"kernel_schedule": "staggered", "stages": 2, "block_n": 128}),
    "three consumers": ({"m": 400}, {"consumers": 3, "block_m": 192, "block_n": 128, "pdl": 1}),
    "one row, swapped": ({"m": 1, "n": 520}, {"swap_ab": 1, "block_n": 8, "stages": 8}),
    "few rows, swapped": ({"m": 21, "epilogue": ["bias", "relu"]}, {**ONE, "swap_ab": 1, "block_n": 24}),
    "few rows, swapped, odd n": ({"m": 19, "n": 133}, {**ONE, "swap_ab": 1, "block_n": 24}),
    "split-K": ({"m": 70, "n": 100, "k": 64 * 8, "epilogue": ["bias", "relu"]}, {"split_k": 4, "block_n": 64}),
    "split-K, swapped": ({"m": 13, "k": 64 * 16, "dtype": "bfloat16"}, {**ONE, "swap_ab": 1, "block_n": 16, "split_k": 8, "pdl": 1}),
    "split-K of five, unequal shares": ({"m": 70, "n": 100, "k": 64 * 14 + 8}, {"split_k": 5, "block_n": 64, "pdl": 1}),
    "split-K of seven, float16 accumulators": (
        {"accum_dtype": "float16", "m": 20, "n": 130, "k": 64 * 13},
        {**ONE, "swap_ab": 1, "block_n": 24, "split_k": 7},
    ),
    "split-K of three, odd k": ({"m": 70, "n": 131, "k": 64 * 6 + 7}, {**ONE, "split_k": 3, "block_n": 96}),
    "split-K by a workspace": (
        {"m": 70, "n": 100, "k": 64 * 20, "epilogue": ["bias", "relu"]},
        {"split_k": 10, "block_n": 64, "workspace": 1},
    ),
    "split-K by a workspace, multicast, an odd number of tiles": (
        {"m": 300, "k": 64 * 5},
        {"block_m": 128, "block_n": 64, "cluster_m": 2, "split_k": 2, "workspace": 1, "pdl": 1},
    ),
    "split-K by a workspace, residual, odd sizes": (
        {"m": 261, "n": 131, "k": 64 * 11 + 5, "epilogue": ["add", "gelu"], "batch": 2},
        {"block_m": 256, "split_k": 3, "block_n": 96, "workspace": 1, "pdl": 1},
    ),
    "split-K by a workspace, swapped, packed": (
        {"m": 13, "n": 131, "k": 64 * 12 + 9},
        {**ONE, "pack": 1, "swap_ab": 1, "block_n": 16, "split_k": 12, "workspace": 1, "pdl": 1},
    ),
    "split-K by a workspace, float16 accumulators": (
        {"accum_dtype": "float16", "m": 70, "n": 100, "k": 64 * 17, "layout": "nn"},
        {"split_k": 17, "block_n": 64, "workspace": 1, "pdl": 1},
    ),
    "split-K by a workspace, cluster of two rows": (
        {"m": 400, "n": 200, "k": 64 * 11 + 24, "epilogue": ["bias"]},
        {"cluster_m": 2, "split_k": 3, "block_n": 96, "workspace": 1, "pdl": 1},
    ),
    "split-K by a workspace, cluster of two columns, swapped": (
        {"m": 100, "n": 150, "k": 64 * 8, "batch": 2},
        {**ONE, "cluster_n": 2, "swap_ab": 1, "block_n": 32, "split_k": 4, "workspace": 1, "pdl": 1},
    ),
    "split-K by a workspace, cluster of two columns, tn": (
        {"m": 264, "n": 136, "k": 64 * 6 + 8, "layout": "tn", "epilogue": ["add"]},
        {"cluster_n": 2, "split_k": 3, "block_n": 96, "workspace": 1, "pdl": 1},
    ),
    "split-K by a workspace, tfloat32 nn": ({**TFLOAT32, "layout": "nn", "k": 320}, {"block_n": 128, "split_k": 4, "workspace": 1}),
    "split-K of int8": ({"m": 70, "n": 100, "k": 128 * 4, "dtype": "int8"}, {"split_k": 2, "block_n": 64}),
    "scales of int8": (
        {"dtype": "int8", "out_dtype": "bfloat16", "k": 304, "epilogue": ["scale_rows", "scale_columns", "bias"]},
        {"block_n": 128},
    ),
    "float16 accumulators": ({"accum_dtype": "float16", "m": 300}, {"block_m": 256, "block_n": 256, "stages": 2}),
    "float16 accumulators, nn": (
        {"accum_dtype": "float16", "layout": "nn", "epilogue": ["bias", "relu"]},
        {"block_n": 128, "cluster_m": 2},
    ),
    "float16 accumulators to float32": ({"accum_dtype": "float16", "out_dtype": "float32", "n": 131}, {"block_n": 72}),
    "float16 accumulators, ping-pong": ({"accum_dtype": "float16", "m": 600, "n": 264}, {"kernel_schedule": "pingpong", "block_n": 256}),
    "float16 accumulators, odd n and k": ({"accum_dtype": "float16", "n": 131, "k": 75, "epilogue": ["add"]}, {"block_n": 128}),
    "float16 accumulators, swapped": ({"accum_dtype": "float16", "m": 21}, {**ONE, "swap_ab": 1, "block_n": 24}),
    "split-K of float16 accumulators": ({"accum_dtype": "float16", "m": 70, "n": 100, "k": 64 * 8}, {"split_k": 4, "block_n": 64}),
    "tfloat32": ({**TFLOAT32, "m": 300}, {}),
    "tfloat32, odd columns, bias and residual": (
        {"m": 150, "n": 139, "k": 69, "dtype": "float32", "precision": "tfloat32", "epilogue": ["bias", "add"]},
        {"pack": 1, "block_n": 96},
    ),
    "float32 results, odd columns, two consumers": (
        {"m": 300, "n": 131, "k": 96, "out_dtype": "float32"},
        {"block_m": 128, "consumers": 2, "block_n": 64},
    ),
    "tfloat32, nn": ({**TFLOAT32, "layout": "nn", "k": 100, "epilogue": ["bias", "relu"]}, {"block_n": 128}),
    "tfloat32, nn, A from registers": (
        {**TFLOAT32, "layout": "nn", "m": 70, "n": 300, "k": 100, "epilogue": ["bias", "relu"]},
        {"swap_ab": 1, "pdl": 1},
    ),
    "tfloat32, tt, ping-pong, A from registers": (
        {**TFLOAT32, "layout": "tt", "m": 500, "batch": 2},
        {"kernel_schedule": "pingpong", "block_n": 96, "cluster_n": 2},
    ),
    "tfloat32, nn, two MMA tiles, split-K, A from registers": (
        {**TFLOAT32, "layout": "nn", "n": 260, "k": 268},
        {"swap_ab": 1, "block_m": 256, "block_n": 56, "split_k": 3},
    ),
    "tfloat32, tt, clusters, staggered": (
        {**TFLOAT32, "layout": "tt", "m": 1000, "k": 420, "out_dtype": "float16"},
        {"kernel_schedule": "staggered", "stages": 4, "cluster_m": 2, "block_n": 128},
    ),
    "tfloat32, odd sizes, tn": ({**TFLOAT32, "m": 151, "n": 131, "k": 67, "layout": "tn"}, {"block_n": 72}),
    "tfloat32, odd k": ({**TFLOAT32, "k": 67, "out_dtype": "float16"}, {"block_n": 128}),
    "tfloat32, batch, ping-pong": (
        {**TFLOAT32, "batch": 3, "m": 200, "k": 72},
        {"kernel_schedule": "pingpong", "cluster_m": 2, "block_n": 128},
    ),
    "tfloat32, few rows, split-K": ({**TFLOAT32, "m": 21, "k": 256}, {**ONE, "swap_ab": 1, "block_n": 24, "split_k": 2}),
    "packed": ({"m": 130, "k": 131}, {**PACKED, "cluster_m": 2}),
    "packed, nn": ({"m": 133, "n": 131, "k": 137, "layout": "nn", "epilogue": ["bias", "relu"]}, {**PACKED, "cluster_n": 2}),
    "packed, tn, batch": ({"m": 261, "n": 131, "k": 75, "layout": "tn", "batch": 3}, {**PACKED, "pdl": 1}),
    "packed, tt": ({"m": 150, "n": 130, "k": 198, "layout": "tt", "dtype": "bfloat16"}, {**PACKED, "block_m": 256}),
    "packed, A alone": (
        {"m": 131, "n": 136, "k": 136, "layout": "tn"},
        {**PACKED, "kernel_schedule": "pingpong", "block_m": 64},
    ),
    "packed, B alone": ({"m": 136, "n": 131, "k": 131, "layout": "tt", "out_dtype": "float32"}, PACKED),
    "packed, swapped, split-K": ({"m": 13, "n": 131, "k": 201}, {**ONE, "pack": 1, "swap_ab": 1, "block_n": 16, "split_k": 2}),
    "packed e4m3": ({"dtype": "float8_e4m3fn", "out_dtype": "float16", "k": 201}, {"pack": 1}),
    "packed int8, one operand transposed": ({"dtype": "int8", "layout": "nn", "m": 70, "n": 70, "k": 141}, {"pack": 1}),
    "packed e5m2, transposed, batch": (
        {"dtype": "float8_e5m2", "out_dtype": "bfloat16", "layout": "tn", "batch": 2, "m": 80, "n": 70, "k": 144},
        {"pack": 1},
    ),
    "packed tfloat32, tn, A from registers": ({**TFLOAT32, "layout": "tn", "m": 72, "n": 100, "k": 133}, {"pack": 1}),
    "packed tfloat32, transposed": ({**TFLOAT32, "layout": "nn", "m": 70, "n": 72, "k": 133}, {"pack": 1}),
    "stream-K": ({"m": 520, "n": 200, "k": 320}, {"pdl": 1, "stream_k": 1}),
    "stream-K of two waves": (
        {"m": 600, "n": 200, "k": 300, "layout": "tn", "dtype": "bfloat16", "epilogue": ["bias", "gelu"]},
        {"pdl": 1, "stream_k": 2},
    ),
    "stream-K of int8": ({"dtype": "int8", "m": 500, "n": 128, "k": 1100}, {"pdl": 1, "stream_k": 1}),
    "stream-K, packed": ({"m": 133, "n": 67, "k": 201}, {"pdl": 1, "stream_k": 1, "pack": 1}),
    "one k-tile": ({"k": 16}, {"stages": 2}),
}
STREAM_K: dict[str, Value] = {"block_n": 32, "pdl": 1, "stream_k": 1}
"""Parameters of stream-K."""
EIGHT_TILES: dict[str, Any] = {"m": 512, "n": 64, "k": 440, "layout": "nt", "dtype": "float16"}
"""8 tiles of 7 k-tiles; three SMs have two each, and of the last two tiles 5, 5 and 4 k-tiles."""
STREAM_K_GEMMS: dict[str, tuple[dict[str, Any], dict[str, Value], int]] = {
    "last wave": ({}, {}, 3),
    "last two waves": ({"epilogue": ["bias", "gelu"]}, {"stream_k": 2}, 3),
    "all of a GEMM": ({"m": 200, "k": 1300}, {}, 5),
    "many CTAs a tile": ({"m": 100, "n": 30, "k": 1000, "layout": "nn"}, {}, 7),
    "one k-tile each": ({"m": 100, "n": 30}, {}, 7),
    "clusters": ({"m": 600, "n": 136, "layout": "tn"}, {"cluster_m": 2, "block_n": 128}, 9),
    "clusters of columns": ({"n": 300, "batch": 3, "layout": "tt"}, {"cluster_n": 2, "block_n": 64, "stream_k": 2}, 10),
    "odd sizes": ({"m": 397, "n": 67, "k": 331}, {"stream_k": 2}, 5),
    "int8": ({"m": 300, "dtype": "int8", "k": 800}, {"block_m": 192, "consumers": 3}, 3),
    "float8 to float32, swapped": (
        {"m": 40, "n": 500, "dtype": "float8_e4m3fn", "out_dtype": "float32", "k": 1040},
        {"swap_ab": 1, "block_n": 40},
        3,
    ),
}
"""Attributes, parameters, and a number of SMs that leaves the last wave short."""

CONV_PARAMS: dict[str, Value] = {
    "block_m": 128,
    "block_n": 64,
    "consumers": 2,
    "tile_w": 4,
    "tile_h": 4,
    "stages": 3,
    "cluster_m": 1,
    "cluster_n": 1,
    "raster_group": 2,
    "split_k": 1,
    "swap_ab": 0,
    "kernel_schedule": "cooperative",
    "pdl": 0,
}
SMALL: dict[str, Any] = {"n": 9, "h": 8, "w": 8, "c": 64, "f": 64, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16"}
RAGGED: dict[str, Any] = {"n": 3, "h": 15, "w": 13, "c": 40, "f": 72, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16"}
SWAPPED: dict[str, Value] = {"swap_ab": 1, "block_m": 64, "block_n": 128, "consumers": 1, "tile_w": 8}
PINGPONG: dict[str, Value] = {"kernel_schedule": "pingpong", "block_m": 64}
STREAMED_CONVOLUTIONS: list[Case] = [
    (RAGGED | {"f": 136, "epilogue": ("bias", "add", "relu")}, {"block_n": 192, "block_m": 64, "consumers": 1, "stages": 2}),
    (RAGGED | {"dtype": "bfloat16", "f": 96, "epilogue": ("add",)}, PINGPONG | {"block_n": 96, "tile_w": 8}),
    (RAGGED | {"f": 136, "epilogue": ("add", "bias")}, SWAPPED | {"cluster_m": 2, "consumers": 2, "block_m": 128}),
]
"""Convolutions whose residual TMA loads."""
PACKED_CONVOLUTIONS: list[Case] = [
    (RAGGED | {"c": 43, "f": 71}, {"block_n": 72, "pack": 1}),
    (RAGGED | {"c": 75, "f": 37, "dtype": "bfloat16", "stride": 2, "epilogue": ("bias", "relu")}, {"pack": 1, "pdl": 1, "tile_w": 8}),
    (RAGGED | {"c": 20}, {"pack": 1, "cluster_n": 2}),
    (RAGGED | {"f": 70, "epilogue": ("bias", "add")}, {"pack": 1, "block_n": 128, "cluster_m": 2}),
    (RAGGED | {"c": 55, "f": 131, "n": 1}, SWAPPED | {"pack": 1}),
    (RAGGED | {"c": 55, "f": 67, "n": 1}, {"pack": 1, "split_k": 9, "workspace": 1, "pdl": 1}),
    (RAGGED | {"c": 64, "f": 3, "dilation": 2}, {"pack": 1, "block_n": 8}),
]
"""Convolutions whose images, weights or both TMA cannot read: of copies."""
CONVOLUTIONS: list[Case] = [
    (SMALL, {}),
    (SMALL, {"pdl": 1, "stages": 2, "tile_w": 1, "tile_h": 1}),
    (SMALL | {"dtype": "bfloat16", "f": 128}, {"block_n": 128, "cluster_m": 2}),
    (SMALL | {"f": 128}, {"cluster_n": 2, "tile_w": 8, "tile_h": 8}),
    (SMALL | {"f": 128, "epilogue": ("bias", "hard_swish")}, {"kernel_schedule": "staggered"}),
    (SMALL | {"out_dtype": "float32", "f": 24}, {"block_n": 24}),
    (SMALL | {"c": 128, "f": 192}, {"block_n": 192, "block_m": 64, "consumers": 1}),
    (SMALL | {"kh": 1, "kw": 1, "padding": 0, "stride": 2, "c": 128}, {}),
    (SMALL | {"kh": 1, "kw": 1, "padding": 3, "stride": 2}, {"tile_w": 8, "tile_h": 2}),
    (RAGGED, {"block_n": 72, "tile_w": 16, "tile_h": 8}),
    (RAGGED | {"stride": 2, "epilogue": ("bias", "relu")}, {"block_n": 128}),
    (RAGGED | {"stride": 3, "padding": 2}, PINGPONG | {"tile_w": 2}),
    (RAGGED | {"dilation": 2, "padding": 2, "epilogue": ("bias", "add", "relu")}, {"cluster_m": 2, "block_n": 128, "tile_w": 8}),
    (RAGGED | {"kh": 5, "kw": 2, "c": 136, "f": 136}, PINGPONG | {"tile_h": 8, "tile_w": 8, "raster_group": 3}),
    (RAGGED | {"c": 128, "n": 1}, {"split_k": 2}),
    (RAGGED | {"c": 128, "n": 1, "epilogue": ("bias", "add", "relu")}, {"split_k": 9, "workspace": 1, "pdl": 1}),
    (RAGGED | {"accum_dtype": "float16", "epilogue": ("bias", "relu")}, {"block_n": 128}),
    (RAGGED | {"c": 8, "f": 8, "kh": 7, "kw": 7, "padding": 3, "stride": 2}, {"block_n": 8}),
    (RAGGED | {"h": 3, "w": 3, "padding": 0, "f": 64}, {"tile_w": 1, "tile_h": 1}),
    *STREAMED_CONVOLUTIONS,
    (SMALL, SWAPPED),
    (SMALL | {"f": 136, "epilogue": ("bias", "add", "relu")}, SWAPPED | {"cluster_m": 2, "kernel_schedule": "pingpong", "consumers": 2}),
    (RAGGED | {"stride": 2, "f": 128, "epilogue": ("bias", "relu")}, SWAPPED | {"consumers": 2, "block_m": 128, "cluster_n": 2}),
    (RAGGED | {"out_dtype": "float32", "f": 24, "c": 128}, SWAPPED | {"split_k": 2}),
    *PACKED_CONVOLUTIONS,
    (RAGGED | {"c": 128, "f": 136}, {"cluster_n": 2, "split_k": 6, "workspace": 1, "pdl": 1}),
]

FEW_CHANNELS: dict[str, Any] = {"n": 2, "h": 13, "w": 32, "c": 3, "f": 64, "kh": 7, "kw": 7, "stride": 2, "padding": 3, "dtype": "float16"}
THREE_BY_THREE = FEW_CHANNELS | {"kh": 3, "kw": 3, "stride": 1, "padding": 1, "h": 11, "w": 24}
SMEM_CONV_PARAMS: dict[str, Any] = {"tile_w": 16, "mma_tiles": 2, "block_n": 64, "stages": 3, "blocks": 2}
SMEM_CONVOLUTIONS: list[Case] = [
    (FEW_CHANNELS, {}),
    (FEW_CHANNELS | {"dtype": "bfloat16", "epilogue": ("bias", "relu"), "n": 3}, {"tile_w": 32, "mma_tiles": 1, "stages": 2}),
    (FEW_CHANNELS | {"padding": 0, "f": 136}, {"block_n": 128, "mma_tiles": 1}),
    (FEW_CHANNELS | {"padding": 2, "f": 24, "out_dtype": "float32", "w": 40}, {"block_n": 24, "mma_tiles": 4}),
    (FEW_CHANNELS | {"c": 4, "kh": 8, "kw": 11, "stride": 2, "padding": 2, "f": 96}, {"block_n": 96, "blocks": 1}),
    (THREE_BY_THREE, {}),
    (THREE_BY_THREE | {"padding": 2, "f": 8, "dtype": "bfloat16"}, {"tile_w": 32, "block_n": 8, "stages": 2}),
    (THREE_BY_THREE | {"c": 1, "f": 32, "epilogue": ("bias", "silu")}, {"tile_w": 64, "block_n": 32, "mma_tiles": 1}),
    (THREE_BY_THREE | {"c": 12, "stride": 1, "kh": 5, "dilation": 1, "padding": 0}, {}),
    (THREE_BY_THREE | {"kw": 1, "kh": 5, "dilation": 2, "padding": 0, "stride": 3}, {"mma_tiles": 1, "blocks": 3}),
    (THREE_BY_THREE | {"f": 120, "epilogue": ("bias", "relu")}, {"block_n": 120, "mma_tiles": 1}),
    (THREE_BY_THREE | {"f": 200, "epilogue": ("bias", "add", "relu"), "n": 1}, {"block_n": 40, "tile_w": 32}),
    (THREE_BY_THREE | {"f": 56, "dtype": "bfloat16", "n": 1}, {"block_n": 112, "mma_tiles": 1}),
]
"""Convolutions of images with few channels: windows that begin amid a pair of elements, rows of odd length, results beyond tiles, lines of
results that are no power of two."""
GATED_GEMMS: dict[str, Case] = {
    "silu": ({}, {"block_n": 128}),
    "one column of tiles": ({"n": 8, "m": 9}, {**ONE, "block_n": 16}),
    "odd rows, gelu, float32": ({"m": 37, "gate": "gelu", "out_dtype": "float32"}, {**ONE, "block_n": 32}),
    "gelu, ping-pong": ({"m": 300, "gate": "gelu", "dtype": "bfloat16"}, {"kernel_schedule": "pingpong", "block_m": 64, "block_n": 96}),
    "tanh, staggered": ({"m": 300, "gate": "gelu_tanh", "k": 256}, {"kernel_schedule": "staggered", "block_m": 256, "block_n": 128}),
    "multicast of B": ({"m": 300, "n": 200}, {"cluster_m": 2, "block_n": 64, "pdl": 1}),
    "multicast of A": ({"m": 300, "n": 200, "gate": "relu"}, {"cluster_n": 2, "block_n": 64}),
    "stream-K": ({"n": 200, "gate": "sigmoid"}, {"stream_k": 1, "pdl": 1, "block_n": 128}),
}
"""By name: attributes of a gated GEMM, parameters of its template."""

UPSAMPLING: dict[str, Any] = {"n": 2, "h": 8, "w": 8, "c": 64, "f": 64, "kh": 4, "kw": 4, "stride": 2, "padding": 1, "dtype": "float16"}
TRANSPOSED: list[Case] = [
    (UPSAMPLING | attrs, params)
    for attrs, params in (
        ({}, {}),
        ({"kh": 2, "kw": 2, "padding": 0}, {}),
        ({"kh": 3, "kw": 3, "extra": 1, "epilogue": ("bias", "add", "relu")}, {"pdl": 1}),
        ({"c": 24, "f": 72, "h": 7, "w": 5}, {}),
        ({"f": 128, "c": 128, "epilogue": ("bias", "gelu")}, PINGPONG | {"block_n": 128}),
        ({"kh": 3, "kw": 3, "stride": 1}, {}),
        ({"kh": 5, "kw": 5, "stride": 3, "dtype": "bfloat16"}, {}),
        ({"f": 32}, {"swap_ab": 1}),
        ({"f": 128, "kh": 4, "kw": 2, "padding": 0, "n": 1}, {"block_n": 128, "cluster_m": 2}),
        ({"c": 128, "n": 3, "out_dtype": "float32"}, {"split_k": 2}),
        ({"c": 128, "f": 96}, {"split_k": 2, "workspace": 1, "pdl": 1}),
        ({"kh": 6, "kw": 6, "padding": 2, "accum_dtype": "float16"}, {}),
    )
]
"""Transposed convolutions, and what differs from `CONV_PARAMS`."""
