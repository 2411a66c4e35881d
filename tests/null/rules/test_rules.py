"""The standard rules without TVM: arguments, counts, mistakes, references and inputs."""

from __future__ import annotations

import ast
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.repository import REPOSITORY
from support.spaces import clean_environment

from kerneldecl.arrays import ALIGNMENT_BYTES, PERIOD, aligned, random_array, relative_error
from kerneldecl.plugins.find import plugin_file, plugin_names
from kerneldecl.plugins.load import load_rule
from kerneldecl.rule import Rule, dtype_tolerance
from kerneldecl.signature import Arg

ROOT = REPOSITORY
NAMES = plugin_names("rules", ROOT)


def rule(name: str, **attrs: Any) -> Rule:
    return load_rule(ROOT, name)(**attrs)


def shown(arg: Arg) -> str:
    return f"{arg.name}[{','.join(map(str, arg.shape))}]{arg.dtype}"


def test_every_operator_is_there() -> None:
    assert set(NAMES) >= {
        "attention", "attention_decode", "conv2d", "elementwise", "gemv", "gemv_i4", "group_norm", "layer_norm", "matmul",
        "matmul_grouped", "reduce", "rms_norm", "softmax", "tensor_ir", "transpose",
    }  # fmt: skip


def test_rules_are_imported_made_and_checked_without_tvm() -> None:
    script = """
import sys
from pathlib import Path
from kerneldecl.plugins.find import plugin_names
from kerneldecl.plugins.load import load_rule
root = Path(sys.argv[1])
for name in plugin_names("rules", root):
    load_rule(root, name)
matmul = load_rule(root, "matmul")(m=2, n=3, k=4, epilogue=("bias",))
assert not list(matmul.problems()) and matmul.signature() and matmul.flops() and matmul.least_bytes()
assert not list(load_rule(root, "tensor_ir")(file="kernel.py").problems())
print(sorted(module for module in sys.modules if module.partition(".")[0] in {"tvm", "tvm_ffi"}))
"""
    done = subprocess.run([sys.executable, "-c", script, str(ROOT)], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", NAMES)
def test_class_and_attributes_are_documented_in_one_line_each(name: str) -> None:
    tree = ast.parse(plugin_file("rules", ROOT, name).read_text())
    class_name = load_rule(ROOT, name).__name__
    (declared,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    assert (ast.get_docstring(declared) or "\n").count("\n") == 0
    for field, doc in itertools.pairwise(declared.body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(doc, ast.Expr), ast.unparse(field)
            assert isinstance(doc.value, ast.Constant), ast.unparse(field)
            assert "\n" not in str(doc.value.value), ast.unparse(field)


SIGNATURES = [
    (rule("matmul", m=2, n=3, k=5), "A[2,5]float32 B[5,3]float32 -> C[2,3]float32"),
    (rule("matmul", m=2, n=3, k=5, layout="tn", batch=4), "A[4,5,2]float32 B[4,5,3]float32 -> C[4,2,3]float32"),
    (
        rule("matmul", m=2, n=3, k=5, layout="nt", dtype="int8", epilogue=("add", "relu", "bias")),
        "A[2,5]int8 B[3,5]int8 residual[2,3]int32 bias[3]int32 -> C[2,3]int32",
    ),
    (rule("matmul", m=2, n=3, k=5, layout="tt", dtype="bfloat16"), "A[5,2]bfloat16 B[3,5]bfloat16 -> C[2,3]bfloat16"),
    (
        rule("matmul", m=2, n=3, k=5, dtype="float16", out_dtype="float32", epilogue=("bias",)),
        "A[2,5]float16 B[5,3]float16 bias[3]float32 -> C[2,3]float32",
    ),
    (
        rule("attention", batch=2, heads=4, kv_heads=2, queries=3, keys=5, head_dim=8, value_dim=6, mask=True),
        "Q[2,4,3,8]float16 K[2,2,5,8]float16 V[2,2,5,6]float16 mask[3,5]float16 -> O[2,4,3,6]float16",
    ),
    (
        rule("attention", batch=2, heads=4, queries=3, head_dim=8, layout="bshd", dtype="bfloat16"),
        "Q[2,3,4,8]bfloat16 K[2,3,4,8]bfloat16 V[2,3,4,8]bfloat16 -> O[2,3,4,8]bfloat16",
    ),
    (
        rule("attention_decode", batch=3, heads=4, kv_heads=2, queries=3, keys=50, head_dim=8, value_dim=6, layout="bshd"),
        "Q[3,3,4,8]float16 K[3,50,2,8]float16 V[3,50,2,6]float16 lengths[3]int32 -> O[3,3,4,6]float16",
    ),
    (
        rule("attention_decode", batch=3, heads=4, kv_heads=1, keys=48, head_dim=8, value_dim=6, latent=True, page_size=8, pages=20),
        "Q[3,4,1,8]float16 K[20,1,8,8]float16 page_table[3,6]int32 lengths[3]int32 -> O[3,4,1,6]float16",
    ),
    (
        rule("matmul_grouped", rows=9, groups=4, n=6, k=8),
        "A[9,8]bfloat16 B[4,6,8]bfloat16 offsets[4]int32 -> C[9,6]bfloat16",
    ),
    (
        rule("matmul_grouped", rows=9, groups=4, n=6, k=8, masked=True, layout="nn", dtype="float16", out_dtype="float32"),
        "A[4,9,8]float16 B[4,8,6]float16 counts[4]int32 -> C[4,9,6]float32",
    ),
    (
        rule("matmul_grouped", rows=9, groups=4, n=130, k=129, dtype="float8_e4m3fn"),
        "A[9,129]float8_e4m3fn A_scale[9,2]float32 B[4,130,129]float8_e4m3fn B_scale[4,2,2]float32 offsets[4]int32 -> C[9,130]bfloat16",
    ),
    (
        rule("attention", batch=2, heads=4, kv_heads=2, queries=3, head_dim=8, layout="packed", logsumexp=True, alibi=True),
        "QKV[2,3,8,8]float16 slopes[4]float32 -> O[2,3,4,8]float16 logsumexp[2,4,3]float32",
    ),
    (
        rule("attention", batch=2, heads=4, queries=3, keys=5, head_dim=8, dtype="float8_e4m3fn", mask=True, mask_axes="bqk"),
        (
            "Q[2,4,3,8]float8_e4m3fn K[2,4,5,8]float8_e4m3fn V[2,4,5,8]float8_e4m3fn q_scale[1]float32 k_scale[1]float32 v_scale[1]float32 "
            "mask[2,1,3,5]bfloat16 -> O[2,4,3,8]bfloat16"
        ),
    ),
    (
        rule(
            "attention", batch=2, heads=1, queries=3, keys=5, head_dim=8, mask=True, mask_axes="bk", mask_dtype="bool", out_dtype="float32"
        ),
        "Q[2,1,3,8]float16 K[2,1,5,8]float16 V[2,1,5,8]float16 mask[2,1,1,5]bool -> O[2,1,3,8]float32",
    ),
    (rule("gemv", n=2, k=3), "W[2,3]float32 x[3]float32 -> y[2]float32"),
    (rule("gemv", n=2, k=3, layout="t", dtype="uint8"), "W[3,2]uint8 x[3]uint8 -> y[2]int32"),
    (rule("gemv_i4", n=2, k=256, dtype="float16"), "W[2,128]uint8 scale[2,2]float16 x[256]float16 -> y[2]float16"),
    (rule("conv2d", n=1, h=7, w=8, c=4, f=6, kh=3, kw=2), "X[1,7,8,4]float32 W[3,2,4,6]float32 -> Y[1,5,7,6]float32"),
    (
        rule("conv2d", n=1, h=7, w=8, c=4, f=6, kh=3, kw=2, stride=2, padding=1, dilation=2, groups=2, epilogue=("bias", "add")),
        "X[1,7,8,4]float32 W[3,2,2,6]float32 bias[6]float32 residual[1,3,4,6]float32 -> Y[1,3,4,6]float32",
    ),
    (rule("elementwise", op="copy", shape=(2,), dtype="int64"), "X[2]int64 -> Y[2]int64"),
    (rule("elementwise", op="div", shape=(2, 1, 3)), "X[2,1,3]float32 Z[2,1,3]float32 -> Y[2,1,3]float32"),
    (rule("reduce", op="sum", shape=(2, 3, 5), axes=(-1, 0)), "X[2,3,5]float32 -> Y[3]float32"),
    (rule("reduce", op="max", shape=(2, 3, 5), axes=(1,), keepdims=True), "X[2,3,5]float32 -> Y[2,1,5]float32"),
    (rule("reduce", op="min", shape=(2, 3), axes=(0, 1)), "X[2,3]float32 -> Y[]float32"),
    (rule("softmax", shape=(2, 3)), "X[2,3]float32 -> Y[2,3]float32"),
    (rule("layer_norm", shape=(2, 3)), "X[2,3]float32 gamma[3]float32 beta[3]float32 -> Y[2,3]float32"),
    (rule("group_norm", shape=(2, 6, 5), groups=3), "X[2,6,5]float32 gamma[6]float32 beta[6]float32 -> Y[2,6,5]float32"),
    (rule("group_norm", shape=(2, 6, 4), groups=2, axis=-1), "X[2,6,4]float32 gamma[4]float32 beta[4]float32 -> Y[2,6,4]float32"),
    (rule("rms_norm", shape=(2, 3), dtype="bfloat16"), "X[2,3]bfloat16 gamma[3]bfloat16 -> Y[2,3]bfloat16"),
    (
        rule("rms_norm", shape=(2, 3), residual=True, out_dtype="float8_e4m3fn", dtype="float16"),
        "X[2,3]float16 R[2,3]float16 gamma[3]float16 -> Y[2,3]float8_e4m3fn H[2,3]float16 scale[2]float32",
    ),
    (
        rule("layer_norm", shape=(2, 3), out_dtype="int8"),
        "X[2,3]float32 gamma[3]float32 beta[3]float32 -> Y[2,3]int8 scale[2]float32",
    ),
    (rule("transpose", shape=(2, 3, 5), axes=(2, 0, -2)), "X[2,3,5]float32 -> Y[5,2,3]float32"),
]


@pytest.mark.parametrize(("made", "expected"), SIGNATURES)
def test_signature(made: Rule, expected: str) -> None:
    signature = made.signature()
    assert f"{' '.join(map(shown, signature.inputs))} -> {' '.join(map(shown, signature.outputs))}" == expected
    assert list(made.problems()) == []


@pytest.mark.parametrize("made", [made for made, _ in SIGNATURES])
def test_inputs_suit_the_signature_and_differ_by_seed(made: Rule) -> None:
    first, again, other = (made.inputs(np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert [(array.shape, str(array.dtype)) for array in first] == [(arg.shape, arg.dtype) for arg in made.signature().inputs]
    for a, b, c in zip(first, again, other, strict=True):
        assert np.array_equal(a, b)
        assert not np.array_equal(a, c)
        assert np.count_nonzero(a) > 0


CONV = {"n": 1, "h": 8, "w": 8, "c": 4, "f": 6, "kh": 3, "kw": 3}


@pytest.mark.parametrize(
    ("made", "sentences"),
    [
        (rule("matmul", m=1, n=1, k=1, epilogue=("bias", "relu", "bias")), ["epilogue repeats bias; write it once"]),
        (
            rule("matmul", m=1, n=1, k=1, dtype="int8", epilogue=("gelu",)),
            ["epilogue gelu needs floating-point accumulators, but accum_dtype is int32; leave it out"],
        ),
        (
            rule("matmul", m=1, n=1, k=1, dtype="int8", epilogue=("gelu", "scale")),
            ["epilogue gelu needs floating-point accumulators, but accum_dtype is int32; leave it out"],
        ),
        (rule("matmul", m=1, n=1, k=1, dtype="int8", epilogue=("scale", "gelu")), []),
        (rule("matmul", m=1, n=1, k=1, accum_dtype="float16"), ["accum_dtype float16 is narrower than dtype float32; leave it out"]),
        (
            rule("matmul", m=1, n=1, k=1, accum_dtype="int32"),
            ["accum_dtype int32 does not suit dtype float32: one is an integer, the other is not; leave it out"],
        ),
        (rule("matmul", m=1, n=1, k=1, precision="tfloat32"), []),
        (
            rule("matmul", m=1, n=1, k=1, dtype="float16", precision="tfloat32"),
            ["precision tfloat32 is for dtype float32, not float16; leave it out"],
        ),
        (
            rule("gemv", n=1, k=1, dtype="int8", out_dtype="int8"),
            ["out_dtype int8 is narrower than accum_dtype int32: results would wrap around; leave it out"],
        ),
        (
            rule("gemv", n=1, k=1, out_dtype="int32"),
            ["out_dtype int32 would cut off the fractions that accum_dtype float32 keeps; leave it out"],
        ),
        (
            rule("attention", batch=1, heads=4, kv_heads=3, queries=1, head_dim=8),
            ["heads 4 is no multiple of kv_heads 3; write a kv_heads that divides it"],
        ),
        (rule("attention", batch=1, heads=4, queries=1, head_dim=8, scale=-1.0), ["scale -1.0 is negative; write a finite one above 0"]),
        (rule("attention_decode", batch=1, heads=4, queries=17, keys=8, head_dim=8), ["queries 17 is over 16; rule attention takes more"]),
        (
            rule("attention_decode", batch=1, heads=4, keys=8, head_dim=8, value_dim=9, latent=True, page_size=3),
            [
                "value_dim 9 is over head_dim 8: values are the first of the keys' elements; write fewer",
                "keys 8 is no multiple of page_size 3; write whole pages",
            ],
        ),
        (
            rule("attention_decode", batch=1, heads=4, keys=8, head_dim=8, page_size=2, pages=3),
            ["pages 3 is too few for one sequence of 8 keys; write pages = 4 or more"],
        ),
        (rule("matmul_grouped", rows=4, groups=2, n=1, k=1, used=5), ["used 5 is over the 4 rows that there are; write fewer"]),
        (rule("matmul_grouped", rows=2**31, groups=2, n=1, k=1), ["2147483648 rows are more than int32 counts; write fewer"]),
        (
            rule("matmul_grouped", rows=4, groups=2, n=1, k=1, layout="nn", dtype="float8_e4m3fn"),
            ["layout nn is not for dtype float8_e4m3fn, whose blocks lie along k; nt is"],
        ),
        (
            rule("attention_decode", batch=1, heads=4, keys=8, head_dim=8, pages=3),
            ["pages 3 is given without page_size; write page_size as well"],
        ),
        (
            rule("attention", batch=1, heads=4, queries=1, head_dim=8, softcap=float("inf")),
            ["softcap inf is not finite; write a finite one above 0"],
        ),
        (
            rule("attention", batch=1, heads=4, queries=3, keys=5, head_dim=8, value_dim=16, layout="packed"),
            [
                "layout packed has as many keys as queries, 3, not 5; leave out keys",
                "layout packed has values of head_dim 8 elements, not 16; leave out value_dim",
            ],
        ),
        (
            rule("attention", batch=1, heads=4, queries=3, head_dim=8, mask_axes="bk"),
            ["mask_axes and mask_dtype describe a mask, but mask is false; write mask = true, or leave them out"],
        ),
        (rule("gemv_i4", n=1, k=100), ["group 128 does not divide k 100; write one that does"]),
        (rule("gemv_i4", n=1, k=9, group=3), ["group 3 is odd, but two weights share a byte; write an even one"]),
        (rule("conv2d", **CONV, groups=4), ["groups 4 does not divide f 6; write a divisor"]),
        (rule("conv2d", **CONV, groups=3), ["groups 3 does not divide c 4; write a divisor"]),
        (
            rule("conv2d", **CONV, dilation=4),
            [
                "the kernel spans 9 rows, but the padded image has 8; write a smaller kernel or more padding",
                "the kernel spans 9 columns, but the padded image has 8; write a smaller kernel or more padding",
            ],
        ),
        (rule("conv2d", **CONV, dilation=4, padding=1), []),
        (
            rule("elementwise", op="gelu", shape=(2,), dtype="int32"),
            ['op gelu needs a floating-point dtype, not int32; write dtype = "float32" or another'],
        ),
        (
            rule("elementwise", op="neg", shape=(2,), dtype="uint8"),
            ['op neg needs a signed dtype, not uint8; write dtype = "int8" or another'],
        ),
        (rule("elementwise", op="add", shape=()), ["shape has no extent; write shape = [16, 64], or other extents"]),
        (rule("reduce", op="sum", shape=(2, 3), axes=(2,)), ["axis 2 is out of range for a shape of 2 extents; write -2 to 1"]),
        (rule("reduce", op="sum", shape=(2, 3), axes=(1, -1)), ["axis 1 is named more than once; write it once"]),
        (rule("reduce", op="sum", shape=(2, 3), axes=()), ["axes names no axis to reduce; write axes = [-1], or others"]),
        (
            rule("reduce", op="mean", shape=(2, 3), axes=(0,), dtype="int32"),
            ['op mean needs a floating-point dtype, not int32; write dtype = "float32" or another'],
        ),
        (
            rule("reduce", op="sum", shape=(2,), axes=(0,), dtype="int8"),
            ["op sum in dtype int8 would wrap around; int32 and int64 hold sums"],
        ),
        (rule("softmax", shape=(2, 3), axis=2), ["axis 2 is out of range for a shape of 2 extents; write -2 to 1"]),
        (rule("layer_norm", shape=()), ["shape has no extent; write shape = [16, 64], or other extents"]),
        (rule("rms_norm", shape=()), ["shape has no extent; write shape = [16, 64], or other extents"]),
        (
            rule("rms_norm", shape=(2,), dtype="float64", out_dtype="int8"),
            ["out_dtype int8 is computed from float32 at most, not from float64; leave it out"],
        ),
        (
            rule("group_norm", shape=(2,), groups=1),
            ["shape needs at least two extents, images and channels; write shape = [8, 64], or more"],
        ),
        (rule("group_norm", shape=(2, 6, 4, 5), groups=3, axis=2), ["axis 2 is neither 1 nor the last of 4; write axis = 1 or axis = -1"]),
        (rule("group_norm", shape=(2, 6, 4), groups=3, axis=2), ["groups 3 does not divide the 4 channels; write a divisor"]),
        (rule("transpose", shape=(2, 3), axes=(0, 0)), ["axis 0 is named more than once; write it once"]),
        (rule("transpose", shape=(2, 3, 4), axes=(0, 1)), ["axes names 2 axes, but shape has 3 extents; write each axis once"]),
        (
            rule("tensor_ir", file="kernel.cu"),
            ["file kernel.cu is neither TVMScript (.py) nor saved IR (.json); write a path that ends so"],
        ),
        (
            rule("tensor_ir", file="kernel.py", reference_file="a.json"),
            ["reference_file a.json is not a Python file (.py); write a path that ends so"],
        ),
    ],
)
def test_problems(made: Rule, sentences: list[str]) -> None:
    assert list(made.problems()) == sentences


@pytest.mark.parametrize(
    ("made", "flops", "least_bytes"),
    [
        # 2 x 3 x 5 fused multiply-adds; 10 + 15 + 6 elements of 4 bytes.
        (rule("matmul", m=2, n=3, k=5), 60, 124),
        # The same four times over, in 16 bits, and a bias and a relu on 24 elements; 3 elements of bias.
        (rule("matmul", m=2, n=3, k=5, batch=4, dtype="float16", epilogue=("bias", "relu")), 240 + 48, 2 * (4 * 31 + 3)),
        # gelu: times 1/sqrt 2, erf, times 1/2, plus 1/2, times x. silu: sigmoid, times x.
        (rule("matmul", m=2, n=3, k=5, epilogue=("gelu", "add", "silu")), 60 + 6 * (5 + 1 + 2), 124 + 24),
        (rule("matmul", m=2, n=3, k=5, dtype="int8"), 60, 10 + 15 + 24),
        # 2 x 4 heads of 3 x 5 pairs, each 8 and 6 multiply-adds; 24 rows of queries, 20 of keys.
        (rule("attention", batch=2, heads=4, kv_heads=2, queries=3, keys=5, head_dim=8, value_dim=6), 8 * 15 * 28, 2 * 44 * 14),
        # The queries see 3, 4 and 5 keys; of 5 queries and 3 keys, the last three see 1, 2 and 3.
        (rule("attention", batch=1, heads=1, queries=3, keys=5, head_dim=8, causal=True), 12 * 32, 2 * 16 * 8),
        (rule("attention", batch=1, heads=1, queries=5, keys=3, head_dim=8, causal=True), 6 * 32, 2 * 16 * 8),
        # All rows, or half of the places; C is written whole.
        (rule("matmul_grouped", rows=9, groups=4, n=6, k=8), 2 * 9 * 6 * 8, 2 * (9 * 8 + 4 * 6 * 8 + 9 * 6) + 16),
        (rule("matmul_grouped", rows=9, groups=4, n=6, k=8, masked=True), 2 * 18 * 6 * 8, 2 * (18 * 8 + 4 * 6 * 8 + 36 * 6) + 16),
        # The queries see 4 and 5 keys; 8 rows of queries, 2 x 2 heads of 5 keys, 2 lengths. Latent: 6 rows of queries, 8 keys, 2 pages.
        (rule("attention_decode", batch=2, heads=2, queries=2, keys=5, head_dim=8), 4 * 9 * 32, 2 * 16 * 8 + 2 * 20 * 16 + 8),
        (
            rule("attention_decode", batch=1, heads=6, kv_heads=1, keys=8, head_dim=8, value_dim=6, latent=True, page_size=4, pages=9),
            2 * 6 * 8 * 14,
            2 * (6 * 14 + 8 * 8) + 4 * 3,
        ),
        # Aligned at their starts, three queries see 1, 2 and 3 of five keys; the last two keys are not read.
        (rule("attention", batch=1, heads=1, queries=3, keys=5, head_dim=8, causal=True, align="start"), 6 * 32, 2 * 12 * 8),
        # Queries see 2, 3, 3 and 3 keys, those within one of their own; the mask counts for these pairs.
        (rule("attention", batch=1, heads=1, queries=4, keys=5, head_dim=8, window=1, mask=True), 11 * 32, 2 * (18 * 8 + 11)),
        (rule("gemv", n=2, k=3), 12, 4 * (6 + 3 + 2)),
        # A weight costs minus 8, times scale, times x, plus. Two weights a byte, one scale for each 4.
        (rule("gemv_i4", n=2, k=8, group=4, dtype="float16"), 64, 8 + 2 * 4 + 2 * 8 + 2 * 2),
        # 3 x 4 outputs x 6 channels, each of 3 x 2 x (4 / 2) terms.
        (
            rule("conv2d", n=1, h=7, w=8, c=4, f=6, kh=3, kw=2, stride=2, padding=1, dilation=2, groups=2, epilogue=("bias",)),
            72 * (2 * 12 + 1),
            # Rows 1, 3 and 5 and columns 1, 3, 5 and 7 alone are met.
            4 * (3 * 4 * 4 + 72 + 6 + 72),
        ),
        # Of 5 x 5 pixels, a stride of 2 meets 3 x 3, or 4 x 4 where the kernel covers what it steps over.
        (rule("conv2d", n=1, h=5, w=5, c=2, f=3, kh=1, kw=1, stride=2), 9 * 3 * 4, 4 * (18 + 6 + 27)),
        (rule("conv2d", n=1, h=5, w=5, c=2, f=3, kh=2, kw=2, stride=2), 4 * 3 * 16, 4 * (32 + 24 + 12)),
        (rule("elementwise", op="copy", shape=(2, 3), dtype="float16"), 0, 24),
        (rule("elementwise", op="add", shape=(2, 3)), 6, 72),
        (rule("elementwise", op="gelu", shape=(2, 3)), 30, 48),
        (rule("reduce", op="sum", shape=(2, 3, 5), axes=(1,)), 30, 4 * (30 + 10)),
        (rule("reduce", op="mean", shape=(2, 3, 5), axes=(1,)), 40, 4 * (30 + 10)),
        (rule("softmax", shape=(2, 3)), 30, 48),
        (rule("layer_norm", shape=(2, 3)), 48, 4 * (6 + 3 + 3 + 6)),
        (rule("group_norm", shape=(2, 4, 3), groups=2, activation="silu"), 240, 4 * (24 + 4 + 4 + 24)),
        (rule("rms_norm", shape=(2, 3), dtype="float64"), 24, 8 * (6 + 3 + 6)),
        (rule("transpose", shape=(2, 3), axes=(1, 0), dtype="int8"), 0, 12),
    ],
)
def test_counts(made: Rule, flops: int, least_bytes: int) -> None:
    assert made.flops() == flops
    assert made.least_bytes() == least_bytes


def test_softmax_of_long_rows_may_be_rounded_to_subnormal_numbers() -> None:
    long, short = (rule("softmax", shape=(1, columns), dtype="float16") for columns in (1 << 20, 16384))
    want = long.reference(*long.inputs(np.random.default_rng(0)))
    assert short.tolerance() < relative_error(want.astype(np.float16), want) <= long.tolerance()
    assert short.tolerance() == dtype_tolerance("float16")


def test_tolerance_knows_the_output_and_the_accumulator() -> None:
    def tolerance(k: int, **dtypes: str) -> float:
        return rule("matmul", m=1, n=1, k=k, **dtypes).tolerance()

    assert tolerance(64, dtype="int8") == 0
    assert tolerance(64, dtype="float64") < tolerance(64) < tolerance(64, dtype="float16") < tolerance(64, dtype="bfloat16")
    # Products of 16-bit operands are exact in 32-bit accumulators.
    assert tolerance(64, dtype="float16", out_dtype="float32") == tolerance(64)
    # The error of 16-bit accumulators grows with the reduction; that of 32-bit ones does not show in 16 bits.
    narrow = {"dtype": "float16", "accum_dtype": "float16"}
    assert tolerance(4096, **narrow) > 4 * tolerance(64, **narrow)
    assert math.isclose(tolerance(4096, dtype="float16"), tolerance(64, dtype="float16"), rel_tol=0.01)


# References, against definitions written out element by element.


def test_matmul_reference() -> None:
    made = rule("matmul", m=3, n=4, k=5, batch=2, layout="tt", epilogue=("bias", "gelu", "add"))
    a, b, bias, residual = inputs = made.inputs(np.random.default_rng(0))
    want = np.empty((2, 3, 4))
    for p, i, j in np.ndindex(2, 3, 4):
        x = sum(float(a[p, k, i]) * float(b[p, j, k]) for k in range(5)) + float(bias[j])
        want[p, i, j] = x * 0.5 * math.erfc(-x / math.sqrt(2)) + float(residual[p, i, j])
    np.testing.assert_allclose(made.reference(*inputs), want, rtol=1e-12)


def test_matmul_reference_drops_the_digits_that_tfloat32_has_not() -> None:
    made = rule("matmul", m=3, n=4, k=5, layout="nt", precision="tfloat32")
    # 1 + 2**-10 has the last digit of ten, 1 + 2**-11 one more, and 2 - 2**-23 has all that float32 has.
    a = np.full((3, 5), 1 + 2.0**-10, "float32")
    b = np.full((4, 5), 1 + 2.0**-11, "float32")
    np.testing.assert_array_equal(made.reference(a, b), 5 * (1 + 2.0**-10))
    a[:], b[:] = -(2 - 2.0**-23), 1
    np.testing.assert_array_equal(made.reference(a, b), -5 * (2 - 2.0**-10))


def test_matmul_reference_is_exact_in_integers() -> None:
    made = rule("matmul", m=3, n=4, k=1000, dtype="int8")
    a, b = inputs = made.inputs(np.random.default_rng(0))
    assert np.array_equal(made.reference(*inputs), a.astype(np.int64) @ b.astype(np.int64))


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_conv2d_reference(groups: int) -> None:
    made = rule("conv2d", n=2, h=5, w=7, c=6, f=12, kh=3, kw=2, stride=2, padding=1, dilation=2, groups=groups, epilogue=("silu",))
    x, w = inputs = made.inputs(np.random.default_rng(0))
    got = np.asarray(made.reference(*inputs))
    want = np.zeros(got.shape)
    for image, row, column, f in np.ndindex(*want.shape):
        total = 0.0
        for r, s, c in np.ndindex(3, 2, 6 // groups):
            i, j = row * 2 + r * 2 - 1, column * 2 + s * 2 - 1
            if 0 <= i < 5 and 0 <= j < 7:
                total += float(x[image, i, j, f // (12 // groups) * (6 // groups) + c]) * float(w[r, s, c, f])
        want[image, row, column, f] = total / (1 + math.exp(-total))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_gemv_i4_reference() -> None:
    made = rule("gemv_i4", n=1, k=4, group=2)
    # The low nibble comes first: 0x7B holds 11 and 7, weights 3 and -1; 0xF0 holds 0 and 15, weights -8 and 7.
    packed, scale, x = np.array([[0x7B, 0xF0]], np.uint8), np.array([[10.0, 100.0]]), np.array([1.0, 2.0, 3.0, 4.0])
    assert np.asarray(made.reference(packed, scale, x)).tolist() == [10 * (3 * 1 - 1 * 2) + 100 * (-8 * 3 + 7 * 4)]


@pytest.mark.parametrize(
    ("made", "inputs", "want"),
    [
        (rule("softmax", shape=(3,)), [[1000.0, 1000.0, 1000.0]], [1 / 3] * 3),
        (rule("softmax", shape=(2, 2), axis=0), [[[0.0, 1.0], [math.log(3), 1.0]]], [[0.25, 0.5], [0.75, 0.5]]),
        (rule("layer_norm", shape=(2,), eps=3.0), [[1.0, 3.0], [10.0, 20.0], [0.0, 100.0]], [-5.0, 110.0]),
        (
            rule("group_norm", shape=(1, 2, 2), groups=1, eps=3.0),
            [[[[1.0, 1.0], [3.0, 3.0]]], [10.0, 20.0], [0.0, 100.0]],
            [[[-5.0, -5.0], [110.0, 110.0]]],
        ),
        (
            rule("group_norm", shape=(1, 2, 2), groups=2, axis=-1, eps=3.0, activation="relu"),
            [[[[1.0, 5.0], [3.0, 5.0]]], [10.0, 20.0], [0.0, 7.0]],
            [[[0.0, 7.0], [5.0, 7.0]]],
        ),
        (rule("rms_norm", shape=(2,), eps=3.0), [[1.0, 5.0], [8.0, 4.0]], [2.0, 5.0]),
        (rule("reduce", op="mean", shape=(2, 2), axes=(-2,)), [[[1.0, 2.0], [3.0, 5.0]]], [2.0, 3.5]),
        (rule("transpose", shape=(1, 2, 2), axes=(2, 0, 1)), [[[[1.0, 2.0], [3.0, 4.0]]]], [[[1.0, 3.0]], [[2.0, 4.0]]]),
        (rule("elementwise", op="silu", shape=(2,)), [[-800.0, math.log(3)]], [0.0, 0.75 * math.log(3)]),
        (rule("elementwise", op="gelu", shape=(2,)), [[0.0, 1.0]], [0.0, 0.5 * (1 + math.erf(0.5**0.5))]),
    ],
)
def test_reference(made: Rule, inputs: list[Any], want: Any) -> None:
    got = made.reference(*(np.array(values, np.float32) for values in inputs))
    np.testing.assert_allclose(np.asarray(got), np.array(want), rtol=1e-6)


def test_integers_wrap_around_as_in_the_kernel() -> None:
    made = rule("elementwise", op="add", shape=(2,), dtype="int8")
    assert np.asarray(made.reference(np.array([127, -1], np.int8), np.array([1, -1], np.int8))).tolist() == [-128, -2]


def test_inputs_stay_where_the_operation_is_defined() -> None:
    root, divisor = (
        rule("elementwise", op=op, shape=(1000,), dtype="float16").inputs(np.random.default_rng(0))[-1] for op in ("sqrt", "div")
    )
    assert (root >= 0).all()
    assert (np.abs(divisor) >= 0.5).all()
    assert (divisor < 0).any()


def test_results_have_unit_variance_whatever_the_extent_of_the_reduction() -> None:
    for k in (4, 4096):
        made = rule("matmul", m=64, n=64, k=k)
        result = np.asarray(made.reference(*made.inputs(np.random.default_rng(0))))
        assert 0.8 < result.std() < 1.25


def test_the_reference_of_gelu_has_every_digit() -> None:
    made = rule("elementwise", op="gelu", shape=(20_001,), dtype="float64")
    x = np.concatenate([np.linspace(-7, 7, 20_000), [np.nan]])
    found = made.reference(x)
    assert np.isnan(found[-1])
    exact = [0.5 * value * (1 + math.erf(value * 0.5**0.5)) for value in x[:-1]]
    assert np.abs(found[:-1] - exact).max() < 1e-14


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_rows_and_columns_of_large_gemms_repeat_and_their_reference_is_the_whole_gemm(layout: str) -> None:
    made = rule("matmul", m=PERIOD + 30, n=PERIOD + 7, k=5, layout=layout, dtype="float16")
    inputs = made.inputs(np.random.default_rng(0))
    a, b = (array.astype(np.float64).T if t == "t" else array.astype(np.float64) for array, t in zip(inputs, layout, strict=True))
    assert np.array_equal(a[PERIOD:], a[:30])
    assert np.array_equal(b[:, PERIOD:], b[:, :7])
    assert np.allclose(made.reference(*inputs), a @ b, atol=1e-5)
    inputs[0][-1, -1] += 1
    assert not np.allclose(made.reference(*inputs), a @ b, atol=1e-5), "what does not repeat is computed whole"


def test_aligned_copies_what_kernels_cannot_take() -> None:
    values = random_array(np.random.default_rng(0), Arg("x", (3, 5), "float16"))
    memory = np.zeros(values.nbytes + 2 * ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES + 2
    shifted = memory[start : start + values.nbytes].view(np.float16).reshape(values.shape)
    shifted[...] = values
    for array in (shifted, values.T):
        moved = aligned(array)
        assert moved.ctypes.data % ALIGNMENT_BYTES == 0
        assert moved.flags.c_contiguous
        assert np.array_equal(moved, array)
    assert aligned(moved) is moved


def test_files_of_the_workspace_are_found_from_anywhere() -> None:
    made = load_rule(ROOT, "tensor_ir").of(Path("/workspace"), {"file": "ir/a.py", "function": "b.py", "reference_file": ""})
    assert made == rule("tensor_ir", file="/workspace/ir/a.py", function="b.py")


def test_scales_are_float32_for_all_elements_for_columns_or_for_rows() -> None:
    attrs: dict[str, Any] = {"m": 2, "n": 3, "k": 4, "batch": 5, "dtype": "int8", "out_dtype": "float16"}
    made = rule("matmul", epilogue=("scale", "scale_columns", "bias", "scale_rows"), **attrs)
    found = [(arg.name, arg.shape, arg.dtype) for arg in made.signature().inputs[2:]]
    assert found == [
        ("scale", (1,), "float32"),
        ("column_scales", (3,), "float32"),
        ("bias", (3,), "float16"),
        ("row_scales", (5, 2), "float32"),
    ]


IMPORTING = """
import sys
from kerneldecl.declare.rule_attributes import rule_attributes
from kerneldecl.plugins.find import STANDARD, plugin_names
for name in plugin_names("rules", STANDARD):
    rule_attributes(STANDARD, name)
print(sorted({"numpy", "ml_dtypes", "tvm"} & sys.modules.keys()))
"""


def test_a_plan_that_knows_the_attributes_of_all_standard_rules_has_imported_no_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTING], env=clean_environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


SENTENCES = [
    (path.name, ast.unparse(node.value))
    for path in sorted((REPOSITORY / "rules").rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Yield) and isinstance(node.value, ast.Constant | ast.JoinedStr)
]


@pytest.mark.parametrize(("file", "sentence"), SENTENCES)
def test_every_problem_says_the_way_out(file: str, sentence: str) -> None:
    """An expression's are those of its parser, which says what it expects."""
    assert "; " in sentence or "expected" in sentence or file == "expression.py"
