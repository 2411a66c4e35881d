"""Owns the small attentions against a KV cache that the template on CUDA cores is tested with, on the emulated GPU and on a real one.

Knows nothing of how they are run. A case is a line: a rule, attributes and parameters that differ from the plain ones.
"""

from __future__ import annotations

from typing import Any

from kerneldecl.model import Value
from support.attention_decode_cases import DECODE, PLAIN_ATTENTION, Case

PLAIN: dict[str, Value] = {"rows": 2, "lanes": 8, "unroll": 2, "warps": 2, "split_k": 1, "blocks": 1}
SMALL: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "keys": 100, "head_dim": 64, "dtype": "float32"}
DECODES: dict[str, Case] = {
    "one query": (DECODE, {}, {}),
    "a head of keys for each head, three parts": (DECODE, {"batch": 3, "kv_heads": 4}, {"rows": 1, "split_k": 3, "warps": 3, "lanes": 4}),
    "parts shorter than a block": (DECODE, {"keys": 9}, {"split_k": 4}),
    "several queries, more rows than one block takes": (DECODE, {"queries": 3, "heads": 6, "layout": "bshd"}, {"rows": 4, "split_k": 2}),
    "sixteen queries": (DECODE, {"queries": 16, "keys": 40}, {"rows": 8, "lanes": 16}),
    "more queries than keys": (DECODE, {"queries": 5, "keys": 3}, {"rows": 5}),
    "one head of keys, bshd": (DECODE, {"kv_heads": 1, "layout": "bshd", "head_dim": 128}, {"rows": 4, "lanes": 32, "unroll": 4}),
    "pages": (DECODE, {"page_size": 16, "keys": 112}, {"split_k": 2}),
    "pages, bshd, more than needed": (DECODE, {"page_size": 32, "keys": 128, "layout": "bshd", "pages": 9}, {"unroll": 1, "warps": 1}),
    "pages of three keys": (DECODE, {"page_size": 3, "keys": 99}, {"split_k": 3, "unroll": 4}),
    "heads of 72, values of 24": (DECODE, {"head_dim": 72, "value_dim": 24}, {"lanes": 4, "unroll": 1}),
    "heads of 42, values of 20": (DECODE, {"head_dim": 42, "value_dim": 20}, {"split_k": 2}),
    "more lanes than vectors of a row": (DECODE, {}, {"lanes": 32, "unroll": 8, "split_k": 2}),
    "latent, in pages": (
        DECODE,
        {"latent": True, "head_dim": 96, "value_dim": 64, "kv_heads": 1, "heads": 5, "page_size": 16, "keys": 112},
        {"split_k": 3, "rows": 5, "lanes": 16},
    ),
    "latent, rows of one vector and a half for each lane": (
        DECODE,
        {"latent": True, "head_dim": 48, "value_dim": 32, "kv_heads": 1},
        {"rows": 4},
    ),
    "float16": (DECODE, {"dtype": "float16"}, {"lanes": 4, "split_k": 2}),
    "bfloat16, pages": (DECODE, {"dtype": "bfloat16", "page_size": 8, "keys": 96}, {"split_k": 2, "warps": 4}),
    "one key": (DECODE, {"keys": 1}, {}),
    "no lengths": (PLAIN_ATTENTION, {"queries": 1}, {"split_k": 2}),
    "no lengths, causal": (PLAIN_ATTENTION, {"queries": 5, "causal": True}, {"split_k": 2, "rows": 5}),
    "no lengths, causal, more queries than keys": (PLAIN_ATTENTION, {"queries": 9, "keys": 3, "causal": True}, {"rows": 6}),
    "no lengths, all see all": (PLAIN_ATTENTION, {"queries": 16, "heads": 2, "layout": "bshd"}, {"split_k": 4, "rows": 8}),
}
