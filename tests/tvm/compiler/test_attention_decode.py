"""A function is recognised as attention against a KV cache, with its sizes, if it computes one; an iteration space tells the same sizes."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from support.repository import REPOSITORY

from kerneldecl.analysis.attention_decode import decode_of
from kerneldecl.compiler import canonical
from kerneldecl.compiler.attention import read_attention
from kerneldecl.compiler.attention_decode import DecodeSpec, attention_decode_func, read_attention_decode
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_rule

PLAIN: dict[str, Any] = {
    "batch": 2,
    "heads": 4,
    "kv_heads": 2,
    "queries": 3,
    "keys": 24,
    "head_dim": 8,
    "value_dim": 6,
    "dtype": "float16",
    "scale": 0.25,
}
PAGED = {"page_size": 8, "pages": 7}
SPECS = [
    DecodeSpec(**PLAIN | changes)
    for changes in (
        {},
        {"layout": "bshd", "dtype": "bfloat16"},
        {"queries": 1, "scale": 1.0, "batch": 1, "kv_heads": 4},
        PAGED,
        {**PAGED, "layout": "bshd", "dtype": "float32"},
        {"is_latent": True, "kv_heads": 1},
        {**PAGED, "is_latent": True, "kv_heads": 1, "layout": "bshd"},
    )
]


def canonical_of(spec: DecodeSpec) -> tvm.IRModule:
    return canonical.canonical_module(attention_decode_func(spec))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_it_is_recognised_whatever_its_names(spec: DecodeSpec) -> None:
    mod = canonical.load(canonical.save(canonical_of(spec)))
    assert read_attention_decode(mod) == spec
    assert read_attention(mod) is None


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_iteration_space_tells_its_sizes(spec: DecodeSpec) -> None:
    sizes = decode_of(iter_space(canonical_of(spec)))
    assert sizes is not None
    names = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "dtype", "page_size", "is_latent")
    assert {name: getattr(sizes, name) for name in names} == {name: getattr(spec, name) for name in names}
    assert sizes.has_lengths


@pytest.mark.parametrize(("queries", "mask", "is_taken"), [(1, False, True), (16, False, True), (17, False, False), (1, True, False)])
def test_an_attention_of_few_queries_has_sizes_too(queries: int, mask: bool, is_taken: bool) -> None:
    rule = load_rule(REPOSITORY, "attention")(batch=2, heads=4, kv_heads=2, queries=queries, keys=24, head_dim=8, mask=mask)
    sizes = decode_of(iter_space(canonical.lower(rule)))
    assert (sizes is not None) == is_taken
    assert sizes is None or (sizes.kv_heads, sizes.keys, sizes.has_lengths) == (2, 24, False)


@pytest.mark.parametrize(
    ("of", "other"),
    [
        ("v_j < T.Cast", "v_j <= T.Cast"),
        ("v_j + T.int64(3)", "v_j + T.int64(2)"),
        ("v_j // T.int64(8)", "v_j // T.int64(4)"),
        ("T.exp(", "T.exp2("),
    ],
)
def test_what_differs_in_one_place_is_not(of: str, other: str) -> None:
    script = canonical_of(DecodeSpec(**PLAIN | PAGED)).script()
    assert of in script
    assert read_attention_decode(canonical.canonical_module(tvm.script.from_source(script.replace(of, other))["main"])) is None
