"""Attention against a KV cache on CUDA cores computes what the rule does: dtypes, head sizes, lengths, pages, on a real GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.attention_decode_cases import DECODE, PLAIN_ATTENTION
from support.attention_decode_simt_cases import DECODES, PLAIN, SMALL
from support.gpu_kernels import Case, Checked, given, proposed

pytestmark = pytest.mark.gpu

FIRST = proposed("gpu_attention_decode_simt", step=20)
SEVERAL = proposed("gpu_attention_decode_simt", step=6)
HEADS = (64, 128, 256, 36)
KEYS = (1, 7, 65, 1000, 4097)
LLAMA = {"batch": 3, "heads": 32, "kv_heads": 8, "keys": 4096, "head_dim": 128}
LATENT = {"batch": 4, "heads": 32, "kv_heads": 1, "keys": 2048, "head_dim": 576, "value_dim": 512, "latent": True}


def decode(name: str, choice: Any, attrs: dict[str, Any], rule: str = DECODE) -> Case:
    return Case(name, rule, SMALL | attrs, choice)


EMULATED = [
    decode(name, given("gpu_attention_decode_simt", PLAIN | params), attrs, rule) for name, (rule, attrs, params) in DECODES.items()
]
PROPOSED = [
    decode(f"{head}-{keys}-{queries}", FIRST, {"head_dim": head, "keys": keys, "queries": queries, "heads": 6})
    for head, keys, queries in itertools.product(HEADS, KEYS, (1, 5))
]
LARGE = [
    decode(name, SEVERAL, attrs)
    for name, attrs in {
        "contiguous": LLAMA,
        "bshd": LLAMA | {"layout": "bshd"},
        "pages of 16": LLAMA | {"page_size": 16},
        "a head of keys for each head": LLAMA | {"kv_heads": 32},
        "sixteen queries": LLAMA | {"queries": 16, "page_size": 64},
        "latent": LATENT | {"page_size": 64},
        "latent, contiguous": LATENT | {"queries": 2},
        "one sequence": LLAMA | {"batch": 1, "keys": 32768},
    }.items()
]
NO_LENGTHS = [decode("no lengths", SEVERAL, LLAMA | {"queries": queries, "causal": True}, PLAIN_ATTENTION) for queries in (1, 4)]


@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", PROPOSED, ids=str)
def test_what_the_policy_proposes(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", [*LARGE, *NO_LENGTHS], ids=str)
def test_several_proposals_of_large_ones(case: Case, check: Checked) -> None:
    check(case)
