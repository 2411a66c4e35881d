"""Rules matmul_quantized and pack_weights without TVM: mistakes, arguments, and the packed order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.repository import REPOSITORY

from kerneldecl.arrays import numpy_dtype
from kerneldecl.plugins.load import load_rule
from kerneldecl.rule import Rule

MXFP4: dict[str, Any] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32}
NVFP4: dict[str, Any] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn", "group": 16}


def rule(name: str = "matmul_quantized", **attrs: Any) -> Rule:
    return load_rule(REPOSITORY, name)(**{"n": 32, "k": 128, **({"m": 2} if name == "matmul_quantized" else {}), **attrs})


@pytest.mark.parametrize(
    ("attrs", "problem"),
    [
        ({"group": 48}, "group 48 does not divide k 128; write one that does"),
        ({"scales": "column", "k": 7}, "k 7 is odd, but two weights of int4 share a byte; write an even one"),
        ({"weights": "float8_e5m2", "zero_points": True}, "zero_points are for integers, not float8_e5m2; leave them out"),
        ({"weights": "int8", "layout": "packed"}, "layout packed is for int4 and float4_e2m1fn, not int8; write another layout"),
        ({"weights": "float4_e2m1fn"}, "weights float4_e2m1fn need a scale_dtype; write float8_e8m0fnu (MXFP4) or float8_e4m3fn (NVFP4)"),
        ({**MXFP4, "group": 16}, "MXFP4 has groups of 32, not group 16; leave out group"),
        ({**NVFP4, "group": 128}, "NVFP4 has groups of 16, not group 128; leave out group"),
        ({**NVFP4, "scales": "column"}, "NVFP4 has scales of groups, not scales column; leave out scales"),
        ({**MXFP4, "k": 48}, "group 32 does not divide k 48; write one that does"),
        ({**MXFP4, "zero_points": True}, "zero_points are for integers, not float4_e2m1fn; leave them out"),
        ({**MXFP4, "tensor_scale": True}, "tensor_scale is for scale_dtype float8_e4m3fn, not float8_e8m0fnu; leave it out"),
        ({"tensor_scale": True}, "tensor_scale is for scale_dtype float8_e4m3fn, which is not given; leave it out"),
        ({"scale_dtype": "float8_e4m3fn"}, "scale_dtype float8_e4m3fn is for weights float4_e2m1fn, not int4; leave it out"),
        (
            {**MXFP4, "layout": "packed", "n": 24},
            "layout packed has tiles of 16 x 64, and n 24 or k 128 is no multiple; write another layout",
        ),
        ({"layout": "packed", "n": 24}, "layout packed has tiles of 16 x 64, and n 24 or k 128 is no multiple; write another layout"),
        ({"activation_scales": "token"}, "activation_scales are for activations of 8 bits, not float16; leave them out"),
        (
            {"dtype": "int8", "activation_scales": "group", "k": 64, "group": 64},
            "activation_scales group shares a scale among 128 elements, which do not divide k 64; write a multiple",
        ),
        ({"out_dtype": "int8"}, "out_dtype int8 would cut off the fractions that scales give; write one of floating point"),
        ({"epilogue": ("bias", "bias")}, "epilogue repeats bias; write it once"),
    ],
)
def test_a_mistake_has_one_sentence(attrs: dict[str, Any], problem: str) -> None:
    assert list(rule(**attrs).problems()) == [problem]


def test_packed_weights_come_in_whole_tiles() -> None:
    assert list(rule("pack_weights", n=8).problems()) == [
        "packed weights lie in tiles of 16 x 64, and n 8 or k 128 is no multiple; write multiples"
    ]


@pytest.mark.parametrize(
    ("attrs", "shapes"),
    [
        ({}, [("A", (2, 128), "float16"), ("W", (32, 64), "uint8"), ("weight_scales", (1, 32), "float16")]),
        (
            {"layout": "packed", "group": 32, "zero_points": True, "dtype": "bfloat16"},
            [
                ("A", (2, 128), "bfloat16"),
                ("W", (2, 2, 32, 16), "uint8"),
                ("weight_scales", (4, 32), "bfloat16"),
                ("zeros", (4, 32), "uint8"),
            ],
        ),
        (
            {"weights": "float8_e4m3fn", "dtype": "float8_e4m3fn", "scales": "block", "activation_scales": "group", "epilogue": ("bias",)},
            [
                ("A", (2, 128), "float8_e4m3fn"),
                ("W", (32, 128), "float8_e4m3fn"),
                ("weight_scales", (1, 1), "float32"),
                ("activation_scales", (1, 2), "float32"),
                ("bias", (32,), "bfloat16"),
            ],
        ),
        (
            {"weights": "int8", "zero_points": True, "scales": "tensor"},
            [("A", (2, 128), "float16"), ("W", (32, 128), "int8"), ("weight_scales", (1,), "float16"), ("zeros", (1,), "int8")],
        ),
        (
            {**MXFP4, "dtype": "bfloat16"},
            [("A", (2, 128), "bfloat16"), ("W", (32, 64), "uint8"), ("weight_scales", (4, 32), "uint8")],
        ),
        (
            {**NVFP4, "tensor_scale": True, "layout": "packed", "dtype": "int8", "activation_scales": "token", "epilogue": ("scale",)},
            [
                ("A", (2, 128), "int8"),
                ("W", (2, 2, 32, 16), "uint8"),
                ("weight_scales", (8, 32), "float8_e4m3fn"),
                ("tensor_scale", (1,), "float32"),
                ("activation_scales", (2,), "float32"),
                ("scale", (1,), "float32"),
            ],
        ),
    ],
)
def test_arguments(attrs: dict[str, Any], shapes: list[tuple[str, tuple[int, ...], str]]) -> None:
    assert [(arg.name, arg.shape, arg.dtype) for arg in rule(**attrs).signature().inputs] == shapes


def place(row: int, k: int) -> tuple[int, int, int, int, int]:
    """Return where PTX wants an element of operand A of m16n8k16: its k-tile, row tile, lane, word and nibble.

    a0, a1 are row g, a2, a3 row g + 8, at columns 2t and 2t + 1; a4 to a7 the same 8 columns further (PTX ISA, "Matrix Fragments for
    mma.m16n8k16"). Registers hold pairs, and nibble j of a word belongs to the first half of register j, nibble j + 4 to its second.
    """
    group, thread = row % 16 % 8, k % 16 % 8 // 2
    register = row % 16 // 8 + 2 * (k % 16 // 8)
    return k // 64, row // 16, group * 4 + thread, k % 64 // 16, register + 4 * (k % 2)


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1), st.data())
def test_a_lane_finds_its_fragments_in_one_word(row_tiles: int, k_tiles: int, seed: int, data: st.DataObject) -> None:
    n, k = 16 * row_tiles, 64 * k_tiles
    weights = np.random.default_rng(seed).integers(0, 256, (n, k // 2), np.uint8)
    packed = np.asarray(rule("pack_weights", n=n, k=k).reference(weights))
    row, column = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, k - 1))
    k_tile, tile, lane, word, nibble = place(row, column)
    bits = int(packed[k_tile, tile, lane].view("<u4")[word])
    assert bits >> 4 * nibble & 15 == int(weights[row, column // 2]) >> 4 * (column % 2) & 15


@settings(max_examples=20)
@given(st.sampled_from(["tensor", "column", "group", "block"]), st.booleans(), st.integers(0, 2**32 - 1))
def test_both_layouts_mean_the_same(scales: str, zero_points: bool, seed: int) -> None:
    is_same_in_both_layouts({"scales": scales, "zero_points": zero_points, "group": 64, "epilogue": ("relu",)}, seed)


@settings(max_examples=10)
@given(st.sampled_from([MXFP4, NVFP4, NVFP4 | {"tensor_scale": True}]), st.integers(0, 2**32 - 1))
def test_both_layouts_of_blocks_mean_the_same(attrs: dict[str, Any], seed: int) -> None:
    is_same_in_both_layouts(attrs, seed)


def is_same_in_both_layouts(attrs: dict[str, Any], seed: int) -> None:
    rows, packed = rule(**attrs), rule(**attrs, layout="packed")
    a, w, *factors = rows.inputs(np.random.default_rng(seed))
    tiles = np.asarray(rule("pack_weights").reference(w))
    assert np.array_equal(np.asarray(rows.reference(a, w, *factors)), np.asarray(packed.reference(a, tiles, *factors)))


def weights_of(attrs: dict[str, Any], codes: np.ndarray, *factors: np.ndarray) -> np.ndarray:
    """Return the weights [n, k] that codes [n, k] stand for: the results of a GEMM with the identity."""
    n, k = codes.shape
    of = rule(**attrs, m=k, n=n, k=k, out_dtype="float32")
    assert list(of.problems()) == []
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return np.asarray(of.reference(np.eye(k, dtype=of.signature().inputs[0].dtype), packed.astype(np.uint8), *factors)).T


def test_codes_stand_for_the_numbers_of_the_format() -> None:
    """The 16 numbers of float4_e2m1fn (OCP Microscaling Formats 1.0, table 5)."""
    codes = np.arange(32, dtype=np.uint8)[np.newaxis] % 16
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = positive + [-each for each in positive]
    assert np.array_equal(weights_of(MXFP4, codes, np.full((1, 1), 127, np.uint8)), [numbers * 2])


@settings(max_examples=20)
@given(st.integers(127 - 15, 127 + 12), st.sampled_from([16, 32]))
def test_scales_are_powers_of_two_of_their_groups(exponent: int, column: int) -> None:
    codes, scales = np.full((2, 64), 3, np.uint8), np.full((2, 2), 127, np.uint8)
    scales[column // 32, 1] = exponent
    weights = weights_of(MXFP4, codes, scales)
    assert weights[1, column] == 1.5 * 2.0 ** (exponent - 127)
    assert weights[1, (column + 32) % 64] == weights[0, column] == 1.5


def test_the_last_power_of_two_is_no_number() -> None:
    """The exponent 255 is NaN, also for weights of 0 (OCP Microscaling Formats 1.0, section 5.4.1)."""
    scales = np.full((2, 1), 127, np.uint8)
    scales[1] = 255
    with np.errstate(all="ignore"):
        [numbers] = weights_of(MXFP4, np.zeros((1, 64), np.uint8), scales)
    # Each result is a sum over all of k.
    assert np.isnan(numbers).all()


def test_a_scale_of_the_tensor_multiplies_those_of_groups() -> None:
    codes = np.full((1, 32), 15, np.uint8)
    scales = np.array([[0.5], [3.0]]).astype(numpy_dtype("float8_e4m3fn"))
    [numbers] = weights_of({**NVFP4, "tensor_scale": True}, codes, scales, np.array([2.0], np.float32))
    assert numbers.tolist() == [-6.0] * 16 + [-36.0] * 16
