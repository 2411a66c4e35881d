"""Attention on wgmma computes what the rule does: dtypes, head sizes, lengths, masks and variants of the kernel, on a real GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.attention_cases import ATTENTIONS, PLAIN, SMALL, SMS
from support.gpu_kernels import Case, Checked, given, proposed

pytestmark = pytest.mark.gpu

FIRST = proposed("wgmma_attention", step=20)
SEVERAL = proposed("wgmma_attention", step=6)
LENGTHS = ((1, 1), (7, 1000), (63, 63), (64, 65), (65, 64), (1000, 1000), (129, 4097))
"""Queries, keys."""
DTYPES = ("float16", "bfloat16", "bfloat16", "float16", "float16")
HEADS = ({"head_dim": 64}, {"head_dim": 128}, {"head_dim": 256}, {"head_dim": 40}, {"head_dim": 96, "value_dim": 64})


def attention(name: str, choice: Any, attrs: dict[str, Any], sms: int = 0) -> Case:
    return Case(name, "attention", SMALL | attrs, choice, sms)


EMULATED = [attention(name, given("wgmma_attention", PLAIN | params), attrs, SMS) for name, (attrs, params) in ATTENTIONS.items()]
PROPOSED = [
    attention(
        f"{'-'.join(map(str, head.values()))}-{queries}x{keys}{'-causal' if causal else ''}",
        FIRST,
        {"batch": 2, "heads": 6, "kv_heads": 2, "queries": queries, "keys": keys, "causal": causal, "dtype": dtype, **head},
    )
    for (head, dtype), (queries, keys), causal in itertools.product(zip(HEADS, DTYPES, strict=True), LENGTHS, (False, True))
]
LARGE = [
    attention("large", SEVERAL, {"batch": 1, "heads": 16, "kv_heads": 4, "queries": 2048, "keys": 2048, "head_dim": 128, **more})
    for more in ({}, {"causal": True}, {"head_dim": 64, "layout": "bshd", "causal": True}, {"layout": "bshd", "queries": 1999})
]


@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", PROPOSED, ids=str)
def test_what_the_policy_proposes(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_several_proposals_of_large_ones(case: Case, check: Checked) -> None:
    check(case)
