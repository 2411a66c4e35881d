"""Attention on mma.sync computes what the rule does: dtypes, head sizes, lengths, masks and variants of the kernel, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.attention_on_gpu import at_lengths, attention, large
from support.attention_tc_cases import ATTENTIONS, PLAIN
from support.gpu_kernels import Case, Checked, given, proposed

pytestmark = pytest.mark.gpu

FIRST = proposed("gpu_attention_tc", step=20)
SEVERAL = proposed("gpu_attention_tc", step=6)
HEADS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"head_dim": 64}, "float16"),
    ({"head_dim": 128}, "bfloat16"),
    ({"head_dim": 256}, "bfloat16"),
    ({"head_dim": 40}, "float16"),
    ({"head_dim": 64, "value_dim": 96}, "float16"),
    ({"head_dim": 72}, "bfloat16"),
    ({"head_dim": 512}, "float16"),
    ({"head_dim": 296}, "bfloat16"),
    ({"head_dim": 40}, "float8_e4m3fn"),
)
KINDS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"mask": True})


EMULATED = [attention(name, given("gpu_attention_tc", PLAIN | params), attrs) for name, (attrs, params) in ATTENTIONS.items()]
PROPOSED = at_lengths(FIRST, HEADS, KINDS)
LARGE = large(SEVERAL, {"head_dim": 512, "heads": 1, "kv_heads": 1}, {"head_dim": 64, "dtype": "float8_e4m3fn", "causal": True})


@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", PROPOSED, ids=str)
def test_what_the_policy_proposes(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_several_proposals_of_large_ones(case: Case, check: Checked) -> None:
    check(case)
