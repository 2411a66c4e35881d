"""Every GEMM, GEMV, convolution and attention that a rule can declare has a policy of `auto` besides gpu_fallback, or a known reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from support.repository import REPOSITORY

from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.plugins.policy_order import standard_order

ARCHS = [load_arch(REPOSITORY, name) for name in ("h200", "a100-80gb", "t4")]
DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
ACCUMS = ("", "float16", "float64", "int64")
OUTS = ("", "float16", "float32", "float64", "int8")
SIZES = ((512, 384, 256), (517, 131, 1017), (1, 517, 1017), (517, 1, 1017), (7, 517, 129), (65, 33, 15), (3, 5, 7), (3262, 1240, 7336))
IMAGES = (
    (64, 64, 1, 3, 1),
    (19, 37, 1, 3, 2),
    (3, 64, 1, 7, 2),
    (19, 19, 19, 3, 1),
    (64, 64, 64, 3, 1),
    (32, 64, 4, 3, 1),
    (64, 64, 1, 1, 1),
)
"""Input and output channels, groups, taps, stride."""
Attrs = dict[str, Any]
FEW = 61
"""One of so many cases runs by default."""


def _matmuls() -> Iterator[Attrs]:
    for dtype, accum, out, layout, (m, n, k), batch in itertools.product(DTYPES, ACCUMS, OUTS, ("nn", "nt", "tn", "tt"), SIZES, (0, 3)):
        yield {"m": m, "n": n, "k": k, "batch": batch, "layout": layout, "dtype": dtype, "accum_dtype": accum, "out_dtype": out}


def _gemvs() -> Iterator[Attrs]:
    for dtype, accum, out, layout, (n, k) in itertools.product(DTYPES, ACCUMS, OUTS, "nt", ((4096, 1024), (8691, 1017), (5, 7))):
        yield {"n": n, "k": k, "layout": layout, "dtype": dtype, "accum_dtype": accum, "out_dtype": out}


def _gated() -> Iterator[Attrs]:
    for dtype, (m, n, k) in itertools.product(("float16", "bfloat16", "float32"), SIZES):
        yield {"m": m, "n": n, "k": k, "dtype": dtype}


def _convolutions() -> Iterator[Attrs]:
    for dtype, accum, out, layout, (c, f, groups, taps, stride) in itertools.product(DTYPES, ACCUMS, OUTS, ("nhwc", "nchw"), IMAGES):
        sizes = {"n": 3, "h": 17, "w": 17, "c": c, "f": f, "kh": taps, "kw": taps, "stride": stride, "padding": taps // 2, "groups": groups}
        yield sizes | {"layout": layout, "dtype": dtype, "accum_dtype": accum, "out_dtype": out}


def _attentions() -> Iterator[Attrs]:
    for dtype, head, causal in itertools.product(("float16", "bfloat16", "float32", "float8_e4m3fn"), (64, 40, 41, 256), (False, True)):
        yield {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 129, "keys": 129, "head_dim": head, "causal": causal, "dtype": dtype}


CASES = {"matmul": _matmuls, "gemv": _gemvs, "matmul_gated": _gated, "conv2d": _convolutions, "attention": _attentions}


def known(rule: str, attrs: Attrs) -> str:
    """Return why nothing but gpu_fallback computes a case, empty where it should not."""
    if rule != "conv2d" or (attrs["groups"] in {1, attrs["c"]} and attrs["layout"] == "nchw"):
        return ""
    if 1 < attrs["groups"] < attrs["c"] and attrs["layout"] == "nchw":
        return "kernels for groups of channels read images whose channels are contiguous"
    is_grouped = attrs["groups"] > 1 and attrs["groups"] < attrs["c"]
    if is_grouped and (attrs["accum_dtype"] or attrs["out_dtype"] or attrs["dtype"] not in {"float16", "bfloat16", "float32"}):
        return "kernels for groups of channels sum in float32, and take dtypes that CUDA cores widen to it"
    return ""


def unserved(rule: str, cases: Iterator[Attrs] | list[Attrs]) -> Iterator[str]:
    """Yield the cases that gpu_fallback alone takes without a reason."""
    policies = [load_module("policies", REPOSITORY, name) for name in standard_order("cuda") if name != "gpu_fallback"]
    for attrs in cases:
        declared = load_rule(REPOSITORY, rule).of(REPOSITORY, attrs)
        if list(declared.problems()):
            continue
        space = iter_space(canonical.lower(declared))
        for arch in ARCHS:
            is_served = any(policy.propose(space, arch, 1) for policy in policies)
            if not is_served and not known(rule, attrs):
                yield f"{arch.name}: {rule} {attrs}"


@pytest.mark.parametrize("rule", CASES)
def test_some_of_them(rule: str) -> None:
    cases = list(CASES[rule]())
    assert not list(unserved(rule, cases[:: FEW if len(cases) > 10 * FEW else 3]))


@pytest.mark.slow
@pytest.mark.parametrize("rule", CASES)
def test_all(rule: str) -> None:
    assert not list(unserved(rule, CASES[rule]()))
