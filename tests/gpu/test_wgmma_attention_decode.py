"""Attention against a KV cache on wgmma computes what the rule does: lengths, pages, dtypes, parameters, on a real GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.attention_decode_cases import DECODE
from support.gpu_kernels import Case, Checked, given, proposed
from support.wgmma_decode_cases import DECODES, PLAIN, SMALL

pytestmark = pytest.mark.gpu

TEMPLATE = "wgmma_attention_decode"
MLA = {"heads": 128, "kv_heads": 1, "head_dim": 576, "value_dim": 512, "latent": True}
DTYPES = ("float16", "bfloat16")
KEYS = (1, 63, 64, 65, 1000, 4097)
SEVERAL = given(TEMPLATE, PLAIN, PLAIN | {"cluster": 2, "split_k": 3})


def decode(name: str, choice: Any, attrs: dict[str, Any]) -> Case:
    return Case(name, DECODE, attrs, choice)


EMULATED = [Case(name, rule, SMALL | attrs, given(TEMPLATE, PLAIN | params)) for name, (rule, attrs, params) in DECODES.items()]
LENGTHS = [
    decode(f"{keys}-{page_size}", SEVERAL, MLA | {"batch": 5, "keys": keys, "page_size": page_size, "dtype": DTYPES[at % 2]})
    for at, (keys, page_size) in enumerate([*itertools.product(KEYS, (0,)), (1008, 16), (4096, 64), (4160, 64), (520, 8)])
]
LARGE = [
    decode("the policy's", proposed(TEMPLATE, step=2), MLA | {"batch": 64, "keys": 1024, "page_size": 64}),
    decode("one rank's heads", given(TEMPLATE, PLAIN | {"split_k": 2}), MLA | {"heads": 16, "batch": 32, "keys": 2048}),
    *(
        decode(
            f"rows of four heads, pages of {page_size}",
            given(TEMPLATE, PLAIN | {"stages": 4}, PLAIN | {"stages": 4, "split_k": 3}),
            {"batch": 3, "heads": 32, "kv_heads": 8, "keys": 4096, "head_dim": 128, "page_size": page_size},
        )
        for page_size in (0, 16, 64)
    ),
    decode("two queries", SEVERAL, MLA | {"queries": 2, "batch": 8, "keys": 2048, "page_size": 64}),
    decode(
        "sixteen queries, groups of eight",
        given(TEMPLATE, PLAIN | {"stages": 6}, PLAIN | {"stages": 4, "cluster": 2, "split_k": 4}),
        {"batch": 4, "heads": 32, "kv_heads": 4, "queries": 16, "keys": 4096, "head_dim": 128, "page_size": 16},
    ),
]


@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", LENGTHS, ids=str)
def test_lengths_and_pages_of_latent_attention(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_ones(case: Case, check: Checked) -> None:
    check(case)
