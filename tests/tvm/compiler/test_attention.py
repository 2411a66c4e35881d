"""A function is recognised as attention, with its sizes and kind, if it computes one; an iteration space tells the same sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import tvm
from support.repository import REPOSITORY

from kerneldecl.analysis.attention import attention_of
from kerneldecl.analysis.band import Band
from kerneldecl.compiler import canonical
from kerneldecl.compiler.attention import AttentionSpec, attention_func, read_attention
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_rule
from kerneldecl.serial import space_from_json, to_json

PLAIN: dict[str, Any] = {
    "batch": 2,
    "heads": 4,
    "kv_heads": 2,
    "queries": 5,
    "keys": 7,
    "head_dim": 8,
    "value_dim": 6,
    "dtype": "float16",
    "scale": 0.25,
}
SPECS = [
    AttentionSpec(**PLAIN | changes)
    for changes in (
        {},
        {"layout": "bshd"},
        {"band": Band(None, 2)},
        {"band": Band(None, -2), "queries": 7, "keys": 5, "dtype": "bfloat16"},
        {"band": Band(-1, 3)},
        {"band": Band(1, None), "keys": 1, "queries": 3},
        {"mask": (5, 7), "dtype": "float32"},
        {"mask": (2, 1, 5, 7), "band": Band(None, 2), "kv_heads": 4},
        {"mask": (2, 1, 1, 7), "mask_dtype": "bool", "scale": 1.0},
        {"mask": (5, 7), "mask_dtype": "bool", "band": Band(None, 2)},
        {"alibi": 2, "band": Band(None, 2)},
        {"alibi": 0, "mask": (1, 4, 5, 7), "mask_dtype": "float32"},
        {"softcap": 30.0},
        {"softcap": 30.0, "scale": 1.0, "has_logsumexp": True},
        {"dtype": "float8_e4m3fn"},
        {"dtype": "float8_e4m3fn", "mask": (5, 7), "mask_dtype": "bool"},
        {"dtype": "float8_e4m3fn", "out_dtype": "float16", "softcap": 2.0, "alibi": 0, "mask": (5, 7), "band": Band(-1, 3)},
        {"layout": "packed", "keys": 5, "value_dim": 8, "kv_heads": 4},
        {"layout": "packed", "keys": 5, "value_dim": 8, "has_logsumexp": True},
        {"scale": 1.0, "kv_heads": 1, "batch": 1},
        {"heads": 5, "queries": 5, "kv_heads": 5, "keys": 5, "layout": "bshd"},
        {"queries": 1, "keys": 1, "head_dim": 1, "value_dim": 1},
    )
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_attention_is_recognised_whatever_its_names(spec: AttentionSpec) -> None:
    mod = canonical.load(canonical.save(canonical.canonical_module(attention_func(spec))))
    found = read_attention(mod)
    assert found is not None
    assert canonical.canonical_text(canonical.canonical_module(attention_func(found))) == canonical.canonical_text(mod)
    if spec.heads != spec.queries:
        assert found == replace(spec, mask_dtype=spec.bias_dtype, out_dtype=spec.result_dtype)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_iteration_space_tells_its_sizes(spec: AttentionSpec) -> None:
    space = iter_space(canonical.canonical_module(attention_func(spec)))
    assert attention_of(space) == spec.sizes
    assert attention_of(space_from_json(json.loads(json.dumps(to_json(space))))) == spec.sizes


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("softmax", {"shape": (2, 3, 5, 7), "dtype": "float16"}),
        ("matmul", {"m": 5, "n": 6, "k": 7, "batch": 3}),
        ("elementwise", {"op": "add", "shape": (2, 3, 4, 5)}),
    ],
)
def test_others_are_not(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(load_rule(REPOSITORY, name)(**attrs))
    assert read_attention(mod) is None
    assert attention_of(iter_space(mod)) is None


@pytest.mark.parametrize(
    ("of", "other"),
    [
        ("scores[v_b, v_h, v_i, v_j] * T.float32(0.25)", "scores[v_b, v_h, v_i, v_j] + T.float32(0.25)"),
        ("T.exp(", "T.exp2("),
        ("v_j <= v_i + T.int64(2)", "v_j <= v_i + T.int64(1)"),
        ("v_h // T.int64(2)", "v_h % T.int64(2)"),
        ("T.float32(20.0)) * T.float32(20.0)", "T.float32(20.0)) * T.float32(21.0)"),
        (" - slopes[v_h] *", " + slopes[v_h] *"),
        ("v_i + T.int64(2) - v_j)", "v_i + T.int64(1) - v_j)"),
        ("== T.float32(0.0)", "< T.float32(0.0)"),
    ],
)
def test_what_differs_in_one_place_is_not(of: str, other: str) -> None:
    spec = AttentionSpec(**PLAIN | {"band": Band(None, 2), "alibi": 2, "softcap": 20.0})
    script = canonical.canonical_module(attention_func(spec)).script()
    assert of in script
    changed = tvm.script.from_source(script.replace(of, other))
    assert read_attention(canonical.canonical_module(changed["main"])) is None
