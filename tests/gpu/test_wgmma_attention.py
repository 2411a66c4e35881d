"""Attention on wgmma computes what the rule does: dtypes, head sizes, lengths, masks and variants of the kernel, on a real GPU.

Each kernel is launched in CUDA graphs, between guards, twice on the same inputs, which must give the same bits, and on special values.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.attention_cases import ATTENTIONS, PLAIN, SMS
from support.attention_on_gpu import LENGTHS, at_lengths, attention, large
from support.gpu_kernels import Case, Checked, given, proposed

pytestmark = pytest.mark.gpu

FIRST = proposed("wgmma_attention", step=20)
SEVERAL = proposed("wgmma_attention", step=6)
DTYPES = ("float16", "bfloat16", "bfloat16", "float16", "float16")
HEADS: tuple[dict[str, int], ...] = (
    {"head_dim": 64},
    {"head_dim": 128},
    {"head_dim": 256},
    {"head_dim": 40},
    {"head_dim": 96, "value_dim": 64},
)


EMULATED = [attention(name, given("wgmma_attention", PLAIN | params), attrs, SMS) for name, (attrs, params) in ATTENTIONS.items()]
PROPOSED = at_lengths(FIRST, zip(HEADS, DTYPES, strict=True), ({}, {"causal": True}))
KINDS: dict[str, dict[str, Any]] = {
    "window": {"causal": True, "window": 50},
    "window to both sides": {"window": 33, "align": "start"},
    "aligned to the start": {"causal": True, "align": "start"},
    "softcap": {"softcap": 5.0, "causal": True},
    "ALiBi": {"alibi": True, "causal": True},
    "ALiBi to both sides": {"alibi": True},
    "mask": {"mask": True},
    "mask of heads": {"mask": True, "mask_axes": "bhqk", "mask_dtype": "float32", "causal": True},
    "boolean mask": {"mask": True, "mask_axes": "bqk", "mask_dtype": "bool"},
    "mask of keys": {"mask": True, "mask_axes": "bk"},
    "logsumexp": {"logsumexp": True, "causal": True},
    "packed": {"layout": "packed"},
    "all at once": {
        "layout": "packed",
        "causal": True,
        "window": 300,
        "softcap": 9.0,
        "alibi": True,
        "mask": True,
        "mask_axes": "bhqk",
        "logsumexp": True,
    },
}


def of_kind(number: int, kind: str, queries: int, keys: int) -> Case:
    """Return a case of a kind of attention; head sizes, dtypes and layouts take turns."""
    head, dtype = HEADS[number % len(HEADS)], DTYPES[number % len(DTYPES)]
    attrs = {"batch": 2, "heads": 4, "kv_heads": 2, "queries": queries, "keys": keys, "layout": ("bhsd", "bshd")[number % 2]}
    attrs |= {"dtype": dtype, **head, **KINDS[kind]}
    if attrs["layout"] == "packed":
        attrs |= {"queries": keys, "value_dim": 0}
    return attention(f"{kind}-{head['head_dim']}-{queries}x{keys}", FIRST, attrs)


OF_KINDS = [of_kind(number, kind, *lengths) for number, (kind, lengths) in enumerate(itertools.product(KINDS, LENGTHS))]
FLOAT8: dict[str, Any] = {"dtype": "float8_e4m3fn"}
OF_FLOAT8 = [
    attention(
        f"float8-{head_dim}-{queries}x{keys}{'-causal' if causal else ''}",
        FIRST,
        {"batch": 2, "heads": 6, "kv_heads": 2, "queries": queries, "keys": keys, "causal": causal, "head_dim": head_dim, **FLOAT8},
    )
    for head_dim, (queries, keys), causal in itertools.product((64, 128, 256), LENGTHS, (False, True))
] + [
    attention(f"float8-{kind}", FIRST, {"heads": 4, "kv_heads": 2, "queries": 1000, "keys": 1000, "head_dim": 128, **FLOAT8, **attrs})
    for kind, attrs in KINDS.items()
]
LARGE = large(
    SEVERAL,
    {"causal": True, "window": 512, "softcap": 30.0},
    {"mask": True, "alibi": True, "logsumexp": True},
    FLOAT8,
    {**FLOAT8, "causal": True, "layout": "bshd", "out_dtype": "float16"},
    {**FLOAT8, "head_dim": 64},
)


@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", PROPOSED, ids=str)
def test_what_the_policy_proposes(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", OF_KINDS, ids=str)
def test_every_kind_of_attention(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", OF_FLOAT8, ids=str)
def test_attention_in_float8(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_several_proposals_of_large_ones(case: Case, check: Checked) -> None:
    check(case)
