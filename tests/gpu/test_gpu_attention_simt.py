"""Attention on CUDA cores computes what the rule does: dtypes, head sizes, lengths and masks, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.attention_on_gpu import at_lengths, attention, large
from support.attention_simt_cases import ATTENTIONS, FLOAT32, PLAIN
from support.gpu_kernels import Case, Checked, given, proposed

pytestmark = pytest.mark.gpu

FIRST = proposed("gpu_attention_simt", step=20)
SEVERAL = proposed("gpu_attention_simt", step=6)
DTYPES = ("float32", "float32", "float32", "float16", "float32", "bfloat16")
HEADS = ({"head_dim": 64}, {"head_dim": 128}, {"head_dim": 256}, {"head_dim": 41}, {"head_dim": 64, "value_dim": 96}, {"head_dim": 33})
KINDS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"mask": True})


EMULATED = [attention(name, given("gpu_attention_simt", PLAIN | params), attrs) for name, (attrs, params) in ATTENTIONS.items()]
PROPOSED = at_lengths(FIRST, zip(HEADS, DTYPES, strict=True), KINDS)
LARGE = large(SEVERAL, FLOAT32, FLOAT32 | {"causal": True})


@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", PROPOSED, ids=str)
def test_what_the_policy_proposes(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_several_proposals_of_large_ones(case: Case, check: Checked) -> None:
    check(case)
