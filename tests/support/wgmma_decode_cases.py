"""Owns the small attentions against a KV cache that their template on wgmma is tested with, on the emulated GPU and on a real one.

Knows nothing of how they are run. A case is a line: a rule, attributes and parameters that differ from the plain ones.
"""

from __future__ import annotations

from typing import Any

from support.attention_decode_cases import DECODE, PLAIN_ATTENTION, Case

PLAIN = {"stages": 2, "split_k": 1, "cluster": 1, "turns": 0}
SMALL: dict[str, Any] = {"batch": 2, "heads": 20, "kv_heads": 1, "keys": 320, "head_dim": 192, "dtype": "float16"}
LATENT = {"latent": True, "value_dim": 128}
DECODES: dict[str, Case] = {
    "latent": (DECODE, LATENT, {}),
    "latent, pages of a block": (DECODE, LATENT | {"page_size": 64, "dtype": "bfloat16"}, {}),
    "latent, pages of 16, parts": (DECODE, LATENT | {"page_size": 16, "batch": 3}, {"split_k": 2}),
    "latent, pages of two blocks, bshd": (DECODE, LATENT | {"page_size": 128, "keys": 384, "layout": "bshd", "pages": 9}, {}),
    "latent, clusters, pages of 8": (
        DECODE,
        LATENT | {"page_size": 8, "heads": 100, "dtype": "bfloat16", "pages": 60},
        {"cluster": 2, "split_k": 2},
    ),
    "latent, 576 and 512": (DECODE, {"latent": True, "batch": 1, "heads": 70, "head_dim": 576, "value_dim": 512, "keys": 200}, {}),
    "latent, keys of 200": (DECODE, LATENT | {"head_dim": 200, "queries": 3}, {}),
    "sixteen queries of a group of eight": (DECODE, {"queries": 16, "heads": 16, "kv_heads": 2, "head_dim": 128}, {"stages": 4}),
    "values of 256, clusters, bshd": (
        DECODE,
        {"queries": 5, "heads": 40, "head_dim": 72, "value_dim": 256, "layout": "bshd"},
        {"stages": 4, "cluster": 2},
    ),
    "several pairs of blocks in shared memory": (
        DECODE,
        {"head_dim": 128, "keys": 1024, "batch": 1, "page_size": 32},
        {"stages": 6},
    ),
    "values of 384": (DECODE, {"head_dim": 64, "value_dim": 384, "kv_heads": 4, "page_size": 64}, {"split_k": 3}),
    "in turns": (DECODE, LATENT | {"keys": 1000, "batch": 3}, {"turns": 1}),
    "parts in pages, in turns": (
        DECODE,
        LATENT | {"keys": 1008, "page_size": 16, "heads": 100},
        {"turns": 1, "split_k": 2, "cluster": 2},
    ),
    "one key": (DECODE, LATENT | {"keys": 1}, {"split_k": 2}),
    "no lengths": (PLAIN_ATTENTION, {"queries": 1, "head_dim": 128}, {"split_k": 2}),
    "no lengths, causal": (PLAIN_ATTENTION, {"queries": 7, "head_dim": 128, "causal": True, "heads": 10, "keys": 70}, {}),
    "no lengths, causal, more queries than keys": (PLAIN_ATTENTION, {"queries": 9, "keys": 3, "head_dim": 128, "causal": True}, {}),
}
