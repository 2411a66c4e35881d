"""Attention on mma.sync computes what the rule does: dtypes, head sizes, lengths, masks and variants of the kernel, on a real GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.attention_cases import SMALL
from support.attention_tc_cases import ATTENTIONS, PLAIN
from support.gpu_kernels import Case, Checked, given, proposed

pytestmark = pytest.mark.gpu

FIRST = proposed("gpu_attention_tc", step=20)
SEVERAL = proposed("gpu_attention_tc", step=6)
LENGTHS = ((1, 1), (7, 1000), (63, 63), (64, 65), (65, 64), (1000, 1000), (129, 4097))
"""Queries, keys."""
DTYPES = ("float16", "bfloat16", "bfloat16", "float16", "float16", "bfloat16")
HEADS = ({"head_dim": 64}, {"head_dim": 128}, {"head_dim": 256}, {"head_dim": 40}, {"head_dim": 64, "value_dim": 96}, {"head_dim": 72})
KINDS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"mask": True})


def attention(name: str, choice: Any, attrs: dict[str, Any]) -> Case:
    return Case(name, "attention", SMALL | attrs, choice)


EMULATED = [attention(name, given("gpu_attention_tc", PLAIN | params), attrs) for name, (attrs, params) in ATTENTIONS.items()]
PROPOSED = [
    attention(
        f"{'-'.join(map(str, head.values()))}-{queries}x{keys}-{'-'.join(kind)}",
        FIRST,
        {"batch": 2, "heads": 6, "kv_heads": 2, "queries": queries, "keys": keys, "dtype": dtype, **head, **kind},
    )
    for (head, dtype), (queries, keys), kind in itertools.product(zip(HEADS, DTYPES, strict=True), LENGTHS, KINDS)
]
LARGE = [
    attention("large", SEVERAL, {"batch": 1, "heads": 16, "kv_heads": 4, "queries": 2048, "keys": 2048, "head_dim": 128, **more})
    for more in (
        {},
        {"causal": True},
        {"head_dim": 64, "layout": "bshd", "causal": True},
        {"layout": "bshd", "queries": 1999},
    )
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
